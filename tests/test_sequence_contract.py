"""What the memory functions of llama.h and the state functions do with a sequence that was cut or will be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.driver import Context
from reference.forward import Reference, nmse
from reference.policies import Settings, kept_by
from reference.scenario import as_lists, cut_after, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

N_PROMPT = 120
SETTINGS = Settings(budget=32, draft_tokens=3)
N_CUT = N_PROMPT + 2
TOKENS = tokens_of(N_CUT + 40, 0)
# f32 without flash attention: equal up to the order of sums
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
SAME = 1e-9
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


@pytest.fixture
def cut_context(new_context: ContextFactory) -> Callable[..., Context]:
    """Makes a context with a cut sequence 0 and 5 rows after the cut."""

    def make(**settings: Any) -> Context:
        context = new_context("g2", **{**F32, "dge": SETTINGS.as_params(), **settings})
        cut_after(context, TOKENS[: N_CUT + 5], N_PROMPT, 2)
        return context

    return make


def cut_reference(zoo: Zoo, kept: Any, n_after: int = 5) -> Reference:
    """The same sequence in the reference."""
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_CUT])
    reference.mask_all_but(kept)
    for token in TOKENS[N_CUT : N_CUT + n_after]:
        reference.step([token])
    return reference


def is_as_new(context: Context, new_context: ContextFactory, seq: int = 0, **settings: Any) -> None:
    """The sequence is empty, and a new prompt in it goes as in a fresh context, cut included."""
    info = context.info(seq)
    assert info["state"] == driver.STATE_FULL and info["n_rows"] == 0
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
    assert context.info()["state"] == driver.STATE_CUT

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
    assert context.pos_max(1) == -1 and context.info()["state"] == driver.STATE_CUT
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
    assert context.info()["n_cuts"] == 0 and context.info()["n_rows"] == 150


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
    assert len([line for line in log if "cut" in line]) == 3
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
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_cuts"] == 0
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
    assert context.info()["state"] == driver.STATE_CUT and context.info()["n_rows"] == 33


# copies


def test_shared_rows_are_not_cut(new_context: ContextFactory) -> None:
    """A copy made before the cut shares the cells: the cut is given up and both sequences go on in full."""
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
    assert info["state"] == driver.STATE_FULL and info["error"] == driver.ERR_SHARED and info["n_cuts"] == 0
    assert info["n_rows"] == N_PROMPT + 10
    assert context.arm(N_PROMPT) == driver.ERR_SHARED
    assert context.cut() == driver.ERR_SHARED


def test_a_copy_that_is_gone_does_not_prevent_the_cut(new_context: ContextFactory) -> None:
    settings = {**F32, "n_seq_max": 2, "kv_unified": True, "dge": SETTINGS.as_params()}
    context, once = new_context("g2", **settings), new_context("g2", **settings)
    context.decode(TOKENS[:N_PROMPT])
    context.seq_cp(0, 1)
    assert context.arm(N_PROMPT) == driver.ERR_SHARED
    assert context.seq_rm(1, -1, -1)
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, TOKENS[N_PROMPT:])[2:]
    assert np.array_equal(got, cut_after(once, TOKENS, N_PROMPT, 2))


@pytest.mark.parametrize("p0, p1", [(0, 40), (60, -1), (N_PROMPT - 1, N_PROMPT)])
def test_a_partly_shared_sequence_is_not_cut(new_context: ContextFactory, p0: int, p1: int) -> None:
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
    assert context.info(0)["state"] == driver.STATE_CUT and context.info(0)["n_rows"] == 32 + 12
    decode_each(plain, rest, 0)
    assert np.array_equal(decode_each(context, rest, 1), decode_each(plain, rest, 1))
    assert context.info(1)["state"] == driver.STATE_FULL and context.info(1)["n_rows"] == N_PROMPT + 12


@UNIFIED
def test_a_copy_of_a_cut_sequence_goes_on_alike(cut_context: Callable[..., Context], kv_unified: bool) -> None:
    context = cut_context(n_seq_max=3, kv_unified=kv_unified)
    untouched = cut_context(n_seq_max=3, kv_unified=kv_unified)
    context.seq_cp(0, 2)
    rest = TOKENS[N_CUT + 5 :]
    want = decode_each(untouched, rest)
    assert nmse(decode_each(context, rest, 2), want) <= SAME
    assert nmse(decode_each(context, rest, 0), want) <= SAME
    assert as_lists(context.kept(2)) == as_lists(context.kept(0)) == as_lists(untouched.kept(0))
    for name in ("state", "n_prompt", "boundary", "pos_min", "n_rows"):
        assert context.info(2)[name] == context.info(0)[name]
    # the contract holds for the copy, too
    assert not context.seq_rm(2, 10, -1) and context.seq_rm(2, N_CUT + 5, -1)
    assert context.seq_rm(0, -1, -1)
    assert nmse(decode_each(context, rest, 2), want) <= SAME


@UNIFIED
@pytest.mark.parametrize("p0, p1", [(0, 40), (N_CUT, -1), (1, -1)])
def test_a_part_of_a_cut_sequence_is_not_copied(
    cut_context: Callable[..., Context], kv_unified: bool, p0: int, p1: int
) -> None:
    if not kv_unified and (p0, p1) != (0, 40):
        p1 = N_CUT + 2  # stock llama.cpp aborts for such ranges between streams
    context = cut_context(n_seq_max=2, kv_unified=kv_unified)
    untouched = cut_context(n_seq_max=2, kv_unified=kv_unified)
    with driver.captured_log() as log:
        context.seq_cp(0, 1, p0, p1)
    assert any("cut" in line for line in log)
    assert context.pos_max(1) == -1
    rest = TOKENS[N_CUT + 5 :]
    assert np.array_equal(decode_each(context, rest), decode_each(untouched, rest))


# several sequences


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
def test_a_cut_leaves_another_sequence_alone(new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
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
        decode_each(c, TOKENS[N_PROMPT : N_CUT + 2])
    assert context.info(0)["state"] == driver.STATE_CUT and context.info(0)["n_rows"] == 32 + 4
    assert context.info(1)["state"] == driver.STATE_FULL and context.info(1)["n_rows"] == 70
    got, want = decode_each(context, other[70:], 1), decode_each(plain, other[70:], 1)
    if kv_unified:
        # with flash attention the sums are f16
        assert nmse(got, want) <= (1e-5 if flash_attn else SAME)
    else:
        assert np.array_equal(got, want)


@UNIFIED
def test_two_sequences_cut_in_one_decode(zoo: Zoo, new_context: ContextFactory, kv_unified: bool) -> None:
    """Batches that mix both sequences, and two cuts that fall due at once."""
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
        assert info["state"] == driver.STATE_CUT and info["n_cuts"] == 2
        assert (info["n_rows_before"], info["n_rows_after"], info["n_rows"]) == (n + 2, 34, 34 + 18)
        reference = Reference(zoo["g2"].weights)
        reference.run(tokens[seq][: n + 2])
        reference.mask_all_but(context.kept(seq))
        want = np.concatenate([reference.step([token]) for token in tokens[seq][n + 2 :]])
        assert nmse(logits[seq][2:], want) <= SAME


def test_scattered_cells(zoo: Zoo, new_context: ContextFactory) -> None:
    """Cells in pieces, out of order, between those of another sequence: the cut finds and frees the right ones."""
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
    got = decode_each(context, TOKENS[N_PROMPT : N_CUT + 20])[2:]
    assert context.info()["state"] == driver.STATE_CUT and context.info()["n_rows"] == 34 + 20

    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_CUT])
    assert as_lists(context.kept()) == as_lists(kept_by(reference, N_PROMPT, SETTINGS))
    reference.mask_all_but(context.kept())
    assert nmse(got, np.concatenate([reference.step([token]) for token in TOKENS[N_CUT : N_CUT + 20]])) <= SAME

    beside = Reference(zoo["g2"].weights)
    beside.run(other[:100])
    assert nmse(context.decode(other[100:], seq=1), beside.run(other[100:])) <= SAME
    # nothing leaked: all cells but those of the two sequences are free
    assert context.poison(driver.LARGE_F16) == 512 - (34 + 20) - 150


def test_rows_move_to_the_first_cells(zoo: Zoo, new_context: ContextFactory) -> None:
    """Cells that come first are kept, wherever the rows were: what attention reads shrinks."""
    context = new_context("g2", **F32, n_ctx=512, n_seq_max=2, kv_unified=True, dge=SETTINGS.as_params())
    context.decode(tokens_of(300, 18), seq=1)
    context.decode(TOKENS[:60])
    assert context.seq_rm(1, -1, -1)
    context.decode(TOKENS[60:N_PROMPT])
    assert context.info()["n_kv"] == 512
    assert context.arm(N_PROMPT) == driver.OK
    got = decode_each(context, TOKENS[N_PROMPT : N_CUT + 20])[2:]
    assert context.info()["n_kv"] == 256
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_CUT])
    reference.mask_all_but(context.kept())
    assert nmse(got, np.concatenate([reference.step([token]) for token in TOKENS[N_CUT : N_CUT + 20]])) <= SAME


# states


def check_loaded(context: Context, original: Context, seq: int = 0) -> None:
    """The loaded sequence is that of `original`, which has 5 rows after the cut, and the contract holds for it."""
    info, want = context.info(seq), original.info()
    for name in ("state", "n_prompt", "n_draft", "budget", "n_rows_before", "n_rows_after", "n_rows"):
        assert info[name] == want[name], name
    for name in ("boundary", "pos_min", "bytes_before", "bytes_after"):
        assert info[name] == want[name], name
    assert as_lists(context.kept(seq)) == as_lists(original.kept())
    assert (context.pos_min(seq), context.pos_max(seq)) == (original.pos_min(), original.pos_max())
    assert not context.seq_rm(seq, 50, -1) and not context.can_shift()
    rest = TOKENS[N_CUT + 5 :]
    got, expected = decode_each(context, rest, seq), decode_each(original, rest)
    assert nmse(got, expected) <= SAME
    assert context.seq_rm(seq, N_CUT + 5, -1) and original.seq_rm(0, N_CUT + 5, -1)
    assert nmse(context.decode([TOKENS[N_CUT + 5]], seq=seq), expected[0]) <= SAME


@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
@pytest.mark.parametrize("type_k, type_v", [("f32", "f32"), ("q8_0", "")])
def test_whole_state(
    new_context: ContextFactory, cut_context: Callable[..., Context], flash_attn: bool, type_k: str, type_v: str
) -> None:
    settings = {"flash_attn": flash_attn, "type_k": type_k, "type_v": type_v or ("q8_0" if flash_attn else "f32")}
    original = cut_context(**settings)
    state = original.state()
    fresh = new_context("g2", **settings, dge=SETTINGS.as_params())
    assert fresh.state_load(state) == len(state)
    assert fresh.state() == state
    check_loaded(fresh, original)


def test_whole_state_over_something_else(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    """Loading replaces what is there: a full sequence, one that is armed, or another cut one."""
    state = cut_context().state()
    full = new_context("g2", **F32, dge=SETTINGS.as_params())
    full.decode(tokens_of(50, 8))
    armed = new_context("g2", **F32, dge=SETTINGS.as_params())
    prefill_and_arm(armed, tokens_of(90, 9))
    other = new_context("g2", **F32, dge=SETTINGS.as_params())
    cut_after(other, tokens_of(100, 10), 80, 2)
    for context in (full, armed, other):
        assert context.state_load(state) == len(state)
        check_loaded(context, cut_context())


def test_uncut_state_over_a_cut_sequence(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    """A full state after a cut one: nothing of the cut may stay."""
    plain = new_context("g2", **F32)
    plain.decode(TOKENS[:60])
    context = cut_context()
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
    new_context: ContextFactory, cut_context: Callable[..., Context], kv_unified: bool, seq: int
) -> None:
    """Into the same sequence or another one, beside a sequence that goes on undisturbed."""
    settings = {"n_seq_max": 2, "kv_unified": kv_unified}
    original = cut_context(**settings)
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


def test_cut_state_needs_eviction(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    original = cut_context()
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
    new_context: ContextFactory, cut_context: Callable[..., Context], model: str, types: str
) -> None:
    state = cut_context().state()
    settings = {"type_k": types, "type_v": types}
    context = new_context(model, **settings, dge=SETTINGS.as_params())
    assert context.state_load(state) == 0
    usable(context, new_context(model, **settings))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sequence"])
def test_truncated_state(new_context: ContextFactory, cut_context: Callable[..., Context], whole: bool) -> None:
    original = cut_context()
    state = original.state() if whole else original.seq_state()
    context = new_context("g2", **F32, dge=SETTINGS.as_params())
    load = context.state_load if whole else context.seq_state_load
    lengths = {*range(0, 400, 7), *range(400, len(state), len(state) // 40), len(state) - 1}
    for length in sorted(lengths):
        assert load(state[:length]) == 0, length
        assert context.info()["state"] == driver.STATE_FULL, length
    usable(context, new_context("g2", **F32))
    assert load(state) == len(state)
    check_loaded(context, original)


def test_damaged_section(new_context: ContextFactory, cut_context: Callable[..., Context]) -> None:
    """Any byte of the section may be wrong: an error or a harmless load, never a crash, and a usable context."""
    original = cut_context()
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
        assert not refused or context.info()["state"] == driver.STATE_FULL
        context.clear()
        assert np.array_equal(context.decode(tokens), want)
        context.clear()
    assert n_refused >= 40
    assert context.seq_state_load(state) == len(state)
    check_loaded(context, original)


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
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_cuts"] == 0


def test_return_codes(new_context: ContextFactory) -> None:
    off = new_context("g2")
    off.decode(TOKENS[:N_PROMPT])
    assert off.supported() == (driver.OK, "")
    assert off.arm(N_PROMPT) == off.cut() == off.disarm() == off.reuse(10, 5) == driver.ERR_DISABLED
    assert off.disable() == driver.OK

    # enabled too late: the queries of the prompt are gone
    off.enable(**SETTINGS.as_params())
    assert off.arm(N_PROMPT) == off.cut() == driver.ERR_QUERIES

    context = new_context("g2", dge=SETTINGS.as_params())
    assert context.arm(1) == context.cut() == driver.ERR_SEQ
    context.decode(TOKENS[:N_PROMPT])
    assert context.arm(N_PROMPT + 1) == context.arm(0) == context.arm(-5) == driver.ERR_SEQ
    assert context.arm(N_PROMPT, seq=1) == context.arm(N_PROMPT, seq=-1) == driver.ERR_SEQ
    assert context.arm(32) == driver.NOTHING_TO_CUT
    with pytest.raises(RuntimeError, match=str(driver.ERR_SEQ)):
        context.kept_of(0, 0)
    assert context.cut() == driver.OK
    assert context.info()["n_rows"] == 32
    assert context.arm(N_PROMPT) == context.cut() == context.disable() == driver.ERR_CUT
    for layer, head in ((3, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(RuntimeError, match=str(driver.ERR_PARAMS)):
            context.kept_of(layer, head)

    # new settings drop the captured queries, sequences that were cut stay so
    context.enable(**Settings(budget=40, window=16).as_params())
    assert context.info()["state"] == driver.STATE_CUT and context.info()["n_rows"] == 32
    context.clear()
    context.decode(TOKENS[:N_PROMPT])
    context.enable(**SETTINGS.as_params())
    assert context.arm(N_PROMPT) == driver.ERR_QUERIES


BAD_PARAMS: list[dict[str, Any]] = [
    {"policy": 99},
    {"policy": 4},  # without its callback
    {"layer_budgets": 2},
    {"layer_budgets": -1},
    {"head_budgets": 3},
    {"head_budgets": -1},
    {"head_budgets": 2},  # without its table
    {"policy": -1},
    {"scores": 3},
    {"scores": -1},
    {"pooling": 0},
    {"pooling": 3},
    {"draft_pooling": 3},
    {"draft_pooling": -1},
    {"kernel_size": 0},
    {"kernel_size": 4},
    {"kernel_size": -3},
    {"budget": 0},
    {"budget": -1},
    {"budget": 7},
    {"policy": 1, "budget": 11},
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
    {"policy": 1, "sinks": 2**31 - 1},
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
            assert info["error"] == driver.ERR_ABORTED and info["n_cuts"] == 0
            assert context.rc == 2 and info["n_rows"] == N_CUT
        else:
            assert info["state"] == driver.STATE_CUT and info["n_cuts"] == 1
        # after an abort the row of the batch may be there or not; either way the sequence goes on from what is there
        at = context.pos_max() + 1
        assert at in (N_CUT, N_CUT + 1)
        got = decode_each(context, TOKENS[at:])
        assert context.info()["state"] == driver.STATE_CUT and context.info()["n_cuts"] == 1
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
    assert context.cut() == driver.ERR_ABORTED
    context.set_abort(None)
    assert context.info()["state"] == driver.STATE_FULL and context.state() == before
    assert context.cut() == driver.OK and context.info()["n_rows"] == 32
