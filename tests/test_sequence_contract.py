"""What the memory functions of llama.h do with a sequence that was cut or will be; arming, errors, aborts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.cut import F32, N_CUT, N_PROMPT, SAME, SETTINGS, TOKENS, cut_reference
from reference.driver import Context
from reference.forward import Reference, nmse
from reference.policies import Settings
from reference.scenario import as_lists, cut_after, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


def is_as_new(context: Context, new_context: ContextFactory, seq: int = 0, **settings: Any) -> None:
    """The sequence is empty, and a new prompt in it goes as in a fresh context, cut included."""
    info = context.info(seq)
    assert info["state"] == driver.STATE_EMPTY and info["n_rows"] == 0
    assert (info["boundary"], info["pos_min"], info["n_rows_after"], info["n_prompt"]) == (-1, -1, 0, 0)
    assert (context.pos_min(seq), context.pos_max(seq)) == (-1, -1)
    tokens = tokens_of(90 + 12, 1)
    fresh = new_context("g2", **{**F32, "dge": SETTINGS.as_params(), **settings})
    assert nmse(cut_after(context, tokens, 90, 2, seq), cut_after(fresh, tokens, 90, 2)) <= SAME
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
        (0, N_CUT + 4),
        (N_PROMPT - 10, N_CUT),
    ],
)
@pytest.mark.parametrize("seq", [0, -1])
def test_rm_that_reaches_the_prompt_is_refused(cut_context: Callable[..., Context], seq: int, p0: int, p1: int) -> None:
    context, untouched = cut_context(), cut_context()
    before, info = context.state(), context.info()
    assert not context.seq_rm(seq, p0, p1)
    assert context.state() == before and context.info() == info
    assert np.array_equal(decode_each(context, TOKENS[N_CUT + 5 :]), decode_each(untouched, TOKENS[N_CUT + 5 :]))


@pytest.mark.parametrize("p0", [N_PROMPT, N_PROMPT + 1, N_CUT, N_CUT + 3])
@pytest.mark.parametrize("seq", [0, -1])
def test_rm_above_the_prompt_is_exact(zoo: Zoo, cut_context: Callable[..., Context], seq: int, p0: int) -> None:
    context = cut_context()
    kept = context.kept()
    assert context.seq_rm(seq, p0, -1)
    assert context.pos_max() == p0 - 1
    assert context.info()["n_rows"] == SETTINGS.budget + p0 - N_PROMPT
    assert context.info()["state"] == driver.STATE_EVICTED

    # in the reference the rows that were removed come again, this time over the cut cache
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_CUT])
    if p0 <= N_CUT:
        reference = Reference(zoo["g2"].weights)
        reference.run(TOKENS[:p0])
        reference.mask_all_but([[rows[rows < p0] for rows in heads] for heads in kept])
    else:
        reference = cut_reference(zoo, kept, p0 - N_CUT)
    rest = tokens_of(25, 2)
    assert nmse(decode_each(context, rest), np.concatenate([reference.step([token]) for token in rest])) <= SAME


def test_rm_of_rows_between_is_exact(zoo: Zoo, cut_context: Callable[..., Context]) -> None:
    context = cut_context()
    kept = context.kept()
    assert context.seq_rm(0, N_CUT + 1, N_CUT + 3)
    assert context.info()["n_rows"] == SETTINGS.budget + 2 + 5 - 2
    reference = cut_reference(zoo, kept)
    left = [N_CUT, N_CUT + 3, N_CUT + 4]
    reference.mask_all_but([[[*rows.tolist(), *left] for rows in heads] for heads in kept])
    rest = TOKENS[N_CUT + 5 :]
    assert nmse(decode_each(context, rest), np.concatenate([reference.step([token]) for token in rest])) <= SAME


@pytest.mark.parametrize(
    "seq, p0, p1", [(0, -1, -1), (0, 0, -1), (0, 0, N_CUT + 5), (0, 0, 10000), (-1, -1, -1), (-1, 0, -1)]
)
def test_rm_of_the_whole(
    new_context: ContextFactory, cut_context: Callable[..., Context], seq: int, p0: int, p1: int
) -> None:
    context = cut_context()
    assert context.seq_rm(seq, p0, p1)
    is_as_new(context, new_context)


@pytest.mark.parametrize("data", [True, False])
def test_clear(new_context: ContextFactory, cut_context: Callable[..., Context], data: bool) -> None:
    context = cut_context()
    context.clear(data)
    is_as_new(context, new_context)


def test_seq_keep(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    context, untouched = cut_context(n_seq_max=2), cut_context(n_seq_max=2)
    context.decode(tokens_of(30, 3), seq=1)
    context.seq_keep(0)
    assert context.pos_max(1) == -1 and context.info()["state"] == driver.STATE_EVICTED
    rest = TOKENS[N_CUT + 5 :]
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
    assert nmse(got, cut_after(once, TOKENS, N_PROMPT, 2)) <= SAME
    assert as_lists(context.kept()) == as_lists(once.kept())


def test_queries_of_removed_rows_are_not_used(new_context: ContextFactory) -> None:
    """Rows that come again while a cut is armed are not captured beyond the draft; the old ones' queries are gone."""
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
    decode_each(context, TOKENS[N_PROMPT:N_CUT])
    assert (context.pos_min(), context.pos_max()) == (0, N_CUT - 1)
    decode_each(context, TOKENS[N_CUT : N_CUT + 5])
    assert context.pos_max() == N_CUT + 4
    pos_min = context.pos_min()
    assert context.info()["pos_min"] == pos_min
    # no row from there on is missing, and the row before is, in some head
    kept = [positions for heads in context.kept() for positions in heads]
    assert all(set(range(pos_min, N_CUT)) <= set(positions.tolist()) for positions in kept)
    assert 0 < pos_min <= N_PROMPT - s.window
    if policy == "snapkv":
        assert any(pos_min - 1 not in positions for positions in kept)


def test_a_gap_or_a_repeated_position_is_still_refused(cut_context: Callable[..., Context]) -> None:
    context = cut_context()
    for pos in (N_CUT + 6, N_CUT + 4, 3):
        context.decode([5], pos=pos, check=False)
        assert context.rc == -1
    context.decode([5], pos=N_CUT + 5)


# shifts


def test_shifts_are_refused_after_a_cut(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    context, untouched = cut_context(), cut_context()
    assert not context.can_shift()
    before = context.state()
    with driver.captured_log() as log:
        context.seq_add(0, 0, -1, 5)
        context.seq_add(0, N_CUT, -1, -1)
        context.seq_div(0, 0, -1, 2)
    assert len([line for line in log if "shifted" in line]) == 3
    assert context.state() == before
    rest = TOKENS[N_CUT + 5 :]
    assert np.array_equal(decode_each(context, rest), decode_each(untouched, rest))
    context.clear()
    assert context.can_shift()
    is_as_new(context, new_context)


def test_shift_before_a_cut_prevents_it(new_context: ContextFactory) -> None:
    """Rows that do not stand at 0 .. n_prompt - 1 cannot be armed, and an armed sequence that is shifted is not cut."""
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


def test_cut_after_a_context_shift(new_context: ContextFactory) -> None:
    """Rows that were shifted to 0 .. n - 1 can be cut once the shift has been applied, but not before."""
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


def test_decodes_before_the_cut_is_due_are_those_of_a_full_cache(new_context: ContextFactory) -> None:
    s = Settings(budget=32, draft_tokens=10)
    context, plain = new_context("g2", dge=s.as_params()), new_context("g2")
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    plain.decode(TOKENS[:N_PROMPT])
    rest = TOKENS[N_PROMPT : N_PROMPT + 9]
    assert np.array_equal(decode_each(context, rest), decode_each(plain, rest))
    assert context.info()["state"] == driver.STATE_ARMED
    assert context.disarm() == driver.OK
    rest = TOKENS[N_PROMPT + 9 : N_PROMPT + 20]
    assert np.array_equal(decode_each(context, rest), decode_each(plain, rest))
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_evictions"] == 0


def test_return_codes(new_context: ContextFactory) -> None:
    off = new_context("g2")
    off.decode(TOKENS[:N_PROMPT])
    assert off.supported() == (driver.OK, "")
    assert off.arm(N_PROMPT) == off.evict() == off.disarm() == off.reuse(10, 5) == driver.ERR_DISABLED
    assert off.disable() == driver.OK

    # enabled too late: the queries of the prompt are gone
    off.enable(**SETTINGS.as_params())
    assert off.arm(N_PROMPT) == off.evict() == driver.ERR_QUERIES

    context = new_context("g2", dge=SETTINGS.as_params())
    assert context.arm(1) == context.evict() == driver.ERR_SEQ
    context.decode(TOKENS[:N_PROMPT])
    assert context.arm(N_PROMPT + 1) == context.arm(0) == context.arm(-5) == driver.ERR_SEQ
    assert context.arm(N_PROMPT, seq=1) == context.arm(N_PROMPT, seq=-1) == driver.ERR_SEQ
    assert context.arm(32) == driver.NOTHING_TO_EVICT
    with pytest.raises(RuntimeError, match=str(driver.ERR_SEQ)):
        context.kept_of(0, 0)
    assert context.evict() == driver.OK
    assert context.info()["n_rows"] == 32
    assert context.arm(N_PROMPT) == context.evict() == context.disable() == driver.ERR_EVICTED
    for layer, head in ((3, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(RuntimeError, match=str(driver.ERR_PARAMS)):
            context.kept_of(layer, head)

    # new settings drop the captured queries, sequences that were cut stay so
    context.enable(**Settings(budget=40, window=16).as_params())
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 32
    context.clear()
    context.decode(TOKENS[:N_PROMPT])
    context.enable(**SETTINGS.as_params())
    assert context.arm(N_PROMPT) == driver.ERR_QUERIES


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


def test_disable_gives_the_stock_library_back(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    context, plain = cut_context(), new_context("g2", **F32)
    context.clear()
    assert context.disable() == driver.OK
    assert context.arm(1) == driver.ERR_DISABLED
    tokens = tokens_of(100, 14)
    assert np.array_equal(context.decode(tokens), plain.decode(tokens))
    assert context.state() == plain.state()
    context.clear()
    context.enable(**SETTINGS.as_params())
    cut_after(context, TOKENS, N_PROMPT, 2)


@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
def test_reuse_of_a_prefix(zoo: Zoo, new_context: ContextFactory, scores: str) -> None:
    """A prompt that builds on an older one: with as much of it as the library allows to keep, the cut is the same."""
    s = Settings(budget=32, draft_tokens=3, scores=scores)
    second = [*TOKENS[:100], *tokens_of(30, 15)]
    fresh = new_context("g2", **F32, dge=s.as_params())
    want = cut_after(fresh, [*second, *TOKENS[:12]], len(second), 2)
    for n_match, n_prompt in ((100, 130), (100, 103), (100, 100), (20, 130)):
        context = new_context("g2", **F32, dge=s.as_params())
        context.decode(TOKENS[:110])
        n_keep = context.reuse(n_prompt, n_match)
        assert n_match - s.window <= n_keep <= n_match
        assert context.seq_rm(0, n_keep, -1)
        prompt = [*TOKENS[:n_match], *second[n_match:]][:n_prompt]
        if n_keep < n_prompt:
            context.decode(prompt[n_keep:])
        assert context.arm(n_prompt) == driver.OK
        if prompt == second:
            got = decode_each(context, TOKENS[:12])[2:]
            assert nmse(got, want) <= SAME
            assert as_lists(context.kept()) == as_lists(fresh.kept())
    assert context.reuse(130, 131) == context.reuse(0, 0) == context.reuse(10, -1) == driver.ERR_PARAMS


# abort


def test_abort_in_the_cut(new_context: ContextFactory) -> None:
    """Stopped at any of its steps, the cut leaves the sequence as it was, and a later decode makes it."""
    settings = {**F32, "dge": SETTINGS.as_params()}
    once = new_context("g2", **settings)
    want = cut_after(once, TOKENS, N_PROMPT, 2)
    n_aborted_cuts = 0
    for n_calls in [*range(40), *range(40, 400, 20)]:
        context = new_context("g2", **settings)
        prefill_and_arm(context, TOKENS[:N_PROMPT])
        decode_each(context, TOKENS[N_PROMPT:N_CUT])
        calls = count()
        context.set_abort(lambda calls=calls, n_calls=n_calls: next(calls) >= n_calls)
        context.decode([TOKENS[N_CUT]], check=False)
        context.set_abort(None)
        assert context.rc in (0, 2)
        info = context.info()
        if info["state"] == driver.STATE_ARMED:
            n_aborted_cuts += 1
            assert info["error"] == driver.ERR_ABORTED and info["n_evictions"] == 0
            assert context.rc == 2 and info["n_rows"] == N_CUT
        else:
            assert info["state"] == driver.STATE_EVICTED and info["n_evictions"] == 1
        # after an abort the row of the batch may be there or not; either way the sequence goes on from what is there
        at = context.pos_max() + 1
        assert at in (N_CUT, N_CUT + 1)
        got = decode_each(context, TOKENS[at:])
        assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_evictions"] == 1
        assert as_lists(context.kept()) == as_lists(once.kept())
        assert nmse(got, want[at - N_CUT :]) <= SAME
        context.close()
        if next(calls) <= n_calls:
            break  # nothing was stopped: no more steps to stop
    assert n_aborted_cuts > 3


def test_abort_of_a_forced_cut(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    context.decode(TOKENS[:N_PROMPT])
    before = context.state()
    context.set_abort(lambda: True)
    assert context.evict() == driver.ERR_ABORTED
    context.set_abort(None)
    assert context.info()["state"] == driver.STATE_FULL and context.state() == before
    assert context.evict() == driver.OK and context.info()["n_rows"] == 32
