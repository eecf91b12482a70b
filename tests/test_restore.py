"""Restore: the cache is bit for bit the one that was never evicted, or there is a clear error.

Each case runs one session that is evicted and restored, and one with the same batches that was never evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llama_dge.config import POLICIES
from reference import driver
from reference.covering import covering_set
from reference.parked import (
    ANSWER,
    DGE,
    FIRST,
    N_BEFORE,
    N_PROMPT,
    QUESTION,
    close,
    evicted_session,
    full_session,
    parked,
    same_from_now_on,
)
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

PARKS = pytest.mark.parametrize("park", ["ram", "disk"])
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


# equal to a cache that was never evicted

FACTORS: dict[str, list[Any]] = {
    "model": ["g1", "g2", "g3", "g8", "deep"],
    "types": [("f16", "f16"), ("f32", "f32"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0")],
    "flash_attn": [False, True],
    "policy": list(POLICIES),
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
def test_as_if_never_evicted(new_context: ContextFactory, tmp_path: Path, case: dict[str, Any]) -> None:
    """An appended question, an edited message, another beginning: logits and the next eviction are the same."""
    dge = parked(tmp_path, **{name: case[name] for name in ("policy", "scores", "head_budgets", "park")})
    settings = {name: case[name] for name in ("flash_attn", "n_ubatch", "elastic")}
    settings |= {"type_k": case["types"][0], "type_v": case["types"][1], "dge": dge}
    sums = case["policy"] == "h2o" and case["scores"] != "draft"
    first, size = new_context(case["model"], **settings), {}
    for n_match in (N_BEFORE, N_BEFORE + 50, 77, 1):
        context = first if n_match == N_BEFORE else new_context(case["model"], **settings)
        evicted_session(context)
        size[n_match] = context.memory_info()["n_cells"]
        n = min(n_match, N_BEFORE)
        assert context.restore(n_match) == n
        info = context.info()
        assert (info["state"], info["n_rows"], info["n_restored"]) == (driver.STATE_FULL, n, n)
        assert (info["n_parked"], info["bytes_parked"], context.memory_info()["parked"]) == (0, 0, 0)
        assert (context.pos_min(), context.pos_max(), context.can_shift()) == (0, n - 1, True)
        assert not list(tmp_path.iterdir())
        twin = new_context(case["model"], **settings)
        full_session(twin, n)
        # removed rows are in the sums of H2O: an error, and all but the next eviction is right
        lost = sums and n < N_BEFORE
        assert context.reuse(n + len(QUESTION), n) == (0 if lost else n)
        same_from_now_on(context, twin, QUESTION, evict=not lost)
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
    evicted_session(context)
    for seed in (3, 4):
        assert context.restore(N_PROMPT) == N_PROMPT == context.reuse(N_PROMPT, N_PROMPT)
        assert context.arm(N_PROMPT) == driver.OK
        answer = tokens_of(20, seed)
        fresh = new_context("g2", **settings)
        prefill_and_arm(fresh, FIRST[:N_PROMPT])
        assert np.array_equal(decode_each(context, answer), decode_each(fresh, answer))
        assert as_lists(context.kept()) == as_lists(fresh.kept())
        assert context.info()["state"] == driver.STATE_EVICTED


def test_the_comparison_would_fail(new_context: ContextFactory) -> None:
    """A row too many, another row, or the kept set: each gives other logits."""
    want = new_context("g2", dge=DGE)
    full_session(want, N_BEFORE)
    logits = want.decode(QUESTION)
    for wrong in range(3):
        context = new_context("g2", dge=DGE)
        tokens = list(FIRST)
        if wrong == 0:
            tokens[3] += 1 if tokens[3] < 200 else -1
        evicted_session(context, tokens=tokens)
        if wrong < 2:
            context.restore(N_BEFORE)
        else:
            assert context.seq_rm(0, N_BEFORE, -1)
        if wrong == 1:
            assert context.debug_seq_rm(0, 5, 6)
        assert not np.array_equal(context.decode(QUESTION), logits), wrong


@PARKS
def test_many_turns(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """Six turns on one context, every one evicted and restored, against one that is never evicted."""
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
        assert info["state"] == driver.STATE_EVICTED and info["n_rows"] == 40 + 6
        assert len(list(tmp_path.iterdir())) == (park == "disk")
        assert context.restore(n + 62) == n + 62
        want = decode_each(plain, answer)
        assert np.array_equal(decode_each(context, answer[2:]), want[2:])
        n += 66
    assert context.info()["n_evictions"] == 6


# other sequences, fragmented caches


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True])
def test_restore_between_other_sequences(new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
    """Others took the freed cells: rows are restored into any free cells, and the others stay as they are."""
    settings: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": kv_unified, "flash_attn": flash_attn}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    for each in (context, twin):
        evicted_session(each)
        for seq in (1, 2, 3):
            each.decode(tokens_of(60 + seq, seq), seq=seq)
        # holes between them
        for seq in (1, 2, 3):
            assert each.seq_rm(seq, 40 + seq, -1)
        each.decode(tokens_of(30, 9), seq=2)
    before = [context.seq_state(seq) for seq in (1, 2, 3)]
    assert context.restore(N_BEFORE) == N_BEFORE
    assert context.info()["n_rows"] == N_BEFORE
    assert [context.seq_state(seq) for seq in (1, 2, 3)] == before
    alone = new_context("g2", flash_attn=flash_attn)
    full_session(alone, N_BEFORE)
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
    """Others filled the cache: ERR_MEMORY, nothing changed; without them the restore succeeds."""
    settings: dict[str, Any] = {"n_ctx": 256 if kv_unified else 512, "n_seq_max": 2, "kv_unified": kv_unified}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    for each in (context, twin):
        evicted_session(each)
        each.decode(tokens_of(190, 5), seq=1)
    if not kv_unified:
        assert context.restore(N_BEFORE) == N_BEFORE
        return
    before = context.state()
    assert context.restore(N_BEFORE) == driver.ERR_MEMORY
    assert context.state() == before and context.info()["n_parked"] == N_BEFORE
    assert np.array_equal(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    # fewer of them fit
    assert context.restore(60) == 60
    plain = new_context("g2")
    full_session(plain, 60)
    assert context.seq_rm(1, -1, -1)
    want, got = plain.decode(QUESTION), context.decode(QUESTION)
    assert close(got, want)


@PARKS
@UNIFIED
def test_copies_restore_by_themselves(new_context: ContextFactory, tmp_path: Path, park: str, kv_unified: bool) -> None:
    """A copy shares the host copy of its source; each of the two is restored, whatever the other does."""
    settings: dict[str, Any] = {"n_seq_max": 3, "kv_unified": kv_unified, "dge": parked(tmp_path, park)}
    context = new_context("g2", **settings)
    evicted_session(context)
    bytes_parked = context.info()["bytes_parked"]
    context.seq_cp(0, 1)
    assert context.info(1)["n_parked"] == N_BEFORE
    # one store, counted once
    assert context.memory_info()["parked"] == bytes_parked
    # whether the copy between streams was made already must not matter
    assert context.restore(77, seq=1) == 77
    plain = new_context("g2")
    full_session(plain, 77)
    want = plain.decode(QUESTION)
    got = context.decode(QUESTION, seq=1)
    assert close(got, want) if kv_unified else np.array_equal(got, want)
    twin = new_context("g2", **{**settings, "dge": DGE})
    evicted_session(twin)
    assert context.info()["state"] == driver.STATE_EVICTED
    assert close(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    assert len(list(tmp_path.iterdir())) == (park == "disk")
    assert context.restore(N_BEFORE) == N_BEFORE
    assert not list(tmp_path.iterdir())
    plain = new_context("g2")
    full_session(plain, N_BEFORE)
    want, got = plain.decode(QUESTION), context.decode(QUESTION)
    assert close(got, want)


@pytest.mark.parametrize("restored", [0, 1])
def test_copy_between_streams_that_is_not_made_yet(new_context: ContextFactory, restored: int) -> None:
    """llama.cpp copies streams at the next decode; a restore before it touches one of the two only."""
    settings: dict[str, Any] = {"n_seq_max": 2, "kv_unified": False, "dge": DGE}
    context, twin = (new_context("g2", **settings) for _ in range(2))
    evicted_session(context)
    evicted_session(twin)
    context.seq_cp(0, 1)
    assert context.restore(N_BEFORE, seq=restored) == N_BEFORE
    plain = new_context("g2")
    full_session(plain, N_BEFORE)
    assert np.array_equal(decode_each(context, ANSWER, 1 - restored), decode_each(twin, ANSWER))
    assert np.array_equal(context.decode(QUESTION, seq=restored), plain.decode(QUESTION))


def test_shift_that_is_not_made_yet(new_context: ContextFactory) -> None:
    """A pending K-shift of another sequence does not stop a restore for which the cache has to grow."""
    context = new_context("g2", n_ctx=2048, n_seq_max=2, elastic=True, dge={**DGE, "budget": 64})
    tokens = tokens_of(700, 6)
    context.decode(tokens, every=False)
    assert context.arm(700) == driver.OK
    decode_each(context, tokens[:3])
    assert context.info()["state"] == driver.STATE_EVICTED
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


def test_poison_after_restore(new_context: ContextFactory) -> None:
    """What a restore leaves free is never read, and what it put back is not free."""
    for flash_attn, pattern in ((True, driver.NAN_F16), (False, driver.LARGE_F16)):
        settings: dict[str, Any] = {"n_ubatch": 50, "flash_attn": flash_attn, "elastic": True, "dge": DGE}
        context, plain = new_context("g2", **settings), new_context("g2", **settings)
        evicted_session(context)
        context.poison(pattern)
        assert context.restore(90) == 90
        assert context.poison(pattern) == context.memory_info()["n_cells"] - 90
        full_session(plain, 90)
        same_from_now_on(context, plain, QUESTION, evict=True)
