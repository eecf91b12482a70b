"""Python and C refuse the same settings, and give the same reason: every pair of fields, at and beyond their bounds."""

from __future__ import annotations

import ctypes
import dataclasses
from itertools import combinations
from typing import Any

import pytest

from llama_dge import DGEConfig
from reference.driver import dge_library, raw_params

MOST = 2**24
# what both can express; a name that is no choice exists in Python only
VALUES: dict[str, list[Any]] = {
    "policy": ["h2o", "pyramidkv", "snapkv", "streamingllm", "nope"],
    "scores": ["auto", "draft", "policy", "both"],
    "pooling": ["none", "max", "avg"],
    "kernel_size": [-1, 0, 1, 2, 7, MOST - 1, MOST, MOST + 1],
    "budget": [-1, 0, 1, 7, 8, 11, 12, MOST, MOST + 1, 0.25, 1.0],
    "draft_tokens": [0, 1, 2, MOST, MOST + 1],
    "window": [-1, 0, 1, 8, 1020, 1024, 1025, MOST + 1],
    "sinks": [-1, 0, 4, 1016, 1017, MOST + 1],
    "layer_budgets": ["exact", "reference"],
    "head_budgets": ["uniform", "adaptive", ((64, 64),), ((64, 11),), ((8, 7),), ((8, MOST + 1),)],
    "park": ["off", "ram", "disk"],
    "park_limit": [1, 2**40],
    "recall": [0, 1, 4, "auto", MOST, MOST + 1],
    "recall_mass": [-0.5, 0.0, 0.5, 1.0, 1.5],
    "recall_async": [False, True],
}
BASE = {field.name: field.default for field in dataclasses.fields(DGEConfig) if field.name in VALUES}


def reason_of_c(settings: dict[str, Any]) -> str | None:
    """What the library says of settings, without the package's own conversion."""
    values = {**BASE, **settings}
    if isinstance(values["budget"], float):
        values["budget_share"] = values.pop("budget")
    if not isinstance(values["head_budgets"], str):
        values["table"] = values["head_budgets"]
        values["head_budgets"] = "table"
    if values["recall"] == "auto":
        values["recall"] = -1
    values["park_limit"] = values["park_limit"] or 0
    params, reason = raw_params(**values, park_dir="/"), ctypes.create_string_buffer(512)
    status = dge_library().llama_dge_check_params(ctypes.byref(params), reason, len(reason))
    assert (status == 0) == (reason.value == b"")
    return reason.value.decode() or None


def reason_of_python(settings: dict[str, Any]) -> str | None:
    try:
        DGEConfig(**settings)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("one, other", list(combinations(VALUES, 2)), ids=str)
def test_a_pair_of_fields(one: str, other: str) -> None:
    for a in VALUES[one]:
        for b in VALUES[other]:
            settings = {one: a, other: b}
            reason = reason_of_c(settings)
            assert reason_of_python(settings) == reason, settings
            if reason is not None:
                # one of the two is named, or what does not go with it by default
                assert reason.partition("=")[0].partition(":")[0] in VALUES, reason


def test_both_verdicts_are_there() -> None:
    reasons = [reason_of_c({one: a}) for one, values in VALUES.items() for a in values]
    assert 20 < sum(reason is not None for reason in reasons) < len(reasons) - 20
    assert reason_of_c({}) is None
