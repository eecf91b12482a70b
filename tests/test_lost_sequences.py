"""A device that fails after the first row of an eviction has moved: the sequence is empty then, and the others go on.

Graphs of the CPU move the rows as a device would (LLAMA_DGE_GATHER=cpu), or the host copies them.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver, messages
from reference.driver import Context
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS
from reference.faults import failing_move
from reference.forward import nmse
from reference.scenario import F32, SAME, as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

FATAL = -2  # of llama_decode()
N_LAYER = 3
OTHER = tokens_of(60, 21)  # what the second sequence holds
N_OTHER = 40
NEXT = N_OTHER - 1  # the second sequence goes on with OTHER[NEXT:]


@pytest.fixture(params=["cpu", "host"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who moves the rows of an eviction."""
    monkeypatch.setenv("LLAMA_DGE_GATHER", request.param)
    return str(request.param)


def dge_of(**settings: Any) -> dict[str, Any]:
    return {**SETTINGS.as_params(), **settings}


def interleave(context: Context) -> None:
    """A prompt in sequence 0 and another in sequence 1, with cells among each other."""
    for i in range(4):
        context.decode(TOKENS[30 * i : 30 * (i + 1)], seq=0, every=False)
        context.decode(OTHER[10 * i : min(10 * (i + 1), NEXT)], seq=1, every=False)


class Pair:
    """A context of two sequences of which the first is to be evicted, and a twin without eviction."""

    def __init__(self, new_context: ContextFactory, elastic: bool = False, **dge: Any) -> None:
        settings = {**F32, "n_seq_max": 2}
        self.context = new_context("g2", **settings, elastic=elastic, dge=dge_of(**dge))
        self.twin = new_context("g2", **settings)
        for each in (self.context, self.twin):
            interleave(each)
        assert self.context.arm(N_PROMPT) == driver.OK
        self.draft()

    def draft(self) -> None:
        for each in (self.context, self.twin):
            decode_each(each, TOKENS[N_PROMPT:N_BEFORE])

    def lose(self) -> None:
        """The twin drops its sequence 0 when the context lost it."""
        assert self.twin.seq_rm(0, -1, -1)

    def other_goes_on(self, bound: float = 0.0) -> None:
        """Bit for bit, as long as its new rows get the same cells as the twin's."""
        start = self.twin.pos_max(1) + 1
        tokens = OTHER[start : start + 5]
        assert nmse(decode_each(self.context, tokens, 1), decode_each(self.twin, tokens, 1)) <= bound


def assert_empty(context: Context, seq: int = 0) -> None:
    info = context.info(seq)
    assert (info["state"], info["error"]) == (driver.STATE_LOST, driver.ERR_LOST)
    assert info["n_rows"] == info["n_parked"] == info["bytes_parked"] == info["n_prompt"] == 0
    assert (info["boundary"], info["pos_min"]) == (-1, -1)
    assert (context.pos_min(seq), context.pos_max(seq)) == (-1, -1)


def assert_refused(context: Context, rows: list[tuple[int, int, int, bool]]) -> None:
    """Nothing of the batch is taken."""
    before = [context.pos_max(seq) for seq in (0, 1)]
    context.decode_batch(rows, check=False)
    assert context.rc == FATAL
    assert [context.pos_max(seq) for seq in (0, 1)] == before


def assert_as_new(context: Context, new_context: ContextFactory, same: float = SAME, **dge: Any) -> None:
    """A prompt that begins again gets what a fresh context gives it."""
    tokens = tokens_of(90 + 12, 1)
    fresh = new_context("g2", **F32, dge=dge_of(**dge))
    assert nmse(evict_after(context, tokens, 90, 2), evict_after(fresh, tokens, 90, 2)) <= same
    assert as_lists(context.kept()) == as_lists(fresh.kept())
    fresh.close()


def park_of(park: str, folder: Path) -> dict[str, Any]:
    return {"park": park, "park_dir": folder} if park == "disk" else {"park": park}


def each_layer_fails(new_context: ContextFactory, folder: Path, by: str, park: str, same: float = SAME) -> None:
    """An eviction by a value of LLAMA_DGE_GATHER; same: of logits of the same rows in other cells."""
    dge = park_of(park, folder)
    n_lost = 0
    for n in count(1):
        pair = Pair(new_context, **dge)
        context = pair.context
        with failing_move(n), driver.captured_log() as log:
            context.decode([TOKENS[N_BEFORE]], check=False)
        if context.info()["state"] == driver.STATE_EVICTED:
            assert context.rc == 0
            if by != "host" and n == 1:
                assert messages.BY_HOST in "".join(log)  # a trial, before any row moved
                context.close()
                continue
            break
        n_lost += 1
        pair.lose()
        assert context.rc == FATAL
        assert messages.LOST in "".join(log)
        assert_empty(context)
        assert context.memory_info()["parked"] == 0 and not list(folder.iterdir())
        assert context.seq_state(1) == pair.twin.seq_state(1)
        # no batch goes on with it, in which the other sequence has rows or not
        assert_refused(context, [(TOKENS[N_BEFORE], N_BEFORE, 0, True)])
        assert_refused(context, [(OTHER[NEXT], NEXT, 1, True), (TOKENS[N_BEFORE], N_BEFORE, 0, True)])
        assert context.arm(N_PROMPT) == context.evict() == driver.ERR_SEQ and context.restore(N_PROMPT) == 0
        pair.other_goes_on()
        assert_as_new(context, new_context, same, **dge)
        pair.other_goes_on(same)
        context.close()  # its file is deleted as well
    assert n_lost == N_LAYER


@pytest.mark.parametrize("park", ["off", "ram", "disk"])
def test_each_layer_of_an_eviction_fails(new_context: ContextFactory, tmp_path: Path, by: str, park: str) -> None:
    each_layer_fails(new_context, tmp_path, by, park)


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("park", ["off", "ram"])
def test_elastic(new_context: ContextFactory, by: str, park: str, others: bool) -> None:
    """The cache shrinks in any case. Other sequences are lost as well where their rows cannot be copied."""
    prompt = tokens_of(560, 3)  # more than the cache begins with
    n_lost = {"one": 0, "all": 0}
    for n in count(1):
        settings = {**F32, "n_ctx": 2048, "n_seq_max": 2}
        context = new_context("g2", **settings, elastic=True, dge=dge_of(park=park))
        twin = new_context("g2", **settings)
        for each in (context, twin):
            if others:
                each.decode(OTHER[:NEXT], seq=1, every=False)
            each.decode(prompt, every=False)
        n_cells = context.memory_info()["n_cells"]
        assert context.arm(len(prompt)) == driver.OK
        with failing_move(n):
            status = context.evict()
        assert context.memory_info()["n_cells"] < n_cells
        if status == driver.OK:
            if n > 1:
                break
            continue  # a trial, before any row moved
        assert status == driver.ERR_LOST
        assert_empty(context)
        twin.seq_rm(0, -1, -1)
        lost = context.pos_max(1) == -1
        n_lost["all" if lost and others else "one"] += 1
        if lost and others:
            assert_empty(context, 1)
            assert_refused(context, [(OTHER[NEXT], NEXT, 1, True)])
            context.decode(OTHER[:NEXT], seq=1, every=False)
            twin.seq_rm(1, -1, -1)
            twin.decode(OTHER[:NEXT], seq=1, every=False)
        if others:
            tokens = OTHER[NEXT : NEXT + 5]
            assert np.array_equal(decode_each(context, tokens, 1), decode_each(twin, tokens, 1))
        assert_as_new(context, new_context, park=park)
    # each layer has two steps, the graph or the copy within the cache, and the copy into the smaller one
    assert n_lost == ({"one": N_LAYER, "all": N_LAYER} if others else {"one": 2 * N_LAYER, "all": 0})


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
def test_growth_fails(new_context: ContextFactory, kv_unified: bool) -> None:
    """A growing cache also moves rows: on a failure it stays as it was, and the batch can be retried."""
    tokens = tokens_of(900, 3)
    steps = [300, 600, 800]  # of which the last two need more cells
    n_failed = 0
    for n in range(1, 2 * N_LAYER + 1):
        settings = {**F32, "n_ctx": 2048 if kv_unified else 4096, "n_seq_max": 2, "kv_unified": kv_unified}
        context = new_context("g2", **settings, elastic=True, dge=dge_of())
        full = new_context("g2", **settings)
        for each in (context, full):
            each.decode(OTHER, seq=1, every=False)
        start = 0
        with failing_move(n):
            for step in steps:
                n_cells = context.memory_info()["n_cells"]
                context.decode(tokens[start:step], every=False, check=False)
                if context.rc != 0:
                    n_failed += 1
                    assert context.rc == 1 and context.memory_info()["n_cells"] == n_cells
                    assert context.pos_max() == start - 1 and context.info()["n_rows"] == start
                    assert context.state() == full.state()
                    # what needs no more cells goes on
                    assert np.array_equal(context.decode(OTHER[:1], seq=1), full.decode(OTHER[:1], seq=1))
                    context.decode(tokens[start:step], every=False)
                full.decode(tokens[start:step], every=False)
                start = step
        rest = tokens_of(5, 8)
        for seq in (0, 1):
            assert np.array_equal(decode_each(context, rest, seq), decode_each(full, rest, seq))
    assert n_failed == 2 * N_LAYER


def test_an_eviction_that_another_batch_makes(new_context: ContextFactory, by: str) -> None:
    """A batch without rows of the lost sequence is evaluated. The sequence ends with its next one."""
    pair = Pair(new_context)
    context = pair.context
    with failing_move(3):
        got = context.decode(OTHER[NEXT : NEXT + 1], seq=1)
    pair.lose()
    assert np.array_equal(got, pair.twin.decode(OTHER[NEXT : NEXT + 1], seq=1))
    assert_empty(context)
    assert_refused(context, [(TOKENS[N_BEFORE], N_BEFORE, 0, True)])
    assert_refused(context, [(OTHER[NEXT + 1], NEXT + 1, 1, True), (TOKENS[N_BEFORE], N_BEFORE, 0, True)])
    pair.other_goes_on()


@pytest.mark.parametrize("armed", [True, False])
def test_a_forced_eviction(new_context: ContextFactory, by: str, armed: bool) -> None:
    pair = Pair(new_context, park="ram")
    context = pair.context
    if not armed:
        assert context.disarm() == driver.OK
    with failing_move(2):
        assert context.evict() == driver.ERR_LOST
    pair.lose()
    assert_empty(context)
    pair.other_goes_on()
    assert_refused(context, [(TOKENS[N_BEFORE], N_BEFORE, 0, True)])


ENDS: dict[str, Any] = {
    "removed": lambda context, saved: context.seq_rm(0, -1, -1),
    "all removed": lambda context, saved: context.seq_rm(-1, 0, -1),
    "cleared": lambda context, saved: context.clear(),
    "others kept": lambda context, saved: context.seq_keep(1),
    "copied into": lambda context, saved: context.seq_cp(1, 0),
    "state": lambda context, saved: context.seq_state_load(saved, 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_it(new_context: ContextFactory, end: str) -> None:
    """The caller takes note, or there are other rows: it is a sequence as any other then."""
    pair = Pair(new_context)
    context = pair.context
    saved = context.seq_state(0)
    with failing_move(1):
        assert context.evict() == driver.ERR_LOST
    # to remove what is above a position is what llama-cpp-python does in front of each batch
    assert context.seq_rm(0, N_BEFORE, -1) and context.seq_rm(-1, N_BEFORE, -1)
    assert_empty(context)
    assert_refused(context, [(TOKENS[N_BEFORE], N_BEFORE, 0, True)])
    ENDS[end](context, saved)
    assert context.info()["error"] == driver.OK
    at = context.pos_max() + 1
    assert at == {"copied into": NEXT, "state": N_BEFORE}.get(end, 0)
    context.decode([TOKENS[N_BEFORE]], pos=at or 7)  # llama.cpp takes an empty sequence from any position
    assert context.pos_max() == (at or 7)


@pytest.mark.parametrize("recall_async", [False, True])
def test_each_layer_of_a_selection_fails(new_context: ContextFactory, recall_async: bool) -> None:
    dge = {"park": "ram", "recall": 2, "recall_async": recall_async}
    for n in range(1, N_LAYER + 1):
        pair = Pair(new_context, **dge)
        context = pair.context
        decode_each(context, TOKENS[N_BEFORE : N_BEFORE + 1])
        assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_recalls"] == 0
        with failing_move(n):
            for at in range(N_BEFORE + 1, N_BEFORE + 8):
                context.decode([TOKENS[at]], pos=at, check=False)
                if context.rc != 0:
                    break
        pair.lose()
        assert context.rc == FATAL
        assert_empty(context)
        assert context.seq_state(1) == pair.twin.seq_state(1)
        assert_refused(context, [(TOKENS[at], at, 0, True)])
        pair.other_goes_on()
        tokens = tokens_of(90 + 12, 1)
        fresh = new_context("g2", **F32, dge=dge_of(**dge))
        results = []
        for each in (context, fresh):
            prefill_and_arm(each, tokens[:90])
            results.append(decode_each(each, tokens[90:]))
            assert each.info()["n_recalls"] > 0
        assert nmse(*results) <= SAME
        assert as_lists(context.kept()) == as_lists(fresh.kept())


@pytest.mark.parametrize("park", ["ram", "disk"])
def test_each_layer_of_a_restore_fails(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    dge = park_of(park, tmp_path)
    for n in range(1, N_LAYER + 1):
        pair = Pair(new_context, **dge)
        context = pair.context
        assert context.evict() == driver.OK and context.info()["n_parked"] == N_BEFORE
        before = context.seq_state(1)
        with failing_move(n):
            assert context.restore(N_PROMPT) == driver.ERR_LOST
        pair.lose()
        assert_empty(context)
        assert context.memory_info()["parked"] == 0 and not list(tmp_path.iterdir())
        assert context.seq_state(1) == before
        assert_refused(context, [(TOKENS[N_PROMPT], N_PROMPT, 0, True)])
        pair.other_goes_on()
        assert_as_new(context, new_context, **dge)
        context.close()


@pytest.fixture
def by_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_DGE_GATHER", "cpu")


def test_a_graph_that_stops_half_way(new_context: ContextFactory, by_cpu: None) -> None:
    """No injected failure: the abort callback ends the CPU's graph between two of its operations."""

    def forced_eviction(stop_at: int) -> tuple[Context, int, int]:
        context = new_context("g2", **F32, n_seq_max=2, dge=dge_of(park="ram"))
        interleave(context)
        calls = count()
        context.set_abort(lambda: next(calls) >= stop_at)
        status = context.evict()
        context.set_abort(None)
        return context, status, next(calls)

    _, status, n_calls = forced_eviction(2**30)
    assert status == driver.OK
    seen = {driver.ERR_ABORTED: 0, driver.ERR_LOST: 0, driver.OK: 0}
    for stop_at in range(n_calls - 1, 0, -1):
        context, status, _ = forced_eviction(stop_at)
        seen[status] += 1
        if status == driver.ERR_ABORTED:
            assert context.info()["n_rows"] == N_PROMPT and context.evict() == driver.OK
            break  # the scores: nothing has moved yet
        if status == driver.ERR_LOST:
            assert_empty(context)
            assert_refused(context, [(TOKENS[N_PROMPT], N_PROMPT, 0, True)])
            assert context.pos_max(1) == NEXT - 1
            if stop_at % 4 == 0:
                assert_as_new(context, new_context, park="ram")
        context.close()
    # within each layer, and in the trial, after which the host moves the rows
    assert seen[driver.ERR_LOST] > 2 * N_LAYER and seen[driver.OK] > 0 and seen[driver.ERR_ABORTED] == 1


def test_eviction_is_not_switched_off_while_a_sequence_is_lost(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, n_ctx=2048, elastic=True, dge=dge_of(park="off", draft_tokens=1))
    prefill_and_arm(context, tokens_of(600, 3))
    with failing_move(2):
        context.decode([4], check=False)
    if context.info()["error"] != driver.ERR_LOST:
        # the first growth is another one: this time rows had moved
        context.clear()
        prefill_and_arm(context, tokens_of(600, 3))
        with failing_move(2):
            context.decode([4], check=False)
    assert context.info()["error"] == driver.ERR_LOST
    assert context.disable() == driver.ERR_LOST
    context.clear()
    assert context.disable() == driver.OK
