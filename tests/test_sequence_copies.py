"""Copies of a sequence that was evicted or will be, and other sequences beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver, messages
from reference.driver import Context
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS
from reference.forward import Reference, nmse
from reference.policies import kept_by
from reference.scenario import F32, SAME, as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


# copies


def test_shared_entries_are_not_evicted(new_context: ContextFactory) -> None:
    """A copy made before the eviction shares the cells: the eviction is given up and both sequences go on in full."""
    settings = {**F32, "n_seq_max": 2, "kv_unified": True}
    context = new_context("g2", **settings, dge=SETTINGS.as_params())
    plain = new_context("g2", **settings)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    for c in (context, plain):
        c.seq_cp(0, 1)
    rest = TOKENS[N_PROMPT : N_PROMPT + 10]
    for seq in (0, 1):
        assert np.array_equal(decode_each(context, rest, seq), decode_each(plain, rest, seq))
    info = context.info()
    assert info["state"] == driver.STATE_FULL and info["error"] == driver.ERR_SHARED and info["n_evictions"] == 0
    assert info["n_rows"] == N_PROMPT + 10
    assert context.arm(N_PROMPT) == driver.ERR_SHARED
    assert context.evict() == driver.ERR_SHARED


def test_a_copy_that_is_gone_does_not_prevent_the_eviction(new_context: ContextFactory) -> None:
    settings = {**F32, "n_seq_max": 2, "kv_unified": True, "dge": SETTINGS.as_params()}
    context, once = new_context("g2", **settings), new_context("g2", **settings)
    context.decode(TOKENS[:N_PROMPT])
    context.seq_cp(0, 1)
    assert context.arm(N_PROMPT) == driver.ERR_SHARED
    assert context.seq_rm(1, -1, -1)
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, TOKENS[N_PROMPT:])[2:]
    assert np.array_equal(got, evict_after(once, TOKENS, N_PROMPT, 2))


@pytest.mark.parametrize("p0, p1", [(0, 40), (60, -1), (N_PROMPT - 1, N_PROMPT)])
def test_a_partly_shared_sequence_is_not_evicted(new_context: ContextFactory, p0: int, p1: int) -> None:
    context = new_context("g2", **F32, n_seq_max=2, kv_unified=True, dge=SETTINGS.as_params())
    context.decode(TOKENS[:N_PROMPT])
    context.seq_cp(0, 1, p0, p1)
    assert context.arm(N_PROMPT) == driver.ERR_SHARED


def test_a_copy_into_another_stream_is_not_harmed(new_context: ContextFactory) -> None:
    settings = {**F32, "n_seq_max": 2, "kv_unified": False}
    context = new_context("g2", **settings, dge=SETTINGS.as_params())
    plain = new_context("g2", **settings)
    rest = TOKENS[N_PROMPT : N_PROMPT + 12]
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    for c in (context, plain):
        c.seq_cp(0, 1)
    decode_each(context, rest, 0)
    assert context.info(0)["state"] == driver.STATE_EVICTED and context.info(0)["n_rows"] == 32 + 12
    decode_each(plain, rest, 0)
    assert np.array_equal(decode_each(context, rest, 1), decode_each(plain, rest, 1))
    assert context.info(1)["state"] == driver.STATE_FULL and context.info(1)["n_rows"] == N_PROMPT + 12


@UNIFIED
def test_a_copy_of_an_evicted_sequence_goes_on_alike(evicted_context: Callable[..., Context], kv_unified: bool) -> None:
    context = evicted_context(n_seq_max=3, kv_unified=kv_unified)
    untouched = evicted_context(n_seq_max=3, kv_unified=kv_unified)
    context.seq_cp(0, 2)
    rest = TOKENS[N_BEFORE + 5 :]
    want = decode_each(untouched, rest)
    assert nmse(decode_each(context, rest, 2), want) <= SAME
    assert nmse(decode_each(context, rest, 0), want) <= SAME
    assert as_lists(context.kept(2)) == as_lists(context.kept(0)) == as_lists(untouched.kept(0))
    for name in ("state", "n_prompt", "boundary", "pos_min", "n_rows"):
        assert context.info(2)[name] == context.info(0)[name]
    # the contract holds for the copy as well
    assert not context.seq_rm(2, 10, -1) and context.seq_rm(2, N_BEFORE + 5, -1)
    assert context.seq_rm(0, -1, -1)
    assert nmse(decode_each(context, rest, 2), want) <= SAME


@UNIFIED
@pytest.mark.parametrize("p0, p1", [(0, 40), (N_BEFORE, -1), (1, -1)])
def test_a_part_of_an_evicted_sequence_is_not_copied(
    evicted_context: Callable[..., Context], kv_unified: bool, p0: int, p1: int
) -> None:
    if not kv_unified and (p0, p1) != (0, 40):
        p1 = N_BEFORE + 2  # stock llama.cpp aborts for such ranges between streams
    context = evicted_context(n_seq_max=2, kv_unified=kv_unified)
    untouched = evicted_context(n_seq_max=2, kv_unified=kv_unified)
    with driver.captured_log() as log:
        context.seq_cp(0, 1, p0, p1)
    assert any(messages.NOT_COPIED in line for line in log)
    assert context.pos_max(1) == -1
    rest = TOKENS[N_BEFORE + 5 :]
    assert np.array_equal(decode_each(context, rest), decode_each(untouched, rest))


# several sequences


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
def test_an_eviction_leaves_another_sequence_alone(
    new_context: ContextFactory, kv_unified: bool, flash_attn: bool
) -> None:
    """Bit for bit where the sequences have streams of their own; else new rows lie in other cells, so sums differ."""
    settings = {**F32, "n_seq_max": 2, "kv_unified": kv_unified, "flash_attn": flash_attn}
    context = new_context("g2", **settings, dge=SETTINGS.as_params())
    plain = new_context("g2", **settings)
    other = tokens_of(100, 6)
    for c in (context, plain):
        c.decode(other[:70], seq=1)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    for c in (context, plain):
        decode_each(c, TOKENS[N_PROMPT : N_BEFORE + 2])
    assert context.info(0)["state"] == driver.STATE_EVICTED and context.info(0)["n_rows"] == 32 + 4
    assert context.info(1)["state"] == driver.STATE_FULL and context.info(1)["n_rows"] == 70
    got, want = decode_each(context, other[70:], 1), decode_each(plain, other[70:], 1)
    if kv_unified:
        # with flash attention the sums are f16
        assert nmse(got, want) <= (1e-5 if flash_attn else SAME)
    else:
        assert np.array_equal(got, want)


@UNIFIED
def test_two_sequences_are_evicted_in_one_decode(zoo: Zoo, new_context: ContextFactory, kv_unified: bool) -> None:
    """Batches that mix both sequences, and two evictions that fall due at once."""
    context = new_context("g2", **F32, n_seq_max=2, kv_unified=kv_unified, dge=SETTINGS.as_params())
    lengths = (N_PROMPT, 77)
    tokens = [tokens_of(n + 20, 7 + seq) for seq, n in enumerate(lengths)]
    logits: list[list[driver.Logits]] = [[], []]

    def rows(seq: int, first: int, last: int) -> list[tuple[int, int, int, bool]]:
        return [(tokens[seq][p], p, seq, True) for p in range(first, last)]

    context.decode_batch(rows(0, 0, N_PROMPT) + rows(1, 0, 77))
    for seq, n in enumerate(lengths):
        assert context.arm(n, seq) == driver.OK
    for step in range(20):
        batch = [row for seq, n in enumerate(lengths) for row in rows(seq, n + step, n + step + 1)]
        for seq, row in enumerate(context.decode_batch(batch)):
            logits[seq].append(row)
    for seq, n in enumerate(lengths):
        info = context.info(seq)
        assert info["state"] == driver.STATE_EVICTED and info["n_evictions"] == 2
        assert (info["n_rows_before"], info["n_rows_after"], info["n_rows"]) == (n + 2, 34, 34 + 18)
        reference = Reference(zoo["g2"].weights)
        reference.run(tokens[seq][: n + 2])
        reference.mask_all_but(context.kept(seq))
        want = np.concatenate([reference.step([token]) for token in tokens[seq][n + 2 :]])
        assert nmse(logits[seq][2:], want) <= SAME


def test_scattered_cells(zoo: Zoo, new_context: ContextFactory) -> None:
    """Cells in pieces, out of order, between those of another sequence: the eviction finds and frees the right ones."""
    settings = {**F32, "n_ctx": 512, "n_seq_max": 3, "kv_unified": True}
    context = new_context("g2", **settings, dge=SETTINGS.as_params())
    other = tokens_of(150, 17)
    # free cells in front of those that come first, so that later rows land before earlier ones
    context.decode(tokens_of(40, 18), seq=2)
    context.decode(TOKENS[:30])
    context.decode(other[:50], seq=1)
    assert context.seq_rm(2, -1, -1)
    context.decode(TOKENS[30:60])
    context.decode(other[50:100], seq=1)
    context.decode(TOKENS[60:N_PROMPT])
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, TOKENS[N_PROMPT : N_BEFORE + 20])[2:]
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 34 + 20

    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_BEFORE])
    assert as_lists(context.kept()) == as_lists(kept_by(reference, N_PROMPT, SETTINGS))
    reference.mask_all_but(context.kept())
    assert nmse(got, np.concatenate([reference.step([token]) for token in TOKENS[N_BEFORE : N_BEFORE + 20]])) <= SAME

    beside = Reference(zoo["g2"].weights)
    beside.run(other[:100])
    assert nmse(context.decode(other[100:], seq=1), beside.run(other[100:])) <= SAME
    # nothing leaked: all cells but those of the two sequences are free
    assert context.poison(driver.LARGE_F16) == 512 - (34 + 20) - 150


def test_entries_move_to_the_first_cells(zoo: Zoo, new_context: ContextFactory) -> None:
    """Cells that come first are kept, wherever the rows were: what attention reads shrinks."""
    context = new_context("g2", **F32, n_ctx=512, n_seq_max=2, kv_unified=True, dge=SETTINGS.as_params())
    context.decode(tokens_of(300, 18), seq=1)
    context.decode(TOKENS[:60])
    assert context.seq_rm(1, -1, -1)
    context.decode(TOKENS[60:N_PROMPT])
    assert context.info()["n_kv"] == 512
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, TOKENS[N_PROMPT : N_BEFORE + 20])[2:]
    assert context.info()["n_kv"] == 256
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_BEFORE])
    reference.mask_all_but(context.kept())
    assert nmse(got, np.concatenate([reference.step([token]) for token in TOKENS[N_BEFORE : N_BEFORE + 20]])) <= SAME
