"""Evicted entries have no influence, and every request is evicted, not only the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.bounds import nmse_bounds
from reference.forward import Reference, nmse
from reference.policies import Settings
from reference.scenario import decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

N_PROMPT = 150
SINKS = Settings(policy="streamingllm", sinks=4, budget=40, draft_tokens=3)
EVICTED = range(4, N_PROMPT - 36)

# Only in a model of one layer do K and V of a row depend on the row's own token alone. With more layers the rows that
# stay have read, during the prefill, those that are evicted later, and logits must differ.
CACHES = [(False, "f16", "f16"), (True, "f16", "f16"), (False, "f32", "f32"), (True, "q8_0", "q8_0")]


def with_other_tokens(tokens: list[int], positions: range, seed: int) -> list[int]:
    changed = list(tokens)
    for position, token in zip(positions, tokens_of(len(positions), seed)):
        changed[position] = token if token != tokens[position] else token % 200 + 10
    assert all(changed[p] != tokens[p] for p in positions)
    return changed


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("positions", [EVICTED, range(70, 71), range(4, 5), range(113, 114)], ids=str)
def test_evicted_tokens_have_no_influence(
    new_context: ContextFactory, cache: tuple[bool, str, str], positions: range
) -> None:
    settings = {"flash_attn": cache[0], "type_k": cache[1], "type_v": cache[2]}
    tokens = tokens_of(N_PROMPT + 34, 0)
    other = with_other_tokens(tokens, positions, 1)
    logits = [
        evict_after(new_context("one", **settings, dge=SINKS.as_params()), t, N_PROMPT, 2) for t in (tokens, other)
    ]
    assert np.array_equal(logits[0], logits[1])

    # the check can fail: without an eviction the same change shows
    full = [new_context("one", **settings) for _ in range(2)]
    for context, t in zip(full, (tokens, other)):
        context.decode(t[:N_PROMPT])
    full = [decode_each(context, t[N_PROMPT:])[2:] for context, t in zip(full, (tokens, other))]
    assert not np.array_equal(full[0], full[1])
    assert nmse(full[0], logits[0]) > 1e-3


@pytest.mark.parametrize("position", [0, 3, N_PROMPT - 36, N_PROMPT - 1])
def test_kept_tokens_do_have_influence(new_context: ContextFactory, position: int) -> None:
    tokens = tokens_of(N_PROMPT + 34, 0)
    other = with_other_tokens(tokens, range(position, position + 1), 2)
    logits = [evict_after(new_context("one", dge=SINKS.as_params()), t, N_PROMPT, 2) for t in (tokens, other)]
    assert not np.array_equal(logits[0], logits[1])


def test_deeper_models_still_feel_what_was_read_before(new_context: ContextFactory) -> None:
    """Why the test above needs one layer."""
    tokens = tokens_of(N_PROMPT + 34, 0)
    other = with_other_tokens(tokens, EVICTED, 1)
    logits = [evict_after(new_context("g3", dge=SINKS.as_params()), t, N_PROMPT, 2) for t in (tokens, other)]
    assert not np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("policy", ["snapkv", "streamingllm"])
@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
def test_every_request_of_a_series_is_evicted(
    zoo: Zoo, new_context: ContextFactory, policy: str, flash_attn: bool
) -> None:
    """20 prompts of different lengths on one context: rows counted and logits checked for each."""
    s = Settings(policy=policy, budget=32, draft_tokens=2)
    context = new_context("g3", flash_attn=flash_attn, n_ctx=512, n_ubatch=64, dge=s.as_params())
    lengths = np.random.default_rng(3).integers(33, 300, 20).tolist()
    for i, n_prompt in enumerate(lengths):
        tokens = tokens_of(n_prompt + 9, i)
        prefill_and_arm(context, tokens[:n_prompt])
        context.decode([tokens[n_prompt]])
        assert context.info()["n_rows"] == n_prompt + 1
        logits = decode_each(context, tokens[n_prompt + 1 :])
        info = context.info()
        assert info["state"] == driver.STATE_EVICTED and info["n_evictions"] == i + 1
        assert info["n_rows_before"] - info["n_rows_after"] == n_prompt - 32 > 0
        assert info["n_rows_after"] == 33 and info["n_rows"] == 33 + 8
        assert info["n_kv"] == 256
        kept = context.kept()
        assert all(len(positions) == 33 for heads in kept for positions in heads)
        if i % 4 == 3:  # the reference takes time; the last request is among these
            reference = Reference(zoo["g3"].weights, "f16", "f16", flash_attn)
            reference.run(tokens[: n_prompt + 1], n_ubatch=64)
            reference.mask_all_but(kept)
            want = np.concatenate([reference.step([token]) for token in tokens[n_prompt + 1 :]])
            assert nmse(logits, want) <= nmse_bounds("f16", "f16", flash_attn, 2)[0]
        assert context.seq_rm(0, -1, -1)
        assert context.info()["n_rows"] == 0 and context.info()["state"] == driver.STATE_EMPTY


def test_freed_cells_can_be_used_again(new_context: ContextFactory) -> None:
    """An eviction makes room: more tokens fit than the cache has cells, and without it they do not."""
    tokens = tokens_of(200 + 2 + 180, 4)
    full = new_context("g3", n_ctx=256)
    full.decode(tokens[:200])
    for token in tokens[200:256]:
        full.decode([token])
    full.decode([tokens[256]], check=False)
    assert full.rc == 1

    context = new_context("g3", n_ctx=256, dge=Settings(budget=32).as_params())
    logits = evict_after(context, tokens, 200, 1)
    assert np.isfinite(logits).all()
    assert context.info()["n_rows"] == 33 + 181
    assert context.info()["n_kv"] == 256
