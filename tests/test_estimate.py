"""llama_dge_get_estimate(): what it returns for a prompt is what the context holds when the prompt was evicted."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge.config import POLICIES
from reference import driver
from reference.scenario import prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

N_PROMPT = 700
TABLE = [[40, 90], [64, 8], [8, 30]]  # of the model g2

CASES: list[dict[str, Any]] = [
    {},
    {"draft_tokens": 1},
    {"budget_share": 0.3},
    {"scores": "both", "window": 32, "park": "ram"},
    *({"policy": policy, "sinks": 9} for policy in POLICIES),
    {"policy": "pyramidkv", "layer_budgets": "reference"},
    {"policy": "pyramidkv", "head_budgets": "adaptive", "park": "ram"},
    {"policy": "h2o", "scores": "policy", "park": "ram"},
    {"policy": "h2o", "scores": "auto", "head_budgets": "adaptive"},
    {"head_budgets": "adaptive"},
    {"head_budgets": "table", "table": TABLE, "park": "ram"},
    {"recall": 4, "park": "ram"},
    {"recall": 4, "park": "ram", "head_budgets": "adaptive"},
]
CACHES = [{}, {"elastic": True}, {"elastic": True, "flash_attn": True, "type_k": "q8_0", "type_v": "q4_0"}]


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimate_is_what_is_used(new_context: ContextFactory, case: dict[str, Any], cache: dict[str, Any]) -> None:
    dge = {"budget": 120, "draft_tokens": 3, **case}
    # estimated by a context that neither evicts nor grows, as before a model is used
    idle = {name: value for name, value in cache.items() if name != "elastic"}
    want = new_context("g2", n_ctx=2048, **idle).estimate(N_PROMPT, elastic="elastic" in cache, **dge)
    context = new_context("g2", n_ctx=2048, **cache, dge=dge)
    tokens = tokens_of(N_PROMPT + 3, 0)
    prefill_and_arm(context, tokens[:N_PROMPT])
    for token in tokens[N_PROMPT : N_PROMPT + dge["draft_tokens"] - 1]:
        context.decode([token])
    before = context.memory_info()
    assert context.evict() == driver.OK
    after, info = context.memory_info(), context.info()

    assert want["status"] == driver.OK
    assert (want["n_rows"], want["n_cells"]) == (info["n_rows_before"], before["n_cells"])
    assert (want["kv"], want["kv_max"]) == (before["kv"], before["kv_max"])
    assert bool(want["at_most"]) == (case.get("head_budgets") == "adaptive")
    if want["at_most"]:
        assert want["n_rows_after"] > info["n_rows_after"] > 0
        assert want["n_cells_after"] >= after["n_cells"] and want["kv_after"] >= after["kv"]
    else:
        assert want["n_rows_after"] == info["n_rows_after"]
        assert (want["n_cells_after"], want["kv_after"]) == (after["n_cells"], after["kv"])
        assert want["dge"] == after["dge"]
    assert want["dge"] >= after["dge"]
    assert want["parked"] >= after["parked"] == info["bytes_parked"]
    assert want["parked"] <= 1.01 * after["parked"]


@pytest.mark.parametrize("n_prompt", [1, 40, 119, 120])
def test_a_prompt_within_the_budget(new_context: ContextFactory, n_prompt: int) -> None:
    context = new_context("g2", n_ctx=2048)
    found = context.estimate(n_prompt, budget=120, draft_tokens=3, park="ram")
    assert found["status"] == driver.NOTHING_TO_EVICT
    assert found["n_rows"] == found["n_rows_after"] == n_prompt + 2
    assert found["kv"] == found["kv_after"] and found["parked"] == 0 and not found["at_most"]
    assert context.estimate(121, budget=120)["status"] == driver.OK


def test_it_changes_nothing_and_needs_no_eviction(new_context: ContextFactory) -> None:
    context, plain = new_context("g2", n_ctx=2048), new_context("g2", n_ctx=2048)
    tokens = tokens_of(90, 1)
    for each in (context, plain):
        each.decode(tokens[:80], every=False)
    memory = context.memory_info()
    context.estimate(2000, budget=100, recall=4, park="ram", head_budgets="adaptive")
    assert context.memory_info() == memory and context.arm(80) == driver.ERR_DISABLED
    assert (context.decode(tokens[80:]) == plain.decode(tokens[80:])).all()


@pytest.mark.parametrize(
    "n_prompt, settings",
    [
        (0, {}),
        (-1, {}),
        (100, {"budget": 7}),
        (100, {"window": 0}),
        (100, {"head_budgets": "table", "table": TABLE[:2]}),  # of another model
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(new_context: ContextFactory, n_prompt: int, settings: dict[str, Any]) -> None:
    context, found = new_context("g2"), driver.Estimate()
    params = driver.raw_params(**settings)
    estimate = driver.dge_library().llama_dge_get_estimate
    status = estimate(context.handle, ctypes.byref(params), n_prompt, False, ctypes.byref(found))
    assert status == driver.ERR_PARAMS and not any(found.as_dict().values())
