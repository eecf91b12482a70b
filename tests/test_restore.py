"""Parking and restore: what comes back is bit for bit the cache that was never cut, or a clear error.

Each case runs a session that is cut and restored and one of the same tokens, in the same batches, that was never cut.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.covering import covering_set
from reference.driver import Context
from reference.forward import nmse
from reference.scenario import as_lists, cut_after, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

N_PROMPT, N_DRAFT = 131, 2
N_CUT = N_PROMPT + N_DRAFT  # rows that are parked
FIRST = tokens_of(N_CUT + 9, 0)
QUESTION = tokens_of(57, 1)
ANSWER = tokens_of(14, 2)
DGE: dict[str, Any] = {"budget": 40, "draft_tokens": N_DRAFT + 1, "scores": "both", "park": "ram"}
PARKS = pytest.mark.parametrize("park", ["ram", "disk"])
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


def parked(folder: Path, park: str = "disk", **settings: Any) -> dict[str, Any]:
    """Settings with a place to park."""
    place: dict[str, Any] = {"park": park, "park_dir": folder} if park == "disk" else {"park": park}
    return {**DGE, **settings, **place}


def cut_session(context: Context, seq: int = 0, tokens: list[int] = FIRST) -> driver.Logits:
    """A prompt, a draft, a cut and an answer."""
    prefill_and_arm(context, tokens[:N_PROMPT], seq)
    decode_each(context, tokens[N_PROMPT:N_CUT], seq)
    assert context.info(seq)["state"] == driver.STATE_ARMED
    logits = decode_each(context, tokens[N_CUT:], seq)
    info = context.info(seq)
    assert info["state"] == driver.STATE_CUT, context.status(info["error"])
    assert info["n_rows_before"] == info["n_parked"] == N_CUT > info["n_rows_after"]
    return logits


def uncut_session(context: Context, n: int, seq: int = 0, tokens: list[int] = FIRST) -> None:
    """The same up to the cut without one, and back to n rows."""
    context.decode(tokens[:N_PROMPT], seq=seq, every=False)
    decode_each(context, tokens[N_PROMPT:N_CUT], seq)
    if n < N_CUT:
        assert context.seq_rm(seq, n, -1)


def close(got: driver.Logits, want: driver.Logits) -> bool:
    """The same rows in other cells: equal up to the order of sums, of which rounding to f16 makes more."""
    return nmse(got, want) < 1e-6


def same_from_now_on(context: Context, twin: Context, tokens: list[int], cut: bool, seq: int = 0) -> None:
    """Both evaluate a prompt's rest and an answer, with a cut in between; all of it is bit for bit the same."""
    n_prompt = context.pos_max(seq) + 1 + len(tokens)
    assert np.array_equal(context.decode(tokens, seq=seq), twin.decode(tokens, seq=seq))
    if cut:
        assert context.arm(n_prompt, seq) == twin.arm(n_prompt, seq) == driver.OK
    assert np.array_equal(decode_each(context, ANSWER, seq), decode_each(twin, ANSWER, seq))
    for each in (context, twin) if cut else ():
        assert each.info(seq)["state"] == driver.STATE_CUT, each.status(each.info(seq)["error"])
        assert each.info(seq)["n_rows_before"] == n_prompt + N_DRAFT
    if cut:
        assert as_lists(context.kept(seq)) == as_lists(twin.kept(seq))
        assert context.info(seq)["n_parked"] == n_prompt + N_DRAFT


# equal to a cache that was never cut

FACTORS: dict[str, list[Any]] = {
    "model": ["g1", "g2", "g3", "g8", "deep"],
    "types": [("f16", "f16"), ("f32", "f32"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0")],
    "flash_attn": [False, True],
    "policy": ["snapkv", "streamingllm", "pyramidkv", "h2o"],
    "scores": ["draft", "policy", "both"],
    "head_budgets": ["uniform", "adaptive"],
    "park": ["ram", "disk"],
    "elastic": [False, True],
    "n_ubatch": [7, 32, 512],
}


def valid(case: Mapping[str, Any]) -> bool:
    # V can be quantised with flash attention only; streamingllm has no scores that heads could share rows by
    quantised_v = case.get("types", ("", "f16"))[1] not in ("f16", "f32")
    adaptive = case.get("head_budgets") == "adaptive"
    return not (quantised_v and case.get("flash_attn") is False) and not (
        adaptive and case.get("policy") == "streamingllm"
    )


CASES = covering_set(FACTORS, valid)


def name_of(case: Any) -> str:
    return "-".join("/".join(value) if isinstance(value, tuple) else str(value) for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_as_if_never_cut(new_context: ContextFactory, tmp_path: Path, case: dict[str, Any]) -> None:
    """An appended question, an edited message, another beginning: then the logits and the next cut are the same."""
    dge = parked(tmp_path, **{name: case[name] for name in ("policy", "scores", "head_budgets", "park")})
    settings = {name: case[name] for name in ("flash_attn", "n_ubatch", "elastic")}
    settings |= {"type_k": case["types"][0], "type_v": case["types"][1], "dge": dge}
    sums = case["policy"] == "h2o" and case["scores"] != "draft"
    first, size = new_context(case["model"], **settings), {}
    for n_match in (N_CUT, N_CUT + 50, 77, 1):
        context = first if n_match == N_CUT else new_context(case["model"], **settings)
        cut_session(context)
        size[n_match] = context.memory_info()["n_cells"]
        n = min(n_match, N_CUT)
        assert context.restore(n_match) == n
        info = context.info()
        assert (info["state"], info["n_rows"], info["n_restored"]) == (driver.STATE_FULL, n, n)
        assert (info["n_parked"], info["bytes_parked"], context.memory_info()["parked"]) == (0, 0, 0)
        assert (context.pos_min(), context.pos_max(), context.can_shift()) == (0, n - 1, True)
        assert not list(tmp_path.iterdir())
        twin = new_context(case["model"], **settings)
        uncut_session(twin, n)
        # rows that are gone are in the sums of H2O: it says so, and everything but the next cut is right
        lost = sums and n < N_CUT
        assert context.reuse(n + len(QUESTION), n) == (0 if lost else n)
        same_from_now_on(context, twin, QUESTION, cut=not lost)
        if lost:
            assert context.arm(n + len(QUESTION)) == driver.ERR_QUERIES
        context.close()
        twin.close()
    assert set(size.values()) == {256 if case["elastic"] else 1024}


@pytest.mark.parametrize("flash_attn", [False, True])
def test_regenerated_answer(new_context: ContextFactory, flash_attn: bool) -> None:
    """Back to the end of the prompt: another answer, scored by the queries of the prompt that are still there."""
    settings = {"flash_attn": flash_attn, "dge": DGE}
    context = new_context("g2", **settings)
    cut_session(context)
    for seed in (3, 4):
        assert context.restore(N_PROMPT) == N_PROMPT == context.reuse(N_PROMPT, N_PROMPT)
        assert context.arm(N_PROMPT) == driver.OK
        answer = tokens_of(20, seed)
        fresh = new_context("g2", **settings)
        prefill_and_arm(fresh, FIRST[:N_PROMPT])
        assert np.array_equal(decode_each(context, answer), decode_each(fresh, answer))
        assert as_lists(context.kept()) == as_lists(fresh.kept())
        assert context.info()["state"] == driver.STATE_CUT


def test_the_comparison_would_fail(new_context: ContextFactory) -> None:
    """A row too many, another row, or the rows that the cut left: each gives other logits."""
    want = new_context("g2", dge=DGE)
    uncut_session(want, N_CUT)
    logits = want.decode(QUESTION)
    for wrong in range(3):
        context = new_context("g2", dge=DGE)
        tokens = list(FIRST)
        if wrong == 0:
            tokens[3] += 1 if tokens[3] < 200 else -1
        cut_session(context, tokens=tokens)
        if wrong < 2:
            context.restore(N_CUT)
        else:
            assert context.seq_rm(0, N_CUT, -1)
        if wrong == 1:
            assert context.debug_seq_rm(0, 5, 6)
        assert not np.array_equal(context.decode(QUESTION), logits), wrong


@PARKS
def test_many_turns(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """Six turns on one context, every one cut and restored, against one that is never cut."""
    settings: dict[str, Any] = {"n_ctx": 512, "elastic": True}
    context = new_context("g3", **settings, dge=parked(tmp_path, park, policy="h2o"))
    plain = new_context("g3", n_ctx=512)
    n = 0
    for turn in range(6):
        prompt, answer = tokens_of(60, 10 + turn), tokens_of(6, 20 + turn)
        assert np.array_equal(context.decode(prompt), plain.decode(prompt))
        assert context.arm(n + 60) == driver.OK
        decode_each(context, answer)
        info = context.info()
        assert info["state"] == driver.STATE_CUT and info["n_rows"] == 40 + 6
        assert len(list(tmp_path.iterdir())) == (park == "disk")
        assert context.restore(n + 62) == n + 62
        want = decode_each(plain, answer)
        assert np.array_equal(decode_each(context, answer[2:]), want[2:])
        n += 66
    assert context.info()["n_cuts"] == 6


# other sequences, fragmented caches


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True])
def test_restore_between_other_sequences(new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
    """Freed cells were taken by others: the rows come back into whatever is free, and the others do not notice."""
    settings: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": kv_unified, "flash_attn": flash_attn}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    for each in (context, twin):
        cut_session(each)
        for seq in (1, 2, 3):
            each.decode(tokens_of(60 + seq, seq), seq=seq)
        # holes between them
        for seq in (1, 2, 3):
            assert each.seq_rm(seq, 40 + seq, -1)
        each.decode(tokens_of(30, 9), seq=2)
    before = [context.seq_state(seq) for seq in (1, 2, 3)]
    assert context.restore(N_CUT) == N_CUT
    assert context.info()["n_rows"] == N_CUT
    assert [context.seq_state(seq) for seq in (1, 2, 3)] == before
    alone = new_context("g2", flash_attn=flash_attn)
    uncut_session(alone, N_CUT)
    want = alone.decode(QUESTION)
    got = context.decode(QUESTION)
    assert close(got, want) if kv_unified else np.array_equal(got, want)
    for seq in (1, 2, 3):
        rest = tokens_of(10, 30 + seq)
        got, want = decode_each(context, rest, seq), decode_each(twin, rest, seq)
        # new rows go into other cells now
        assert close(got, want) if kv_unified else np.array_equal(got, want)


@UNIFIED
def test_no_room_to_restore(new_context: ContextFactory, kv_unified: bool) -> None:
    """Others filled the cache: ERR_MEMORY, nothing changed, and when they are gone the rows come back."""
    settings: dict[str, Any] = {"n_ctx": 256 if kv_unified else 512, "n_seq_max": 2, "kv_unified": kv_unified}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    for each in (context, twin):
        cut_session(each)
        each.decode(tokens_of(190, 5), seq=1)
    if not kv_unified:
        assert context.restore(N_CUT) == N_CUT
        return
    before = context.state()
    assert context.restore(N_CUT) == driver.ERR_MEMORY
    assert context.state() == before and context.info()["n_parked"] == N_CUT
    assert np.array_equal(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    # fewer of them fit
    assert context.restore(60) == 60
    plain = new_context("g2")
    uncut_session(plain, 60)
    assert context.seq_rm(1, -1, -1)
    want, got = plain.decode(QUESTION), context.decode(QUESTION)
    assert close(got, want)


@PARKS
@UNIFIED
def test_copies_restore_by_themselves(new_context: ContextFactory, tmp_path: Path, park: str, kv_unified: bool) -> None:
    """A copy of a cut sequence shares what is parked; each of the two is restored, whatever the other does."""
    settings: dict[str, Any] = {"n_seq_max": 3, "kv_unified": kv_unified, "dge": parked(tmp_path, park)}
    context = new_context("g2", **settings)
    cut_session(context)
    bytes_parked = context.info()["bytes_parked"]
    context.seq_cp(0, 1)
    assert context.info(1)["n_parked"] == N_CUT
    # one store, counted once
    assert context.memory_info()["parked"] == bytes_parked
    # whether the copy between streams was made already must not matter
    assert context.restore(77, seq=1) == 77
    plain = new_context("g2")
    uncut_session(plain, 77)
    want = plain.decode(QUESTION)
    got = context.decode(QUESTION, seq=1)
    assert close(got, want) if kv_unified else np.array_equal(got, want)
    twin = new_context("g2", **{**settings, "dge": DGE})
    cut_session(twin)
    assert context.info()["state"] == driver.STATE_CUT
    assert close(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    assert len(list(tmp_path.iterdir())) == (park == "disk")
    assert context.restore(N_CUT) == N_CUT
    assert not list(tmp_path.iterdir())
    plain = new_context("g2")
    uncut_session(plain, N_CUT)
    want, got = plain.decode(QUESTION), context.decode(QUESTION)
    assert close(got, want)


@pytest.mark.parametrize("restored", [0, 1])
def test_copy_between_streams_that_is_not_made_yet(new_context: ContextFactory, restored: int) -> None:
    """llama.cpp copies streams at the next decode; a restore before it touches one of the two only."""
    settings: dict[str, Any] = {"n_seq_max": 2, "kv_unified": False, "dge": DGE}
    context, twin = (new_context("g2", **settings) for _ in range(2))
    cut_session(context)
    cut_session(twin)
    context.seq_cp(0, 1)
    assert context.restore(N_CUT, seq=restored) == N_CUT
    plain = new_context("g2")
    uncut_session(plain, N_CUT)
    assert np.array_equal(decode_each(context, ANSWER, 1 - restored), decode_each(twin, ANSWER))
    assert np.array_equal(context.decode(QUESTION, seq=restored), plain.decode(QUESTION))


def test_shift_that_is_not_made_yet(new_context: ContextFactory) -> None:
    """A pending K-shift of another sequence does not stop a restore for which the cache has to grow."""
    context = new_context("g2", n_ctx=2048, n_seq_max=2, elastic=True, dge={**DGE, "budget": 64})
    tokens = tokens_of(700, 6)
    context.decode(tokens, every=False)
    assert context.arm(700) == driver.OK
    decode_each(context, tokens[:3])
    assert context.info()["state"] == driver.STATE_CUT
    assert context.memory_info()["n_cells"] == 256
    other = tokens_of(40, 7)
    context.decode(other, seq=1)
    twin = new_context("g2", n_ctx=2048)
    twin.decode(other)
    context.seq_add(1, 0, -1, 5)
    twin.seq_add(0, 0, -1, 5)
    assert context.restore(700) == 700
    plain = new_context("g2", n_ctx=2048)
    plain.decode(tokens, every=False)
    got, want = context.decode(QUESTION), plain.decode(QUESTION)
    assert close(got, want)
    got, want = context.decode(QUESTION, seq=1), twin.decode(QUESTION)
    assert close(got, want)


# what a store is worth, and when it goes


@PARKS
def test_limit(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """A cut that would park more than allowed is refused; the full cache goes on."""
    context = new_context("g2", dge=parked(tmp_path, park))
    cut_session(context)
    size = context.info()["bytes_parked"]
    # K and V of all rows in f16, and a little for each row
    assert 0 <= size - N_CUT * 3 * 2 * 128 * 2 <= 64 * N_CUT
    assert context.memory_info()["parked"] == size
    context.clear()
    context.enable(**parked(tmp_path, park, park_limit=size))
    cut_session(context)
    context.clear()
    context.enable(**parked(tmp_path, park, park_limit=size - 1))
    prefill_and_arm(context, FIRST[:N_PROMPT])
    plain = new_context("g2")
    uncut_session(plain, N_CUT)
    decode_each(context, FIRST[N_PROMPT:N_CUT])
    with driver.captured_log() as log:
        assert np.array_equal(decode_each(context, ANSWER), decode_each(plain, ANSWER))
    info = context.info()
    assert (info["state"], info["error"], info["n_rows"]) == (driver.STATE_FULL, driver.ERR_PARK, N_CUT + len(ANSWER))
    assert "above the limit" in "".join(log)
    assert not list(tmp_path.iterdir())
    # a cut by hand tells it at once
    context.enable(**parked(tmp_path, park, park_limit=9))
    context.clear()
    context.decode(FIRST[:N_PROMPT])
    assert context.cut() == driver.ERR_PARK
    assert context.restore(5) == 0


def test_limit_is_of_all_sequences(new_context: ContextFactory) -> None:
    context = new_context("g2", n_seq_max=3, dge=DGE)
    cut_session(context)
    context.enable(**{**DGE, "park_limit": 2 * context.info()["bytes_parked"]})
    cut_session(context, 1)
    prefill_and_arm(context, FIRST[:N_PROMPT], 2)
    decode_each(context, FIRST[N_PROMPT:], 2)
    assert context.info(2)["error"] == driver.ERR_PARK and context.info(2)["state"] == driver.STATE_FULL
    # what is restored makes room
    assert context.restore(N_CUT, 0) == N_CUT
    assert context.seq_rm(2, -1, -1)
    cut_session(context, 2)


def test_files_go(new_context: ContextFactory, tmp_path: Path) -> None:
    """There is a file as long as a sequence could be restored from it, and no longer."""

    def n_files() -> int:
        return len(list(tmp_path.iterdir()))

    context = new_context("g2", n_seq_max=2, dge=parked(tmp_path))
    cut_session(context)
    assert n_files() == 1
    cut_session(context, 1)
    assert n_files() == 2
    assert context.seq_rm(1, -1, -1)
    assert n_files() == 1
    context.clear()
    assert n_files() == 0
    assert context.disable() == driver.OK
    context.enable(**parked(tmp_path))
    cut_session(context)
    # settings without parking leave what is parked alone
    context.enable(**{**DGE, "park": "off"})
    assert n_files() == 1 and context.info()["n_parked"] == N_CUT
    assert context.restore(N_CUT) == N_CUT
    assert n_files() == 0
    context.clear()
    context.enable(**parked(tmp_path))
    cut_session(context)
    state = context.seq_state()
    # a state does not hold what is parked
    assert context.seq_state_load(state) == len(state)
    assert context.info()["state"] == driver.STATE_CUT and context.info()["n_parked"] == 0
    assert n_files() == 0 and context.restore(10) == 0
    context.clear()
    cut_session(context)
    context.seq_cp(0, 1)
    context.seq_keep(1)
    assert n_files() == 1 and context.restore(N_CUT, 1) == N_CUT and n_files() == 0
    assert context.seq_rm(1, -1, -1)
    cut_session(context)
    context.close()
    assert n_files() == 0


def test_another_file_is_never_written_to(new_context: ContextFactory, tmp_path: Path) -> None:
    """Files of two contexts lie in one folder, beside those of others."""
    one, two = (new_context("g2", dge=parked(tmp_path)) for _ in range(2))
    cut_session(one)
    name = next(tmp_path.iterdir()).name
    stem, number, _ = name.rpartition("-")[0], *name.rpartition("-")[2].split(".")
    alien = tmp_path / f"{stem}-{int(number) + 1}.park"
    alien.write_bytes(b"mine")
    cut_session(two)
    assert len(list(tmp_path.iterdir())) == 3
    assert two.restore(N_CUT) == N_CUT
    one.clear()
    assert [path.name for path in tmp_path.iterdir()] == [alien.name] and alien.read_bytes() == b"mine"


def test_poison_after_restore(new_context: ContextFactory) -> None:
    """What a restore leaves free is never read, and what it put back is not free."""
    for flash_attn, pattern in ((True, driver.NAN_F16), (False, driver.LARGE_F16)):
        settings: dict[str, Any] = {"n_ubatch": 50, "flash_attn": flash_attn, "elastic": True, "dge": DGE}
        context, plain = new_context("g2", **settings), new_context("g2", **settings)
        cut_session(context)
        context.poison(pattern)
        assert context.restore(90) == 90
        assert context.poison(pattern) == context.memory_info()["n_cells"] - 90
        uncut_session(plain, 90)
        same_from_now_on(context, plain, QUESTION, cut=True)


# errors


def test_nothing_to_restore(new_context: ContextFactory) -> None:
    off = new_context("g2")
    assert off.restore(5) == driver.ERR_DISABLED
    context = new_context("g2", dge=DGE)
    assert context.restore(5) == 0
    assert context.restore(5, seq=-1) == context.restore(5, seq=1) == driver.ERR_SEQ
    prefill_and_arm(context, FIRST[:N_PROMPT])
    assert context.restore(5) == 0 and context.info()["state"] == driver.STATE_ARMED
    decode_each(context, FIRST[N_PROMPT:N_CUT])
    # the cut that is due is not made by a call that has nothing to do
    assert context.restore(5) == 0 and context.info()["state"] == driver.STATE_ARMED
    decode_each(context, FIRST[N_CUT:])
    before = context.state()
    assert context.restore(-1) == driver.ERR_PARAMS
    assert context.restore(0) == 0
    assert context.state() == before and context.info()["state"] == driver.STATE_CUT
    assert context.restore(5) == 5
    assert context.restore(5) == 0 and context.info()["n_rows"] == 5
    context.clear()
    context.enable(**{**DGE, "park": "off"})
    cut_after(context, FIRST, N_PROMPT, N_DRAFT)
    before = context.state()
    assert context.restore(N_CUT) == 0 and context.state() == before


@pytest.mark.parametrize(
    "bad",
    [{"park": 3}, {"park": -1}, {"park_limit": -1}, {"park": "disk"}, {"park": "disk", "park_dir": ""}],
    ids=str,
)
def test_bad_params(new_context: ContextFactory, bad: dict[str, Any]) -> None:
    context = new_context("one")
    assert context.enable(check=False, **bad) == driver.ERR_PARAMS


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Files cannot grow above a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [None, 0, 20_000, 150_000])
def test_parking_fails(new_context: ContextFactory, tmp_path: Path, size: int | None) -> None:
    """No folder, or no room in it: the cut is refused, with the reason in the log, and the full cache goes on."""
    folder = tmp_path / "missing" if size is None else tmp_path
    context = new_context("g2", dge=parked(folder))
    plain = new_context("g2")
    uncut_session(plain, N_CUT)
    prefill_and_arm(context, FIRST[:N_PROMPT])
    decode_each(context, FIRST[N_PROMPT:N_CUT])
    with driver.captured_log() as log, small_files(2**30 if size is None else size):
        first = context.decode(ANSWER[:1])
    assert np.array_equal(first, plain.decode(ANSWER[:1]))
    assert np.array_equal(decode_each(context, ANSWER[1:]), decode_each(plain, ANSWER[1:]))
    assert (context.info()["state"], context.info()["error"]) == (driver.STATE_FULL, driver.ERR_PARK)
    assert str(folder) in "".join(log)
    assert not list(tmp_path.iterdir())
    # the same context parks when it can
    context.clear()
    if size is None:
        folder.mkdir()
    cut_session(context)
    assert context.restore(N_CUT) == N_CUT


def flip(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def shorten(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(share * (len(data) - 1))])

    return damage


DAMAGES = {f"flipped {at}": flip(at) for at in (0.0, 0.3, 0.999, 1.0)}
DAMAGES |= {f"shortened {share}": shorten(share) for share in (0.0, 0.5, 1.0)}
DAMAGES |= {"removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file(new_context: ContextFactory, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The sequence stays as it was cut, and what is of no use is thrown away."""
    context, twin = new_context("g2", dge=parked(tmp_path)), new_context("g2", dge=DGE)
    cut_session(context)
    cut_session(twin)
    before = context.state()
    damage(next(tmp_path.iterdir()))
    with driver.captured_log() as log:
        assert context.restore(N_CUT) == driver.ERR_PARK
    assert str(tmp_path) in "".join(log)
    assert context.state() == before and context.info()["state"] == driver.STATE_CUT
    assert np.array_equal(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    assert context.restore(N_CUT) == 0 and context.info()["n_parked"] == 0
    assert not list(tmp_path.iterdir())
    context.clear()
    cut_session(context)
    assert context.restore(N_CUT) == N_CUT


def test_no_memory_to_restore(new_context: ContextFactory, tmp_path: Path) -> None:
    """Whichever allocation of a restore fails, nothing has changed, and the next try works."""
    # 200 rows make the cache grow
    tokens = tokens_of(300, 8)
    context, twin = (new_context("g2", elastic=True, dge=parked(tmp_path, park)) for park in ("disk", "ram"))
    for each in (context, twin):
        cut_after(each, tokens, 290, N_DRAFT)
        assert each.memory_info()["n_cells"] == 256
    n_failed = 0
    for n in count(1):
        memory, before = context.memory_info(), context.state()
        with driver.failing_alloc(n):
            got = context.restore(292)
        if got == 292:
            break
        assert got == driver.ERR_MEMORY, n
        assert context.state() == before
        after = context.memory_info()
        # layers that could grow may keep the larger buffer, with as many cells as before
        assert memory["kv"] <= after["kv"] <= memory["kv"] * 512 // 256
        assert {**after, "kv": 0, "compute": 0} == {**memory, "kv": 0, "compute": 0}
        assert context.info()["n_parked"] == 292
        n_failed += 1
        token = [FIRST[n]]
        assert np.array_equal(context.decode(token), twin.decode(token))
    assert n_failed >= 3
    assert twin.restore(292) == 292
    same_from_now_on(context, twin, QUESTION, cut=True)


# aborts


@PARKS
def test_abort(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """Stopped at any step of a cut that parks: nothing is parked, or all of it. A restore is not stopped."""
    settings: dict[str, Any] = {"dge": parked(tmp_path, park)}
    plain = new_context("g2")
    uncut_session(plain, N_CUT)
    want = plain.decode(QUESTION)
    n_aborted = 0
    for n_calls in count():
        context = new_context("g2", **settings)
        prefill_and_arm(context, FIRST[:N_PROMPT])
        decode_each(context, FIRST[N_PROMPT:N_CUT])
        calls = count()
        context.set_abort(lambda calls=calls, n_calls=n_calls: next(calls) >= n_calls)
        context.decode([ANSWER[0]], check=False)
        cut = context.info()["state"] == driver.STATE_CUT
        assert len(list(tmp_path.iterdir())) == (cut and park == "disk")
        if not cut:
            n_aborted += 1
            assert context.info()["error"] == driver.ERR_ABORTED and context.info()["n_parked"] == 0
            assert context.restore(5) == 0
            context.set_abort(None)
            decode_each(context, ANSWER[context.pos_max() + 1 - N_CUT :])
        assert context.info()["n_parked"] == N_CUT
        context.set_abort(lambda: True)
        assert context.restore(N_CUT) == N_CUT
        # stopped in the first decode after a restore
        context.decode(QUESTION, check=False)
        assert context.rc == 2 and context.seq_rm(0, N_CUT, -1)
        context.set_abort(None)
        assert np.array_equal(context.decode(QUESTION), want)
        context.close()
        if cut:
            break
    assert n_aborted > 3
