"""llama_dge.Llama: settings that change between calls, calls after close(), interrupts in a policy."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from llama_dge import DGEError
from reference.instances import DGE, Instances, assert_evicted, greedy
from reference.scenario import tokens_of

if TYPE_CHECKING:
    pass

PROMPT = tokens_of(150, 0)
FEWER = {**DGE, "budget": 16}

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("n_answered", [1, 5])
@pytest.mark.parametrize("start", [None, DGE])
def test_a_prompt_that_was_read_while_eviction_was_off(new_llm: Instances, start: Any, n_answered: int) -> None:
    llm = new_llm(start)
    llm.set_dge(None)
    first = greedy(llm, PROMPT, n_answered)
    llm.set_dge(DGE)
    assert greedy(llm, PROMPT, 25) == greedy(new_llm(DGE), PROMPT, 25)
    assert_evicted(llm, len(PROMPT), 25)

    prompt = [*PROMPT, *first]  # the answer goes on
    llm.set_dge(None)
    greedy(llm, prompt, n_answered)
    llm.set_dge(DGE)
    assert greedy(llm, prompt, 25) == greedy(new_llm(DGE), prompt, 25)
    assert_evicted(llm, len(prompt), 25, n_evictions=llm.dge_stats.n_evictions)


@pytest.mark.parametrize("new_turn", ["restore", "reprefill"])
def test_other_settings_evict_anew_where_an_answer_goes_on(new_llm: Instances, new_turn: str) -> None:
    settings, fewer = {**DGE, "new_turn": new_turn}, {**FEWER, "new_turn": new_turn}
    llm = new_llm(fewer)
    prompt = [*PROMPT, *greedy(llm, PROMPT, 20)]
    llm.set_dge(settings)
    assert greedy(llm, prompt, 25) == greedy(new_llm(settings), prompt, 25)
    assert_evicted(llm, len(prompt), 25, settings, n_evictions=2)

    # the same settings, as another object: one answer in two calls
    llm = new_llm(settings)
    whole = greedy(new_llm(settings), PROMPT, 40)
    first = greedy(llm, PROMPT, 20)
    llm.set_dge(dict(settings))
    assert first + greedy(llm, [*PROMPT, *first], 20) == whole
    assert llm.dge_stats.n_evictions == 1


def test_evict_and_a_state_leave_an_eviction_that_goes_on(new_llm: Instances) -> None:
    llm = new_llm(FEWER)
    first = greedy(llm, PROMPT, 20)
    whole = greedy(new_llm(FEWER), PROMPT, 40)
    state = llm.save_state()
    other = new_llm(FEWER)
    other.load_state(state)
    assert first + greedy(other, [*PROMPT, *first], 20) == whole

    llm = new_llm(DGE)
    llm.eval(PROMPT)
    assert llm.evict()
    llm.set_dge(FEWER)
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(FEWER), PROMPT, 20)
    assert_evicted(llm, len(PROMPT), 20, FEWER, n_evictions=2)


def test_settings_that_do_not_fit_the_model_are_an_error_even_if_not_strict(new_llm: Instances) -> None:
    llm = new_llm({**DGE, "strict": False})
    with pytest.raises(ValueError, match="head_budgets"):
        llm.set_dge({**DGE, "head_budgets": [[32]], "strict": False})
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(DGE), PROMPT, 20)  # the old settings
    with pytest.raises(ValueError, match="head_budgets"):
        new_llm({**DGE, "head_budgets": [[32]], "strict": False})


def test_eviction_that_cannot_be_switched_on_is_off(new_llm: Instances, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(DGE)
    greedy(llm, PROMPT, 20)

    def fails(ctx: int, config: Any) -> None:
        raise DGEError("enabling eviction", -5)

    with monkeypatch.context() as patch:
        patch.setattr("llama_dge._native.enable", fails)
        with pytest.warns(RuntimeWarning, match="without eviction"):
            llm.set_dge({**FEWER, "strict": False})
    assert not llm.dge_enabled and llm.dge_stats is None
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(), PROMPT, 20)


def test_queries_are_held_for_no_more_tokens_than_the_context_has(new_llm: Instances) -> None:
    few, many = new_llm({**DGE, "draft_tokens": 1023}), new_llm({**DGE, "draft_tokens": 1 << 24})
    assert many.dge_memory.dge <= 1.01 * few.dge_memory.dge
    assert greedy(many, PROMPT, 20) == greedy(new_llm(), PROMPT, 20)


def test_set_cache_before_eviction_is_on(new_llm: Instances) -> None:
    llm = new_llm()
    llm.set_cache(llama_cpp.LlamaRAMCache())
    llm.set_dge(DGE)
    settings = {"max_tokens": 12, "temperature": 0.0, "logit_bias": {2: -100}}
    llm.create_completion(PROMPT, **settings)
    assert llm.cache.cache_size == 0  # the evicted sequence's state is not in it
    llm.set_dge(None)
    assert (
        llm.create_completion(PROMPT, **settings)["choices"]
        == new_llm().create_completion(PROMPT, **settings)["choices"]
    )


class Interrupted:
    """A policy that is interrupted while it chooses."""

    def __init__(self) -> None:
        self.n_left = 1

    def select(self, scores: Any, n: int, layer: int) -> list[Any]:
        if self.n_left and layer == 1:
            self.n_left -= 1
            raise KeyboardInterrupt
        return [np.arange(n) for _ in range(len(scores))]


def test_an_interrupt_in_a_policy_is_not_lost(new_llm: Instances) -> None:
    policy = Interrupted()
    llm = new_llm({**DGE, "policy": policy})
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPT, 20)
    assert llm.n_tokens == 0
    assert greedy(llm, PROMPT, 20) == greedy(new_llm({**DGE, "policy": policy}), PROMPT, 20)
    assert llm.dge_stats.state == "evicted"

    policy.n_left = 1
    llm.reset()
    llm.eval(PROMPT)
    with pytest.raises(KeyboardInterrupt):
        llm.evict()
    assert llm.dge_stats.state == "full" and llm.n_tokens == len(PROMPT)
    assert llm.evict()


def test_stats_from_another_thread(new_llm: Instances) -> None:
    llm = new_llm({**DGE, "recall": 1})
    done, errors = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            try:
                stats = llm.dge_stats
                if stats is not None and stats.state == "evicted":
                    assert stats.rows_by_head
            except Exception as error:  # the entries of a layer were counted in the middle of an eviction
                errors.append(error)
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for i in range(4):
            greedy(llm, tokens_of(150, i), 40)
    finally:
        done.set()
        thread.join()
    assert not errors


# mistakes


@pytest.mark.filterwarnings("always")
def test_a_budget_that_no_prompt_can_be_longer_than(new_llm: Instances) -> None:
    with pytest.warns(RuntimeWarning, match="budget=1024 is not less than n_ctx=1024: nothing will be evicted"):
        new_llm(True, n_ctx=1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new_llm({"budget": 1023}, n_ctx=1024)
        new_llm({"budget": 1.0}, n_ctx=1024)
        new_llm({"budget": 4096, "recall": 4}, n_ctx=1024)


def test_kept_positions_where_nothing_was_evicted(new_llm: Instances) -> None:
    llm = new_llm(DGE)
    for state in ("empty", "full"):
        with pytest.raises(DGEError, match=rf'nothing was evicted \(dge_stats.state: "{state}"\)'):
            llm.dge_kept(0, 0)
        greedy(llm, PROMPT[:20], 5)


def test_stats_are_not_kept_waiting_by_a_request(new_llm: Instances) -> None:
    """Another thread looks between two tokens: here from within a logits processor, which would wait for itself."""
    llm, seen = new_llm(DGE), []

    def look(tokens: Any, scores: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(llm.dge_stats))
        thread.start()
        thread.join(timeout=20)
        return scores

    processors = llama_cpp.LogitsProcessorList([look])
    llm.create_completion(PROMPT, max_tokens=8, temperature=0.0, logits_processor=processors)
    assert len(seen) == 8 and seen[-1].state == "evicted"


def test_a_decode_that_failed_while_eviction_was_off(new_llm: Instances, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(n_batch=64)
    decode, n_left = llm._ctx.decode, [2]

    def fails(batch: Any) -> None:
        if n_left[0] == 0:
            raise RuntimeError("llama_decode returned 1")
        n_left[0] -= 1
        decode(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm._ctx, "decode", fails)
        with pytest.raises(RuntimeError, match="returned 1"):
            llm.eval(PROMPT)
    assert llm.n_tokens == 128
    llm.set_dge(DGE)
    assert greedy(llm, PROMPT, 20) == greedy(new_llm(DGE), PROMPT, 20)
    assert llm.dge_stats.state == "evicted"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_warning_that_is_an_error_leaves_settings_that_are_in_force(new_llm: Instances) -> None:
    llm = new_llm(DGE)
    with pytest.raises(RuntimeWarning, match="nothing will be evicted"):
        llm.set_dge({"budget": 4096})
    assert llm.dge_config.budget == 4096
    greedy(llm, PROMPT, 20)
    assert llm.dge_stats.state == "full" and llm.dge_stats.error is None
