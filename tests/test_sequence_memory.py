"""What the memory functions of llama.h do with a sequence that was evicted or will be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver, messages
from reference.driver import Context
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS, evicted_reference
from reference.forward import Reference, nmse
from reference.policies import Settings
from reference.scenario import F32, SAME, as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


def is_as_new(context: Context, new_context: ContextFactory, seq: int = 0, **settings: Any) -> None:
    """The sequence is empty, and a new prompt in it goes as in a fresh context, eviction included."""
    info = context.info(seq)
    assert info["state"] == driver.STATE_EMPTY and info["n_rows"] == 0
    assert (info["boundary"], info["pos_min"], info["n_rows_after"], info["n_prompt"]) == (-1, -1, 0, 0)
    assert (context.pos_min(seq), context.pos_max(seq)) == (-1, -1)
    tokens = tokens_of(90 + 12, 1)
    fresh = new_context("g2", **{**F32, "dge": SETTINGS.as_params(), **settings})
    assert nmse(evict_after(context, tokens, 90, 2, seq), evict_after(fresh, tokens, 90, 2)) <= SAME
    assert as_lists(context.kept(seq)) == as_lists(fresh.kept())


# removal


@pytest.mark.parametrize(
    "p0, p1",
    [
        (0, 10),
        (-1, 20),
        (50, 60),
        (N_PROMPT - 1, N_PROMPT),
        (N_PROMPT - 1, -1),
        (1, -1),
        (0, N_BEFORE + 4),
        (N_PROMPT - 10, N_BEFORE),
    ],
)
@pytest.mark.parametrize("seq", [0, -1])
def test_rm_that_reaches_the_prompt_is_refused(
    evicted_context: Callable[..., Context], seq: int, p0: int, p1: int
) -> None:
    context, untouched = evicted_context(), evicted_context()
    before, info = context.state(), context.info()
    assert not context.seq_rm(seq, p0, p1)
    assert context.state() == before and context.info() == info
    assert np.array_equal(decode_each(context, TOKENS[N_BEFORE + 5 :]), decode_each(untouched, TOKENS[N_BEFORE + 5 :]))


@pytest.mark.parametrize("p0", [N_PROMPT, N_PROMPT + 1, N_BEFORE, N_BEFORE + 3])
@pytest.mark.parametrize("seq", [0, -1])
def test_rm_above_the_prompt_is_exact(zoo: Zoo, evicted_context: Callable[..., Context], seq: int, p0: int) -> None:
    context = evicted_context()
    kept = context.kept()
    assert context.seq_rm(seq, p0, -1)
    assert context.pos_max() == p0 - 1
    assert context.info()["n_rows"] == SETTINGS.budget + p0 - N_PROMPT
    assert context.info()["state"] == driver.STATE_EVICTED

    # in the reference the rows that were removed come again, this time over the evicted cache
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_BEFORE])
    if p0 <= N_BEFORE:
        reference = Reference(zoo["g2"].weights)
        reference.run(TOKENS[:p0])
        reference.mask_all_but([[rows[rows < p0] for rows in heads] for heads in kept])
    else:
        reference = evicted_reference(zoo, kept, p0 - N_BEFORE)
    rest = tokens_of(25, 2)
    assert nmse(decode_each(context, rest), np.concatenate([reference.step([token]) for token in rest])) <= SAME


def test_rm_of_rows_between_is_exact(zoo: Zoo, evicted_context: Callable[..., Context]) -> None:
    context = evicted_context()
    kept = context.kept()
    assert context.seq_rm(0, N_BEFORE + 1, N_BEFORE + 3)
    assert context.info()["n_rows"] == SETTINGS.budget + 2 + 5 - 2
    reference = evicted_reference(zoo, kept)
    left = [N_BEFORE, N_BEFORE + 3, N_BEFORE + 4]
    reference.mask_all_but([[[*rows.tolist(), *left] for rows in heads] for heads in kept])
    rest = TOKENS[N_BEFORE + 5 :]
    assert nmse(decode_each(context, rest), np.concatenate([reference.step([token]) for token in rest])) <= SAME


@pytest.mark.parametrize(
    "seq, p0, p1", [(0, -1, -1), (0, 0, -1), (0, 0, N_BEFORE + 5), (0, 0, 10000), (-1, -1, -1), (-1, 0, -1)]
)
def test_rm_of_the_whole(
    new_context: ContextFactory, evicted_context: Callable[..., Context], seq: int, p0: int, p1: int
) -> None:
    context = evicted_context()
    assert context.seq_rm(seq, p0, p1)
    is_as_new(context, new_context)


@pytest.mark.parametrize("data", [True, False])
def test_clear(new_context: ContextFactory, evicted_context: Callable[..., Context], data: bool) -> None:
    context = evicted_context()
    context.clear(data)
    is_as_new(context, new_context)


def test_seq_keep(new_context: ContextFactory, evicted_context: Callable[..., Context]) -> None:
    context, untouched = evicted_context(n_seq_max=2), evicted_context(n_seq_max=2)
    context.decode(tokens_of(30, 3), seq=1)
    context.seq_keep(0)
    assert context.pos_max(1) == -1 and context.info()["state"] == driver.STATE_EVICTED
    rest = TOKENS[N_BEFORE + 5 :]
    assert nmse(decode_each(context, rest), decode_each(untouched, rest)) <= SAME
    context.decode(tokens_of(30, 3), seq=1)
    context.seq_keep(1)
    is_as_new(context, new_context)


def test_rm_of_a_part_of_an_armed_prompt_disarms(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    plain = new_context("g2", **F32)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    for c in (context, plain):
        assert c.seq_rm(0, 60, -1)
    assert context.info()["state"] == driver.STATE_FULL
    rest = tokens_of(90, 4)
    assert np.array_equal(decode_each(context, rest), decode_each(plain, rest))
    assert context.info()["n_evictions"] == 0 and context.info()["n_rows"] == 150


def test_rm_of_the_draft_keeps_it_armed(zoo: Zoo, new_context: ContextFactory) -> None:
    """What prompt lookup does: tokens of the draft are decoded, rejected and replaced."""
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    once = new_context("g2", **F32, dge=SETTINGS.as_params())
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    context.decode([TOKENS[N_PROMPT], *tokens_of(3, 5)])
    assert context.seq_rm(0, N_PROMPT + 1, -1)
    assert context.info()["state"] == driver.STATE_ARMED
    got = decode_each(context, TOKENS[N_PROMPT + 1 :])[1:]
    assert nmse(got, evict_after(once, TOKENS, N_PROMPT, 2)) <= SAME
    assert as_lists(context.kept()) == as_lists(once.kept())


def test_queries_of_removed_rows_are_not_used(new_context: ContextFactory) -> None:
    """Re-evaluated rows of an armed sequence are not captured beyond the draft; the old queries are gone."""
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    context.decode(TOKENS[:N_PROMPT])
    assert context.seq_rm(0, 115, -1)
    assert context.arm(114) == driver.OK
    context.decode(tokens_of(5, 19))
    assert context.disarm() == driver.OK
    assert context.arm(118) == driver.ERR_QUERIES
    assert context.reuse(118, 118) < 118


# positions


@pytest.mark.parametrize("policy", ["snapkv", "streamingllm"])
def test_positions(new_context: ContextFactory, policy: str) -> None:
    s = Settings(policy=policy, budget=32, draft_tokens=3)
    context = new_context("g2", dge=s.as_params())
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    assert (context.pos_min(), context.pos_max()) == (0, N_PROMPT - 1)
    decode_each(context, TOKENS[N_PROMPT:N_BEFORE])
    assert (context.pos_min(), context.pos_max()) == (0, N_BEFORE - 1)
    decode_each(context, TOKENS[N_BEFORE : N_BEFORE + 5])
    assert context.pos_max() == N_BEFORE + 4
    pos_min = context.pos_min()
    assert context.info()["pos_min"] == pos_min
    # no row from there on is missing, and the row before is, in some head
    kept = [positions for heads in context.kept() for positions in heads]
    assert all(set(range(pos_min, N_BEFORE)) <= set(positions.tolist()) for positions in kept)
    assert 0 < pos_min <= N_PROMPT - s.window
    if policy == "snapkv":
        assert any(pos_min - 1 not in positions for positions in kept)


def test_a_gap_or_a_repeated_position_is_still_refused(evicted_context: Callable[..., Context]) -> None:
    context = evicted_context()
    for pos in (N_BEFORE + 6, N_BEFORE + 4, 3):
        context.decode([5], pos=pos, check=False)
        assert context.rc == -1
    context.decode([5], pos=N_BEFORE + 5)


# shifts


def test_shifts_are_refused_after_an_eviction(
    new_context: ContextFactory, evicted_context: Callable[..., Context]
) -> None:
    context, untouched = evicted_context(), evicted_context()
    assert not context.can_shift()
    before = context.state()
    with driver.captured_log() as log:
        context.seq_add(0, 0, -1, 5)
        context.seq_add(0, N_BEFORE, -1, -1)
        context.seq_div(0, 0, -1, 2)
    assert len([line for line in log if messages.NOT_SHIFTED in line]) == 3
    assert context.state() == before
    rest = TOKENS[N_BEFORE + 5 :]
    assert np.array_equal(decode_each(context, rest), decode_each(untouched, rest))
    context.clear()
    assert context.can_shift()
    is_as_new(context, new_context)


def test_a_shift_prevents_the_eviction(new_context: ContextFactory) -> None:
    """Only rows at positions 0 .. n_prompt - 1 can be armed; a shift disarms."""
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    assert context.can_shift()
    context.seq_add(0, 0, -1, 7)
    logits = decode_each(context, TOKENS[N_PROMPT : N_PROMPT + 6])
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_evictions"] == 0
    assert context.info()["n_rows"] == N_PROMPT + 6
    assert context.arm(N_PROMPT) == driver.ERR_SEQ
    plain = new_context("g2", **F32)
    plain.decode(TOKENS[:N_PROMPT])
    plain.seq_add(0, 0, -1, 7)
    assert np.array_equal(logits, decode_each(plain, TOKENS[N_PROMPT : N_PROMPT + 6]))


def test_eviction_after_a_context_shift(new_context: ContextFactory) -> None:
    """Rows that were shifted to 0 .. n - 1 can be evicted once the shift has been applied, but not before."""
    s = Settings(policy="streamingllm", budget=32, draft_tokens=1)
    context = new_context("g2", **F32, dge=s.as_params())
    context.decode(TOKENS[:N_PROMPT])
    assert context.seq_rm(0, 0, 20)
    context.seq_add(0, 20, -1, -20)
    assert context.pos_max() == 99
    assert context.arm(100) == driver.ERR_SEQ
    context.decode(TOKENS[:1])
    assert context.arm(101) == driver.OK
    context.decode(TOKENS[1:2])
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 33


# arming, errors


# abort
