"""Every pair of settings with extreme and invalid values: C and Python accept and refuse the same, and name the field.

What must be refused is written down here once more, from the documentation, so that both are judged by it. The pairs
are tried on several starting points, so that a third setting decides as well.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from llama_dge import DGEConfig
from llama_dge.config import POLICIES
from reference import driver

MOST = 2**24  # of any number of entries or tokens

Settings = Mapping[str, Any]


class Own:
    """A policy of one's own, which is never called here."""

    def select(self, scores: Any, n_rows: int, layer: int) -> Any:
        raise AssertionError("settings are checked without a selection")


OWN = Own()
TABLE, SHORT_TABLE = ((64, 40), (9, 1024)), ((64, 40), (7, 1024))


@dataclass(frozen=True)
class Bad:
    """A value that no other setting makes valid; `in_c` where it is another one in C."""

    value: Any
    in_c: Any = None


# values of each setting, as Python spells them. The two differ on purpose, and not here, in: a share of 0.0 and
# park_limit=0, which are "not set" in C; recall=-1, which is "auto" in C; types and numbers beyond an int32
VALUES: dict[str, list[Any]] = {
    "policy": [*POLICIES, OWN, Bad("SnapKV"), Bad("")],
    "scores": ["auto", "draft", "policy", "both", Bad("all", 4), Bad("last", -1)],
    "pooling": ["none", "max", "avg", Bad("min", 3), Bad("mean", -1)],
    "kernel_size": [1, 7, MOST - 1, Bad(MOST), Bad(4), Bad(0), Bad(-3)],
    "budget": [1, 8, 11, 12, 1024, MOST, MOST + 1, 0, -1, 0.25, 1.0, Bad(1.5), Bad(-0.1), Bad(math.nan), Bad(math.inf)],
    "draft_tokens": [1, 8, MOST, Bad(MOST + 1), Bad(2**31 - 1), Bad(0), Bad(-1)],
    "window": [1, 8, 1025, MOST, Bad(MOST + 1), Bad(0), Bad(-8)],
    "sinks": [0, 4, 1017, MOST, Bad(MOST + 1), Bad(-1)],
    "layer_budgets": ["exact", "reference", Bad("published", 2), Bad("floor", -1)],
    "head_budgets": ["uniform", "adaptive", TABLE, SHORT_TABLE, Bad("even", 3), Bad("odd", -1)],
    "park": ["off", "ram", "disk", Bad("gpu", 3), Bad("file", -1)],
    "park_dir": [None, "/a folder", ""],
    "park_limit": [None, 1, 2**62 - 1, Bad(-1)],
    "recall": [0, 1, "auto", MOST, Bad(MOST + 1), Bad(-2)],
    "recall_mass": [1e-6, 0.9, 1.0, Bad(0.0), Bad(-0.5), Bad(1.1), Bad(math.nan), Bad(math.inf)],
    "recall_async": [False, True],
}
FIELDS = list(VALUES)
DEFAULTS: dict[str, Any] = {name: getattr(DGEConfig(), name) for name in FIELDS}

STARTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "streamingllm": {"policy": "streamingllm", "budget": 12},
    "own policy": {"policy": OWN},
    "recall": {"recall": 4},
    "table": {"head_budgets": TABLE},
    "disk": {"park": "disk", "park_dir": "/a folder"},
    "a share": {"budget": 0.5, "policy": "streamingllm"},
}


# what must be refused


def least_budget(s: Settings) -> int:
    return int(s["window"]) + (int(s["sinks"]) if s["policy"] == "streamingllm" else 0)


def is_table(s: Settings) -> bool:
    return isinstance(s["head_budgets"], tuple)


def counts_entries(s: Settings) -> bool:
    return isinstance(s["budget"], int) and not is_table(s)


RULES: dict[str, Callable[[Settings], bool]] = {
    "budget": lambda s: counts_entries(s) and not least_budget(s) <= s["budget"] <= MOST,
    "head_budgets table": lambda s: (
        is_table(s) and (s["policy"] is OWN or min(n for heads in s["head_budgets"] for n in heads) < least_budget(s))
    ),
    "head_budgets adaptive": lambda s: s["head_budgets"] == "adaptive" and s["policy"] in ("streamingllm", OWN),
    "park_dir": lambda s: s["park"] == "disk" and s["park_dir"] == "",
    "recall": lambda s: s["recall"] != 0 and s["park"] != "ram",
    "scores": lambda s: s["recall"] != 0 and s["scores"] not in ("auto", "draft"),
    "recall_async": lambda s: s["recall_async"] and s["policy"] is OWN,
}


def expected(case: Settings) -> set[str]:
    """Fields of which a refusal must name one; empty where the settings are valid."""
    bad = {name for name, value in case.items() if isinstance(value, Bad)}
    # what a bad value breaks beside itself is not asked
    values = {name: DEFAULTS[name] if isinstance(value, Bad) else value for name, value in case.items()}
    return bad | {rule.split()[0] for rule, refuses in RULES.items() if refuses(values)}


# the two sides


def by_python(case: Settings) -> str | None:
    try:
        DGEConfig(**{name: value.value if isinstance(value, Bad) else value for name, value in case.items()})
    except ValueError as error:
        return str(error)
    return None


def c_value(name: str, value: Any) -> Any:
    if isinstance(value, Bad):
        return value.value if value.in_c is None else value.in_c
    if name == "recall" and value == "auto":
        return driver.RECALL_AUTO
    return value


def by_c(case: Settings) -> str | None:
    settings = {name: c_value(name, value) for name, value in case.items()}
    if isinstance(settings["budget"], float):
        settings["budget_share"] = settings.pop("budget")
    if isinstance(settings["head_budgets"], tuple):
        settings |= {"table": settings["head_budgets"], "head_budgets": "table"}
    if settings["policy"] is OWN:
        del settings["policy"]
        settings["select"] = lambda *_: -1
    # Python has folders and limits that C has no word for
    settings["park_dir"] = "/tmp" if settings["park_dir"] is None else settings["park_dir"]
    settings["park_limit"] = settings["park_limit"] or 0
    params, reason = driver.raw_params(**settings), ctypes.create_string_buffer(512)
    status = driver.dge_library().llama_dge_check_params(ctypes.byref(params), reason, len(reason))
    assert status in (driver.OK, driver.ERR_PARAMS)
    assert (status == driver.OK) == (reason.value == b"")
    return reason.value.decode() or None


def cases(start: Settings) -> Iterator[dict[str, Any]]:
    """All pairs of values of two settings, over the values that the others have at the start."""
    base = {**DEFAULTS, **start}
    for a, b in combinations(FIELDS, 2):
        for x in VALUES[a]:
            for y in VALUES[b]:
                yield {**base, a: x, b: y}


def names_one(message: str, fields: set[str]) -> bool:
    """The message begins with a field and, but for a table, its value: `window=0: must be ...`"""
    found = re.match(r"(\w+?)(?:_share)?(=|: \d+ entries)", message)
    return found is not None and found[1] in fields and re.search("must be|needs|cannot|decides", message) is not None


@pytest.mark.parametrize("start", STARTS)
def test_c_and_python_agree(start: str) -> None:
    wrong, n_refused, n_cases = [], 0, 0
    for case in cases(STARTS[start]):
        want = expected(case)
        n_cases += 1
        n_refused += bool(want)
        for side, message in (("C", by_c(case)), ("Python", by_python(case))):
            if (message is not None) != bool(want) or (message is not None and not names_one(message, want)):
                changed = {name: value for name, value in case.items() if value != DEFAULTS[name]}
                wrong.append((side, changed, sorted(want), message))
    assert not wrong, (len(wrong), wrong[:5])
    # the table has both kinds
    assert n_cases > 3000 and 0.3 * n_cases < n_refused < 0.9 * n_cases


def test_all_settings_of_the_library_are_in_the_table() -> None:
    fields = {name for name, _ in driver.Params._fields_}
    in_python = {"budget_share": "budget", "table": "head_budgets", "n_table": "head_budgets"}
    in_python |= {"select": "policy", "select_user_data": "policy"}
    assert {in_python.get(name, name) for name in fields} == set(FIELDS)


def test_ranges_are_those_that_are_checked() -> None:
    """llama_dge_get_field(): the ends are accepted, and what is beyond them is refused by its name."""
    info, lib, seen = driver.FieldInfo(), driver.dge_library(), []
    while lib.llama_dge_get_field(len(seen), ctypes.byref(info)):
        name = info.name.decode()
        seen.append(name)
        whole = name not in ("budget_share", "recall_mass")
        step = 1 if whole else 1e-3
        for value in (info.least - step, info.most + step):
            params = driver.raw_params(**{name: int(value) if whole else value})
            reason = ctypes.create_string_buffer(256)
            assert lib.llama_dge_check_params(ctypes.byref(params), reason, len(reason)) == driver.ERR_PARAMS, name
            assert reason.value.decode().startswith(f"{name}="), reason.value
    assert not lib.llama_dge_get_field(-1, ctypes.byref(info))
    # in the order of the structure
    assert seen == [name for name, _ in driver.Params._fields_ if name in seen]
    numbers = [
        name for name, kind in driver.Params._fields_ if kind in (ctypes.c_int32, ctypes.c_float) and name != "n_table"
    ]
    assert seen == numbers


@pytest.mark.parametrize("n", [0, 1, 10, 512])
def test_a_reason_fits_its_buffer(n: int) -> None:
    params = driver.raw_params(budget=3)
    buffer = ctypes.create_string_buffer(b"\x55" * 600, 600)
    assert driver.dge_library().llama_dge_check_params(ctypes.byref(params), buffer, n) == driver.ERR_PARAMS
    assert buffer.raw[n:] == b"\x55" * (600 - n)
    assert n == 0 or b"\0" in buffer.raw[:n]
    assert driver.dge_library().llama_dge_check_params(ctypes.byref(params), None, 0) == driver.ERR_PARAMS


def test_the_defaults_are_valid_and_python_shows_them() -> None:
    params = driver.dge_library().llama_dge_default_params()
    assert driver.dge_library().llama_dge_check_params(ctypes.byref(params), None, 0) == driver.OK
    for name in ("kernel_size", "budget", "draft_tokens", "window", "sinks", "recall", "recall_async"):
        assert getattr(params, name) == DEFAULTS[name], name
    for name, values in driver.ENUMS.items():
        assert getattr(params, name) == values[DEFAULTS[name]], name
    assert params.policy.decode() == DEFAULTS["policy"] and params.budget_share == 0.0
    assert params.recall_mass == pytest.approx(DEFAULTS["recall_mass"])
    assert not params.table and params.n_table == 0 and not params.select
    assert params.park_dir is None and params.park_limit == 0
