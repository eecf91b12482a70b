"""Random calls in random order on one context, each followed by a comparison with what must hold.

Each sequence has a twin in the reference, which is masked by the library's kept rows once these have been compared with
the reference's own selection. One layer, f32, no flash attention: equal up to the order of sums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference import driver
from reference.driver import Context, NativeModel, failing_alloc
from reference.forward import Reference, nmse
from reference.models import N_VOCAB, ZOO, make_weights, write_gguf
from reference.policies import Settings, disagreement, past_scores
from reference.scenario import as_lists

N_SEQ = 3
N_ROWS = 300  # that a sequence may have
N_CELLS = 1024  # of the unified cache, or of each stream: an elastic one starts with half of them
S = Settings(budget=16, window=4, draft_tokens=2, scores="both", kernel_size=3)
N_SLOTS = S.window + S.draft_tokens - 1
WEIGHTS = make_weights(ZOO["one"])

seqs = st.integers(0, N_SEQ - 1)
seeds = st.integers(0, 2**20)


@dataclass
class Store:
    """The host copy: the sequence as it was before its eviction."""

    reference: Reference
    n: int  # rows that take memory


@dataclass
class Twin:
    """What a sequence of the library must be."""

    reference: Reference = field(default_factory=lambda: Reference(WEIGHTS))
    rows: list[int] = field(default_factory=list)  # an id per row that it holds, shared by copies in a unified cache
    state: int = driver.STATE_FULL
    n_prompt: int = 0
    kept: Any = None
    # rows whose queries were captured, by slot; None: an abort left it open which
    captured: dict[int, int] | None = field(default_factory=dict)
    parked: Store | None = None  # shared by copies
    n_parked: int = 0  # rows that can be restored: removed draft rows cannot

    @property
    def n(self) -> int:
        return self.reference.n_tokens

    def copy(self) -> Twin:
        """The same rows somewhere else: queries stay behind, and so does an eviction that was to come."""
        state = driver.STATE_FULL if self.state == driver.STATE_ARMED else self.state
        return replace(self, reference=self.reference.fork(), rows=list(self.rows), captured={}, state=state)

    def capture(self, first: int, stop: int) -> None:
        """Queries are captured until the last that an eviction needs, and there are slots for as many as it needs."""
        if self.state == driver.STATE_ARMED:
            stop = min(stop, self.n_prompt + S.draft_tokens - 1)
        if self.state != driver.STATE_EVICTED and self.captured is not None:
            self.captured.update({position % N_SLOTS: position for position in range(first, stop)})

    def has_queries(self, n_prompt: int) -> bool | None:
        if self.captured is None:
            return None
        needed = range(n_prompt - S.window, min(n_prompt + S.draft_tokens - 1, self.n))
        return set(needed) <= set(self.captured.values())


class Machine(RuleBasedStateMachine):
    """Sequences that are filled, armed, evicted, restored, shortened, copied, saved and loaded."""

    model: NativeModel
    root: str

    def __init__(self) -> None:
        super().__init__()
        self.context: Context | None = None

    @initialize(
        kv_unified=st.booleans(),
        elastic=st.integers(0, 4),
        park=st.sampled_from(["ram", "disk", "disk", "off"]),
    )
    def start(self, kv_unified: bool, elastic: int, park: str) -> None:
        self.kv_unified, self.elastic, self.park = kv_unified, elastic != 4, park
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.context = self.new_context()
        self.twins = [Twin() for _ in range(N_SEQ)]
        self.ids = count()
        self.saved: dict[str, Any] = {}

    def new_context(self) -> Context:
        return Context(
            self.model,
            n_ctx=N_CELLS * (1 if self.kv_unified else N_SEQ),
            type_k="f32",
            type_v="f32",
            n_seq_max=N_SEQ,
            kv_unified=self.kv_unified,
            elastic=self.elastic,
            dge={**S.as_params(), "park": self.park, "park_dir": self.folder},
        )

    def teardown(self) -> None:
        if self.context is not None:
            self.context.close()

    def some(self, data: st.DataObject, wanted: Callable[[Twin], bool]) -> int:
        """A sequence of a kind that the rule's precondition says there is."""
        return data.draw(st.sampled_from([seq for seq, twin in enumerate(self.twins) if wanted(twin)]))

    def shared(self, seq: int) -> bool:
        others = {row for i, twin in enumerate(self.twins) if i != seq for row in twin.rows}
        return not others.isdisjoint(self.twins[seq].rows)

    def is_due(self, twin: Twin) -> bool:
        return twin.state == driver.STATE_ARMED and twin.n >= twin.n_prompt + S.draft_tokens - 1

    # what happens when tokens come in

    def settle_eviction(self, seq: int) -> None:
        """Before the twin takes new tokens: the eviction that the library made at the start of its decode."""
        twin = self.twins[seq]
        if not self.is_due(twin):
            return
        info = self.context.info(seq)
        if self.shared(seq):
            assert info["error"] == driver.ERR_SHARED
            twin.state = driver.STATE_FULL
            return
        assert info["state"] == driver.STATE_EVICTED and info["n_rows_before"] == twin.n
        twin.kept = as_lists(self.context.kept(seq))
        for layer, heads in enumerate(twin.kept):
            scores = past_scores(twin.reference.q[layer], twin.reference.k[layer], twin.n_prompt, S)
            for row, positions in zip(scores, heads):
                assert disagreement(row, positions, S.budget - S.window) <= 1e-4
                later = [p for p in positions if p >= twin.n_prompt - S.window]
                assert later == list(range(twin.n_prompt - S.window, twin.n))
        if self.park != "off":
            twin.parked = Store(twin.reference.fork(), twin.n)
            twin.n_parked = twin.n
        twin.reference.mask_all_but(twin.kept)
        first = twin.n_prompt - S.window
        # which cells the past rows lie in does not matter, how many does
        twin.rows = twin.rows[: S.budget - S.window] + twin.rows[first:]
        twin.state = driver.STATE_EVICTED

    @rule(
        seq=seqs,
        n_prompt=st.one_of(st.integers(17, 60), st.integers(200, 290)),
        seed=seeds,
        n_more=st.sampled_from([0, 1, 3, 3]),
        back=st.sampled_from([0, 0.3, 0.9, 1]),
    )
    def prompt(self, seq: int, n_prompt: int, seed: int, n_more: int, back: float) -> None:
        """The usual course of things: a new prompt, armed, and some tokens of the answer."""
        if self.twins[seq].n:
            self.remove_all(seq)
        self.decode(seq, n_prompt, seed)
        self.arm(seq, 1.0)
        for i in range(n_more):
            self.decode(seq, 1, seed + i)
        if back and self.twins[seq].parked:
            self.turn(seq, back, 30, seed)

    @rule(seq=seqs, n=st.integers(1, 6), seed=seeds)
    def decode(self, seq: int, n: int, seed: int) -> None:
        twin = self.twins[seq]
        n = min(n, N_ROWS - twin.n)
        if n < 1:
            return
        tokens = np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()
        got = self.context.decode(tokens, seq=seq)
        # one decode makes all evictions that are due
        for other in range(N_SEQ):
            self.settle_eviction(other)
        twin.capture(twin.n, twin.n + n)
        assert nmse(got, twin.reference.step(tokens)) <= 1e-9
        twin.rows += [next(self.ids) for _ in tokens]

    @rule(seq=seqs, n=st.integers(1, 8), calls=st.integers(0, 40))
    @precondition(lambda self: any(self.is_due(twin) for twin in self.twins))
    def abort(self, seq: int, n: int, calls: int) -> None:
        """A decode that is stopped somewhere, perhaps in an eviction; whatever it stored is removed again."""
        twin = self.twins[seq]
        if twin.n + n > N_ROWS:
            return
        due = [self.is_due(t) for t in self.twins]
        counter = count()
        self.context.set_abort(lambda: next(counter) >= calls)
        self.context.decode([7] * n, seq=seq, check=False)
        self.context.set_abort(None)
        for other in range(N_SEQ):
            if due[other] and self.context.info(other)["state"] == driver.STATE_ARMED:
                assert self.context.info(other)["error"] == driver.ERR_ABORTED
            else:
                self.settle_eviction(other)
        assert self.context.seq_rm(seq, twin.n, -1)
        twin.captured = None

    @rule(seq=seqs, n=st.sampled_from([1, 1, 40, 250]), seed=seeds, nth=st.sampled_from([1, 1, 2, 3]))
    def no_memory(self, seq: int, n: int, seed: int, nth: int) -> None:
        """A decode in which one allocation fails: of the host copy, of smaller buffers, or of more cells."""
        twin = self.twins[seq]
        n = min(n, N_ROWS - twin.n)
        if n < 1:
            return
        due = [self.is_due(t) for t in self.twins]
        tokens = np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()
        with failing_alloc(nth):
            got = self.context.decode(tokens, seq=seq, check=False)
        for other in range(N_SEQ):
            if due[other] and self.context.info(other)["error"] == driver.ERR_MEMORY:
                assert self.park != "off"
                self.twins[other].state = driver.STATE_FULL
            else:
                self.settle_eviction(other)
        if self.context.rc != 0:
            # no room: nothing was evaluated
            assert self.context.rc == 1 and self.elastic
            return
        twin.capture(twin.n, twin.n + n)
        assert nmse(got, twin.reference.step(tokens)) <= 1e-9
        twin.rows += [next(self.ids) for _ in tokens]

    # restores

    @rule(data=st.data(), n=st.one_of(st.integers(0, 310), st.just(1000)), no_memory=st.sampled_from([0, 0, 1, 1, 2]))
    def restore_some(self, data: st.DataObject, n: int, no_memory: int) -> None:
        any_parked = any(twin.parked for twin in self.twins)
        self.restore(self.some(data, lambda twin: bool(twin.parked) == any_parked), n, no_memory)

    def restore(self, seq: int, n: int, no_memory: int) -> None:
        """In any state of the sequence: what can be put back is."""
        twin = self.twins[seq]
        want = min(n, twin.n_parked)
        with failing_alloc(no_memory):
            got = self.context.restore(n, seq)
        # copies of streams are made at last by a restore, so there is nothing more to wait for
        for other in range(N_SEQ):
            self.settle_eviction_if_made(other)
        if got == driver.ERR_MEMORY:
            assert no_memory and want and (self.park == "disk" or self.elastic)
            return
        assert got == want
        if want:
            self.take_back(seq, want)

    def settle_eviction_if_made(self, seq: int) -> None:
        """Other sequences' evictions that are due may be made by a restore."""
        if self.is_due(self.twins[seq]) and self.context.info(seq)["state"] != driver.STATE_ARMED:
            info = self.context.info(seq)
            if info["error"] == driver.ERR_MEMORY:
                self.twins[seq].state = driver.STATE_FULL
            else:
                self.settle_eviction(seq)

    def take_back(self, seq: int, n: int) -> None:
        store = self.twins[seq].parked
        assert store is not None
        reference = store.reference.fork()
        reference.truncate(n)
        captured = self.twins[seq].captured  # a copy has none
        if captured is not None:
            captured = {slot: position for slot, position in captured.items() if position < n}
        self.twins[seq] = Twin(reference, [next(self.ids) for _ in range(n)], captured=captured)

    @rule(data=st.data(), share=st.sampled_from([1.0, 0.9, 0.3]), n=st.integers(18, 60), seed=seeds)
    @precondition(lambda self: any(twin.parked for twin in self.twins))
    def next_turn(self, data: st.DataObject, share: float, n: int, seed: int) -> None:
        """The usual course of things: back to the common prefix, the rest of the new prompt, the next eviction."""
        self.turn(self.some(data, lambda twin: twin.parked is not None), share, n, seed)

    def turn(self, seq: int, share: float, n: int, seed: int) -> None:
        self.restore(seq, max(1, int(self.twins[seq].n_parked * share)), 0)
        self.decode(seq, n, seed)
        self.arm(seq, 1.0)
        for i in range(2):
            self.decode(seq, 1, seed + i)

    @rule(data=st.data(), share=st.sampled_from([1.0, 1.0, 0.9, 0.5]))
    @precondition(lambda self: any(twin.n for twin in self.twins))
    def arm_again(self, data: st.DataObject, share: float) -> None:
        self.arm(self.some(data, lambda twin: twin.n > 0), share)

    def arm(self, seq: int, share: float) -> None:
        twin = self.twins[seq]
        n_prompt = max(1, int(twin.n * share))
        status = self.context.arm(n_prompt, seq)
        if twin.state == driver.STATE_EVICTED:
            assert status == driver.ERR_EVICTED
        elif self.shared(seq):
            assert status == driver.ERR_SHARED
        elif n_prompt <= S.budget:
            assert status == driver.NOTHING_TO_EVICT
        elif twin.has_queries(n_prompt) is None:
            assert status in (driver.OK, driver.ERR_QUERIES)
        else:
            assert status == (driver.OK if twin.has_queries(n_prompt) else driver.ERR_QUERIES)
        if twin.state != driver.STATE_EVICTED:
            twin.state = driver.STATE_ARMED if status == driver.OK else driver.STATE_FULL
            twin.n_prompt = n_prompt

    @rule(data=st.data())
    @precondition(lambda self: any(twin.state == driver.STATE_ARMED for twin in self.twins))
    def disarm(self, data: st.DataObject) -> None:
        seq = self.some(data, lambda twin: twin.state == driver.STATE_ARMED)
        assert self.context.disarm(seq) == driver.OK
        if self.twins[seq].state == driver.STATE_ARMED:
            self.twins[seq].state = driver.STATE_FULL

    # removal and copies

    def forget(self, seq: int) -> None:
        self.twins[seq] = Twin()

    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 3, 5, 10, 30, 200]))
    @precondition(lambda self: any(twin.n for twin in self.twins))
    def remove_tail(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data, lambda twin: twin.n > 0)
        twin = self.twins[seq]
        p0 = max(0, twin.n - n)
        done = self.context.seq_rm(seq, p0, -1)
        if twin.state == driver.STATE_EVICTED and 0 < p0 < twin.n_prompt:
            assert not done
            return
        assert done
        if p0 == 0:
            self.forget(seq)
            return
        twin.rows = twin.rows[: len(twin.rows) - (twin.n - p0)]
        twin.reference.truncate(p0)
        twin.n_parked = min(twin.n_parked, p0)
        if twin.parked and self.park == "ram":
            twin.parked.n = min(twin.parked.n, p0)
        if twin.captured is not None:
            twin.captured = {slot: position for slot, position in twin.captured.items() if position < p0}
        if twin.state == driver.STATE_ARMED and p0 < twin.n_prompt:
            twin.state = driver.STATE_FULL

    @rule(seq=seqs)
    def remove_all(self, seq: int) -> None:
        assert self.context.seq_rm(seq, -1, -1)
        self.forget(seq)

    @rule(sure=st.integers(0, 7))
    def clear(self, sure: int) -> None:
        if sure:
            return  # not so often
        self.context.clear()
        self.twins = [Twin() for _ in range(N_SEQ)]

    @rule(data=st.data())
    @precondition(lambda self: {twin.n > 0 for twin in self.twins} == {True, False})
    def copy(self, data: st.DataObject) -> None:
        src, dst = self.some(data, lambda twin: twin.n > 0), self.some(data, lambda twin: twin.n == 0)
        self.context.seq_cp(src, dst)
        twin = self.twins[dst] = self.twins[src].copy()
        if not self.kv_unified:
            twin.rows = [next(self.ids) for _ in twin.rows]
            # between streams llama.cpp copies at the next decode, and until then the source must stay as it is
            self.decode(dst, 1, 0)

    @rule(seq=seqs, delta=st.sampled_from([-1, 3]))
    @precondition(lambda self: any(twin.state == driver.STATE_EVICTED for twin in self.twins))
    def shift(self, seq: int, delta: int) -> None:
        assert not self.context.can_shift()
        if self.twins[seq].state == driver.STATE_EVICTED:
            self.context.seq_add(seq, 0, -1, delta)
            self.context.seq_div(seq, 0, -1, 2)

    # states

    @rule(data=st.data())
    @precondition(lambda self: any(twin.state == driver.STATE_EVICTED for twin in self.twins))
    def save_sequence(self, data: st.DataObject) -> None:
        seq = self.some(data, lambda twin: twin.state == driver.STATE_EVICTED)
        self.saved["sequence"] = (self.context.seq_state(seq), self.twins[seq].copy())

    @rule(seq=seqs)
    @precondition(lambda self: "sequence" in self.saved)
    def load_sequence(self, seq: int) -> None:
        state, twin = self.saved["sequence"]
        assert self.context.seq_state_load(state, seq) == len(state)
        self.twins[seq] = self.loaded(twin)

    @rule()
    def save_all(self) -> None:
        self.saved["all"] = (self.context.state(), [twin.copy() for twin in self.twins])

    @rule(fresh=st.booleans())
    @precondition(lambda self: "all" in self.saved)
    def load_all(self, fresh: bool) -> None:
        state, twins = self.saved["all"]
        if fresh:
            self.context.close()
            self.context = self.new_context()
        assert self.context.state_load(state) == len(state)
        new_ids: dict[int, int] = {}
        self.twins = [self.loaded(twin, new_ids) for twin in twins]

    def loaded(self, twin: Twin, new_ids: dict[int, int] | None = None) -> Twin:
        new = twin.copy()
        new_ids = {} if new_ids is None else new_ids
        new.rows = [new_ids.setdefault(row, next(self.ids)) for row in twin.rows]
        new.parked, new.n_parked = None, 0  # a state does not hold it
        return new

    @rule(seq=seqs, length=st.floats(0.0, 0.999))
    @precondition(lambda self: "sequence" in self.saved)
    def load_half_a_sequence(self, seq: int, length: float) -> None:
        state = self.saved["sequence"][0]
        assert self.context.seq_state_load(state[: int(len(state) * length)], seq) == 0
        # the sequence may hold anything now, but it can be removed and nothing else was touched
        assert self.context.seq_rm(seq, -1, -1)
        self.forget(seq)

    # what must hold after every call

    @invariant()
    def holds(self) -> None:
        if self.context is None:
            return
        for seq, twin in enumerate(self.twins):
            info = self.context.info(seq)
            assert info["state"] == (twin.state if twin.n else driver.STATE_EMPTY)
            assert info["n_rows"] == len(twin.rows)
            assert self.context.pos_max(seq) == twin.n - 1
            if twin.state == driver.STATE_EVICTED:
                assert (info["n_prompt"], info["boundary"]) == (twin.n_prompt, twin.n_prompt - 1)
                assert info["pos_min"] == self.context.pos_min(seq) == twin.n_prompt - S.window
                assert as_lists(self.context.kept(seq)) == twin.kept
                assert info["n_parked"] == twin.n_parked
            else:
                assert self.context.pos_min(seq) == (0 if twin.n else -1)
                assert info["n_parked"] == 0 and twin.parked is None
        any_evicted = any(twin.state == driver.STATE_EVICTED for twin in self.twins)
        assert self.context.can_shift() is not any_evicted
        used = {row for twin in self.twins for row in twin.rows}
        memory = self.context.memory_info()
        n_cells = memory["n_cells"] * (1 if self.kv_unified else N_SEQ)
        assert memory["n_cells"] == N_CELLS or (self.elastic and memory["n_cells"] < N_CELLS)
        assert self.context.poison(driver.LARGE_F16) == n_cells - len(used)
        stores = {id(twin.parked): twin.parked.n for twin in self.twins if twin.parked}
        # K and V in f32 of one layer, and a little for each row
        assert 0 <= memory["parked"] - sum(stores.values()) * 2 * 128 * 4 <= sum(stores.values()) * 64
        assert len(list(self.folder.iterdir())) == (len(stores) if self.park == "disk" else 0)


@pytest.fixture(scope="module", autouse=True)
def _model() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Machine.root = folder
        Machine.model = NativeModel(write_gguf(WEIGHTS, Path(folder) / "one.gguf"))
        yield
        Machine.model.close()


TestStateMachine = Machine.TestCase
TestStateMachine.settings = settings(
    max_examples=36,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
