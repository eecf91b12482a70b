"""What the state functions of llama.h do with a sequence that was evicted or will be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.driver import Context
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS
from reference.forward import nmse
from reference.scenario import F32, SAME, as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


# states


def check_loaded(context: Context, original: Context, seq: int = 0) -> None:
    """The loaded sequence is that of `original`, which has 5 rows after the eviction, and the contract holds for it."""
    info, want = context.info(seq), original.info()
    for name in ("state", "n_prompt", "n_draft", "budget", "n_rows_before", "n_rows_after", "n_rows"):
        assert info[name] == want[name], name
    for name in ("boundary", "pos_min", "bytes_before", "bytes_after"):
        assert info[name] == want[name], name
    assert as_lists(context.kept(seq)) == as_lists(original.kept())
    assert (context.pos_min(seq), context.pos_max(seq)) == (original.pos_min(), original.pos_max())
    assert not context.seq_rm(seq, 50, -1) and not context.can_shift()
    rest = TOKENS[N_BEFORE + 5 :]
    got, expected = decode_each(context, rest, seq), decode_each(original, rest)
    assert nmse(got, expected) <= SAME
    assert context.seq_rm(seq, N_BEFORE + 5, -1) and original.seq_rm(0, N_BEFORE + 5, -1)
    assert nmse(context.decode([TOKENS[N_BEFORE + 5]], seq=seq), expected[0]) <= SAME


@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
@pytest.mark.parametrize("type_k, type_v", [("f32", "f32"), ("q8_0", "")])
def test_whole_state(
    new_context: ContextFactory, evicted_context: Callable[..., Context], flash_attn: bool, type_k: str, type_v: str
) -> None:
    settings = {"flash_attn": flash_attn, "type_k": type_k, "type_v": type_v or ("q8_0" if flash_attn else "f32")}
    original = evicted_context(**settings)
    state = original.state()
    fresh = new_context("g2", **settings, dge=SETTINGS.as_params())
    assert fresh.state_load(state) == len(state)
    assert fresh.state() == state
    check_loaded(fresh, original)


def test_whole_state_over_something_else(new_context: ContextFactory, evicted_context: Callable[..., Context]) -> None:
    """Loading replaces what is there: a full sequence, one that is armed, or another evicted one."""
    state = evicted_context().state()
    full = new_context("g2", **F32, dge=SETTINGS.as_params())
    full.decode(tokens_of(50, 8))
    armed = new_context("g2", **F32, dge=SETTINGS.as_params())
    prefill_and_arm(armed, tokens_of(90, 9))
    other = new_context("g2", **F32, dge=SETTINGS.as_params())
    evict_after(other, tokens_of(100, 10), 80, 2)
    for context in (full, armed, other):
        assert context.state_load(state) == len(state)
        check_loaded(context, evicted_context())


def test_full_state_over_an_evicted_sequence(
    new_context: ContextFactory, evicted_context: Callable[..., Context]
) -> None:
    """A full state after an evicted one: nothing of the eviction may stay."""
    plain = new_context("g2", **F32)
    plain.decode(TOKENS[:60])
    context = evicted_context()
    assert context.state_load(plain.state()) > 0
    assert context.info()["state"] == driver.STATE_FULL and context.pos_min() == 0 and context.can_shift()
    rest = TOKENS[60:70]
    assert nmse(decode_each(context, rest), decode_each(plain, rest)) <= SAME
    assert context.seq_rm(0, 50, -1)
    assert context.arm(50) == driver.ERR_QUERIES


def test_queries_of_what_was_there_before_are_not_used(new_context: ContextFactory) -> None:
    """A loaded prompt of the same length must not be scored with the queries of the prompt that it replaced."""
    plain = new_context("g2", **F32)
    plain.decode(TOKENS[:N_PROMPT])
    for load in (
        lambda c: c.state_load(plain.state()),
        lambda c: c.seq_state_load(plain.seq_state()),
    ):
        context = new_context("g2", **F32, dge=SETTINGS.as_params())
        context.decode(tokens_of(N_PROMPT, 16))
        assert load(context) > 0
        assert context.arm(N_PROMPT) == driver.ERR_QUERIES
        assert context.reuse(N_PROMPT, N_PROMPT) < N_PROMPT


@UNIFIED
@pytest.mark.parametrize("seq", [0, 1])
def test_state_of_one_sequence(
    new_context: ContextFactory, evicted_context: Callable[..., Context], kv_unified: bool, seq: int
) -> None:
    """Into the same sequence or another one, beside a sequence that goes on undisturbed."""
    settings = {"n_seq_max": 2, "kv_unified": kv_unified}
    original = evicted_context(**settings)
    state = original.seq_state(0)
    context = new_context("g2", **F32, **settings, dge=SETTINGS.as_params())
    plain = new_context("g2", **F32, **settings)
    other, beside = tokens_of(60, 11), 1 - seq
    for c in (context, plain):
        c.decode(other[:40], seq=beside)
    assert context.seq_state_load(state, seq) == len(state)
    assert context.info(beside)["state"] == driver.STATE_FULL
    check_loaded(context, original, seq)
    assert nmse(decode_each(context, other[40:], beside), decode_each(plain, other[40:], beside)) <= SAME


def test_armed_state_loads_as_a_full_one(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain = new_context("g2", **F32)
    plain.decode(TOKENS[:N_PROMPT])
    assert context.state() == plain.state()
    other = new_context("g2", **F32, dge=SETTINGS.as_params())
    assert other.state_load(context.state()) > 0
    assert other.info()["state"] == driver.STATE_FULL
    rest = TOKENS[N_PROMPT:]
    assert np.array_equal(decode_each(other, rest), decode_each(plain, rest))


def usable(context: Context, plain: Context) -> None:
    """After a failed load: cleared, the context works like a fresh one."""
    context.clear()
    tokens = tokens_of(40, 12)
    assert np.array_equal(context.decode(tokens), plain.decode(tokens))


def test_an_evicted_state_needs_eviction_enabled(
    new_context: ContextFactory, evicted_context: Callable[..., Context]
) -> None:
    original = evicted_context()
    state, seq_state = original.state(), original.seq_state()
    context = new_context("g2", **F32)
    with driver.captured_log() as log:
        assert context.state_load(state) == 0
    assert any("DGE" in line or "n_stream" in line for line in log)
    usable(context, new_context("g2", **F32))
    context = new_context("g2", **F32)
    assert context.seq_state_load(seq_state) == 0
    usable(context, new_context("g2", **F32))


@pytest.mark.parametrize("model, types", [("g3", "f32"), ("g1", "f32"), ("g2", "f16")])
def test_state_of_another_layout(
    new_context: ContextFactory, evicted_context: Callable[..., Context], model: str, types: str
) -> None:
    state = evicted_context().state()
    settings = {"type_k": types, "type_v": types}
    context = new_context(model, **settings, dge=SETTINGS.as_params())
    assert context.state_load(state) == 0
    usable(context, new_context(model, **settings))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sequence"])
def test_truncated_state(new_context: ContextFactory, evicted_context: Callable[..., Context], whole: bool) -> None:
    original = evicted_context()
    state = original.state() if whole else original.seq_state()
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    load = context.state_load if whole else context.seq_state_load
    lengths = {*range(0, 400, 7), *range(400, len(state), len(state) // 40), len(state) - 1}
    for length in sorted(lengths):
        assert load(state[:length]) == 0, length
        assert context.info()["state"] == driver.STATE_EMPTY, length
    usable(context, new_context("g2", **F32))
    assert load(state) == len(state)
    check_loaded(context, original)


def test_damaged_section(new_context: ContextFactory, evicted_context: Callable[..., Context]) -> None:
    """Any byte of the section may be wrong: an error or a harmless load, never a crash, and a usable context."""
    original = evicted_context()
    state = original.seq_state()
    tokens = tokens_of(40, 12)
    want = new_context("g2", **F32).decode(tokens)
    rng = np.random.default_rng(13)
    places = [(at,) for at in range(160)] + [tuple(rng.integers(0, 2000, 3).tolist()) for _ in range(100)]
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    n_refused = 0
    for place in places:
        damaged = bytearray(state)
        for at in place:
            damaged[at] ^= int(rng.integers(1, 256))
        refused = context.seq_state_load(bytes(damaged)) == 0
        n_refused += refused
        assert not refused or context.info()["state"] == driver.STATE_EMPTY
        context.clear()
        assert np.array_equal(context.decode(tokens), want)
        context.clear()
    assert n_refused >= 40
    assert context.seq_state_load(state) == len(state)
    check_loaded(context, original)


@pytest.mark.parametrize("phase", ["full", "armed", "evicted"])
@UNIFIED
def test_an_empty_state_leaves_an_empty_sequence(new_context: ContextFactory, kv_unified: bool, phase: str) -> None:
    """llama.cpp skips a state without entries; what stayed would not be what is known of the sequence."""
    context = new_context("g2", n_seq_max=2, kv_unified=kv_unified, **{**F32, "dge": SETTINGS.as_params()})
    if phase == "evicted":
        evict_after(context, TOKENS[: N_BEFORE + 5], N_PROMPT, 2)
    elif phase == "armed":
        prefill_and_arm(context, TOKENS[:N_PROMPT])
    else:
        context.decode(TOKENS[:N_PROMPT], every=False)
    context.seq_state_load(context.seq_state(1), 0)
    info = context.info()
    assert (info["state"], info["n_rows"], context.pos_max()) == (driver.STATE_EMPTY, 0, -1)
    assert (info["n_parked"], context.can_shift()) == (0, True)
    evict_after(context, TOKENS[: N_BEFORE + 5], N_PROMPT, 2)


@UNIFIED
def test_a_state_that_ends_early_leaves_nothing_of_before(new_context: ContextFactory, kv_unified: bool) -> None:
    """Wherever it ends, the sequence is empty."""
    context = new_context("g2", n_seq_max=2, kv_unified=kv_unified, **{**F32, "dge": SETTINGS.as_params()})
    context.decode(tokens_of(60, 3), every=False)
    state = context.seq_state()
    for n_cut in (4, 8, 1000, len(state) // 2):
        context.clear()
        evict_after(context, TOKENS[: N_BEFORE + 5], N_PROMPT, 2)
        assert context.seq_state_load(state[:-n_cut], 0) == 0
        info = context.info()
        assert (info["state"], info["n_rows"], context.pos_max()) == (driver.STATE_EMPTY, 0, -1), n_cut
        assert info["n_parked"] == 0 and context.restore(N_PROMPT) == 0, n_cut
