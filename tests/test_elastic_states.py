"""Saved states that are loaded into a cache that grows with use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.driver import Context, failing_alloc
from reference.elastic import DGE, N_CTX, TOKENS
from reference.scenario import F32, as_lists, evict_after, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory


UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


@UNIFIED
def test_whole_state_makes_the_cache_grow(new_context: ContextFactory, kv_unified: bool) -> None:
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified}
    source = new_context("g2", **settings)
    source.decode(TOKENS[:900], every=False)
    source.decode(TOKENS[:200], seq=1, every=False)
    state = source.state()
    context = new_context("g2", **settings, elastic=True)
    # no memory: an error, and the context is usable
    for nth in (1, 2, 3):
        with failing_alloc(nth):
            assert context.state_load(state) == 0
        assert context.memory_info()["n_cells"] == 512
        fresh = new_context("g2", **settings)
        assert np.array_equal(context.decode(TOKENS[:50]), fresh.decode(TOKENS[:50]))
    assert context.state_load(state) == len(state)
    # what is read of several streams is written at the end, so their tensors are made for the most
    assert context.memory_info()["n_cells"] == (1280 if kv_unified else N_CTX)
    assert context.state() == state
    for seq in (0, 1):
        assert np.array_equal(context.decode(TOKENS[:20], seq=seq), source.decode(TOKENS[:20], seq=seq))


@UNIFIED
def test_sequence_state_makes_the_cache_grow(new_context: ContextFactory, kv_unified: bool) -> None:
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified}
    source = new_context("g2", **settings)
    source.decode(TOKENS[:900], every=False)
    state = source.seq_state()
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[300:700], seq=0, every=False)
    with failing_alloc(3):
        assert context.seq_state_load(state, 1) == 0
    assert context.seq_state(0) == plain.seq_state(0) and context.memory_info()["n_cells"] == 512
    for each in (context, plain):
        assert each.seq_state_load(state, 1) == len(state)
    assert context.seq_state(1) == plain.seq_state(1)
    assert context.memory_info()["n_cells"] == (2048 if kv_unified else 1280)
    for seq in (0, 1):
        assert np.array_equal(context.decode(TOKENS[:20], seq=seq), plain.decode(TOKENS[:20], seq=seq))
    # a second time: its own cells count once
    assert context.seq_state_load(state, 1) == len(state)
    assert context.memory_info()["n_cells"] == (2048 if kv_unified else 1280)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sequence"])
def test_state_of_an_evicted_sequence(new_context: ContextFactory, whole: bool) -> None:
    """It needs cells for the kept entries, not for the full cache."""
    settings: dict[str, Any] = {"n_ctx": N_CTX, "dge": {**DGE, "budget": 600}}
    source = new_context("g2", **settings)
    evict_after(source, TOKENS[:910], 900, 2)
    state = source.state() if whole else source.seq_state()
    context = new_context("g2", **settings, elastic=True)
    context.decode(TOKENS[:20])
    load = context.state_load if whole else context.seq_state_load
    assert load(state) == len(state)
    assert context.memory_info()["n_cells"] == 768
    assert context.info()["state"] == driver.STATE_EVICTED and as_lists(context.kept()) == as_lists(source.kept())
    got, want = context.decode(TOKENS[:300]), source.decode(TOKENS[:300])
    assert np.array_equal(got, want)


def test_state_that_fits_nowhere(new_context: ContextFactory) -> None:
    source = new_context("g2", n_ctx=N_CTX)
    source.decode(TOKENS[:1500], every=False)
    context = new_context("g2", n_ctx=1024, elastic=True)
    assert context.state_load(source.state()) == 0
    assert context.seq_state_load(source.seq_state()) == 0
    plain = new_context("g2", n_ctx=1024)
    assert np.array_equal(context.decode(TOKENS[:700]), plain.decode(TOKENS[:700]))


def test_stream_copy_and_a_state(new_context: ContextFactory) -> None:
    """A state for which the cache grows while a copy of a stream waits."""
    settings: dict[str, Any] = {"n_ctx": 3 * N_CTX, "n_seq_max": 3, "kv_unified": False}
    source = new_context("g2", **settings)
    source.decode(TOKENS[:900], every=False)
    state = source.seq_state()
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:490], every=False)
        each.seq_cp(0, 1)
        assert each.seq_state_load(state, 2) == len(state)
    for seq in (0, 1, 2):
        assert np.array_equal(context.decode(TOKENS[:20], seq=seq), plain.decode(TOKENS[:20], seq=seq))


def test_shift_waits_for_a_state(new_context: ContextFactory) -> None:
    """A sequence state for which the cache must grow while a K-shift of another sequence waits."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2}
    source = new_context("g2", **settings)
    source.decode(TOKENS[:900], every=False)
    state = source.seq_state()
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:100], every=False)
        each.seq_add(0, 0, -1, 7)
        assert each.seq_state_load(state, 1) == len(state)
    for seq in (0, 1):
        assert np.array_equal(context.decode(TOKENS[:20], seq=seq), plain.decode(TOKENS[:20], seq=seq))


def test_states_of_several_streams_and_a_failing_allocation(new_context: ContextFactory) -> None:
    """What was read of the first stream is written into tensors that a growth for the second one had freed."""

    def new(elastic: bool) -> Context:
        return new_context("g2", **F32, n_ctx=4096, n_seq_max=2, kv_unified=False, elastic=elastic)

    source = new(False)
    for seq in (0, 1):
        source.decode(TOKENS[:300], seq=seq, every=False)
    whole = source.state()
    want = source.decode([5], seq=0)
    source.seq_rm(0, 300, -1)
    for n in range(3):
        context = new(True)
        with failing_alloc(n):
            loaded = context.state_load(whole)
        if loaded:
            assert np.array_equal(context.decode([5], seq=0), want)
        else:
            assert context.pos_max(0) == context.pos_max(1) == -1

    # of one sequence, with cells in two streams
    source.decode(tokens_of(600, 3), seq=1, every=False)
    crafted = source.seq_state(0)[:-4] + source.seq_state(1)[16:]
    context = new(True)
    context.seq_state_load(crafted, 0)
    context.clear()
    assert np.array_equal(context.decode(TOKENS[:300], seq=0)[-1], new(False).decode(TOKENS[:300], seq=0)[-1])
