"""Eviction is switched on with settings that hold together, or not at all, and switched off without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.driver import Context
from reference.evicted import N_PROMPT, SETTINGS, TOKENS
from reference.policies import Settings
from reference.scenario import F32, evict_after, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory


BAD_PARAMS: list[dict[str, Any]] = [
    {"policy": "no such policy"},
    {"policy": ""},
    {"policy": "SnapKV"},
    {"policy": None},  # without a callback
    {"layer_budgets": 2},
    {"layer_budgets": -1},
    {"head_budgets": 3},
    {"head_budgets": -1},
    {"head_budgets": 2},  # without its table
    {"scores": 4},
    {"scores": -1},
    {"pooling": 3},
    {"pooling": -1},
    {"kernel_size": 0},
    {"kernel_size": 4},
    {"kernel_size": -3},
    {"budget": 0},
    {"budget": -1},
    {"budget": 7},
    {"policy": "streamingllm", "budget": 11},
    {"budget_share": -0.1},
    {"budget_share": 1.5},
    {"budget_share": float("nan")},
    {"budget_share": float("inf")},
    {"draft_tokens": 0},
    {"draft_tokens": -1},
    {"draft_tokens": 2**31 - 1},
    {"window": 0},
    {"window": -8},
    {"window": 65},
    {"window": 2**31 - 1},
    {"sinks": -1},
    {"policy": "streamingllm", "sinks": 2**31 - 1},
    {"park": 3},
    {"park": -1},
    {"park_limit": -1},
    {"park": "disk"},  # without its folder
    {"park": "disk", "park_dir": ""},
    {"recall": 4, "park": "off"},
    {"recall": 4, "park": "disk", "park_dir": "."},
    {"recall": 4, "park": "ram", "scores": "policy"},
    {"recall": 4, "park": "ram", "scores": "both"},
    {"recall": -2, "park": "ram"},
    {"recall": -1, "park": "ram", "recall_mass": 0.0},
    {"recall": -1, "park": "ram", "recall_mass": 1.5},
    {"recall": -1, "park": "ram", "recall_mass": float("nan")},
]


@pytest.mark.parametrize("bad", BAD_PARAMS, ids=str)
def test_bad_params_change_nothing(new_context: ContextFactory, bad: dict[str, Any]) -> None:
    settings = {**Settings().as_params(), **bad}
    context = new_context("one")
    assert context.enable(check=False, **settings) == driver.ERR_PARAMS
    assert context.arm(1) == driver.ERR_DISABLED
    context.enable(**SETTINGS.as_params())
    context.decode(TOKENS[:N_PROMPT])
    assert context.enable(check=False, **settings) == driver.ERR_PARAMS
    assert context.arm(N_PROMPT) == driver.OK


def test_disable_gives_the_stock_library_back(
    new_context: ContextFactory, evicted_context: Callable[..., Context]
) -> None:
    context, plain = evicted_context(), new_context("g2", **F32)
    context.clear()
    assert context.disable() == driver.OK
    assert context.arm(1) == driver.ERR_DISABLED
    tokens = tokens_of(100, 14)
    assert np.array_equal(context.decode(tokens), plain.decode(tokens))
    assert context.state() == plain.state()
    context.clear()
    context.enable(**SETTINGS.as_params())
    evict_after(context, TOKENS, N_PROMPT, 2)
