"""States of instances and sequences: each continues what was saved, or is refused and does no harm."""

from __future__ import annotations

import copy
import ctypes
import pickle
import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from reference import driver
from reference.instances import Instances, evaluated, greedy
from reference.scenario import as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

BUDGET, DRAFT = 32, 3
SETTINGS = {"budget": BUDGET, "draft_tokens": DRAFT}
PROMPT = tokens_of(150, 0)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def answers_right(llm: Any, fresh: Any) -> None:
    """An instance answers a prompt as a fresh one, eviction included."""
    prompt = tokens_of(120, 9)
    assert greedy(llm, prompt, 20) == greedy(fresh, prompt, 20)
    if llm.dge_enabled:
        assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_prompt == 120


# kind: (settings, tokens of the prompt, tokens drawn before the state is saved, state then)
KINDS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "within the budget": (SETTINGS, 25, 4, "full"),
    "before the draft": (SETTINGS, 150, 1, "armed"),
    "in the draft": (SETTINGS, 150, 3, "armed"),
    "just evicted": (SETTINGS, 150, 4, "evicted"),
    "evicted": (SETTINGS, 150, 15, "evicted"),
    "recalled": ({**SETTINGS, "recall": 4}, 150, 15, "evicted"),
    "recalled by a thread": ({**SETTINGS, "recall": 4, "recall_async": True}, 150, 15, "evicted"),
    "recalled, auto": ({**SETTINGS, "recall": "auto"}, 150, 15, "evicted"),
    "uneven": ({**SETTINGS, "head_budgets": "adaptive"}, 150, 15, "evicted"),
    "appended": ({**SETTINGS, "new_turn": "append"}, 150, 15, "evicted"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_state_goes_on_anywhere(new_llm: Instances, kind: str, flash_attn: bool) -> None:
    """In the same instance, in a fresh one, and in one that is busy with something else; as often as one likes."""
    dge, n_prompt, n_drawn, name = KINDS[kind]
    prompt = PROMPT[:n_prompt]
    # f32: batches of another size must not tip the scales between two tokens
    settings = {"flash_attn": flash_attn, "type_k": 0, "type_v": 0}
    llm = new_llm(dge, **settings)
    stream = llm.generate(prompt, temp=0.0)
    start = list(islice(stream, n_drawn))
    state = pickle.loads(pickle.dumps(llm.save_state()))
    saved = llm.dge_stats
    assert saved.state == name and state.n_tokens == n_prompt + n_drawn - 1
    so_far = [*prompt, *start]

    busy = new_llm(dge, **settings)
    greedy(busy, tokens_of(222, 5), 9)
    answers = []
    for other in (llm, new_llm(dge, **settings), busy, busy):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "llama_dge: recall=.*has no host copy")
            other.load_state(state)
        assert other.n_tokens == state.n_tokens
        loaded = other.dge_stats
        assert loaded.state == ("evicted" if name == "evicted" else "full")
        assert (loaded.rows, loaded.boundary) == (saved.rows, saved.boundary)
        assert loaded.rows_parked == 0
        sizes = evaluated(other)
        answers.append(greedy(other, so_far, 25))
        # an evicted state goes on with the next token; another one may need the queries of its window again
        assert sizes[0] == 1 if name == "evicted" else sizes[0] <= 12
        del other._ctx.decode
    assert all(answer == answers[0] for answer in answers)

    if name != "evicted":
        assert answers[0] == greedy(new_llm(dge, **settings), so_far, 25)
    elif "recall" in dge:
        # nothing can be recalled from a state: it goes on as after one eviction
        assert saved.n_recalls > 0 and other.dge_stats.n_recalls == 0
        assert other.dge_stats.rows == saved.rows + 25
    else:
        twin = new_llm(dge, **settings)
        assert [*start, *answers[0]] == greedy(twin, prompt, n_drawn + 25)
        assert other.dge_kept(1, 1).tolist() == twin.dge_kept(1, 1).tolist()
    answers_right(busy, new_llm(dge, **settings))


def test_a_state_that_cannot_be_recalled_says_so_once(new_llm: Instances) -> None:
    dge = {**SETTINGS, "recall": 4}
    llm = new_llm(dge)
    greedy(llm, PROMPT, 2)
    full = llm.save_state()
    greedy(llm, PROMPT, 15)
    state = llm.save_state()
    other = new_llm(dge)
    other.load_state(full)  # nothing was evicted, so nothing is missing
    with pytest.warns(RuntimeWarning, match="recall=4: a saved state has no host copy") as seen:
        other.load_state(state)
    assert seen[0].filename == __file__
    other.load_state(state)
    new_llm(SETTINGS).load_state(state)  # without recall none is expected


def test_an_evicted_state_is_smaller(new_llm: Instances) -> None:
    sizes = []
    for dge in (SETTINGS, None):
        llm = new_llm(dge)
        greedy(llm, PROMPT, 10)
        sizes.append(llm.save_state().llama_state_size)
    # 41 of 159 rows, and the positions that each layer and head kept
    assert 0.2 < sizes[0] / sizes[1] < 0.35


def damaged(state: Any, data: bytes) -> Any:
    other = copy.copy(state)
    other.llama_state, other.llama_state_size = data, len(data)
    return other


@pytest.mark.parametrize("evicted", [True, False])
def test_every_damage_is_seen(new_llm: Instances, evicted: bool) -> None:
    """Truncated anywhere, one bit flipped anywhere, K and V included: an error, and the instance goes on."""
    llm = new_llm(SETTINGS)
    want = greedy(llm, PROMPT, 20)
    llm.reset()
    greedy(llm, PROMPT, 15 if evicted else 1)
    state = llm.save_state()
    assert state.dge["evicted"] == evicted
    data = state.llama_state
    rng = np.random.default_rng(1)
    places = {*range(0, 700, 3), *rng.integers(0, len(data), 400).tolist(), len(data) - 1}
    for at in sorted(places):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises(RuntimeError, match="the state is damaged"):
            llm.load_state(damaged(state, bytes(flipped)))
        assert llm.n_tokens == 0
    for n in [*range(0, 300, 7), *rng.integers(0, len(data), 60).tolist(), len(data) - 1]:
        with pytest.raises(RuntimeError, match="the state is damaged"):
            llm.load_state(damaged(state, data[:n]))
    with pytest.raises(RuntimeError, match="the state is damaged"):
        llm.load_state(damaged(state, data + b"\0"))
    other = copy.deepcopy(state)
    other.input_ids[7] ^= 1
    with pytest.raises(RuntimeError, match="the state is damaged"):
        llm.load_state(other)
    answers_right(llm, new_llm(SETTINGS))
    llm.load_state(state)
    assert greedy(llm, [*PROMPT, *want[:15]] if evicted else PROMPT, 5) == (want[15:] if evicted else want[:5])


@pytest.mark.parametrize("evicted", [True, False])
def test_damage_is_no_crash_without_a_checksum(new_llm: Instances, evicted: bool) -> None:
    """A state that another program made, or that lost what we add to it: refused, or a sound instance."""
    llm = new_llm(SETTINGS)
    greedy(llm, PROMPT, 15 if evicted else 1)
    state = llm.save_state()
    del state.dge
    data = state.llama_state
    rng = np.random.default_rng(2)
    n_refused = 0
    # what is in front of K and V
    for at in range(1500 if evicted else 400):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        try:
            llm.load_state(damaged(state, bytes(flipped)))
        except RuntimeError:
            n_refused += 1
            assert llm.n_tokens == 0
        if at % 50 == 0:
            answers_right(llm, new_llm(SETTINGS))
    assert n_refused > 100
    for n in range(0, len(data), 997):
        with pytest.raises(RuntimeError):
            llm.load_state(damaged(state, data[:n]))
        # as many bytes as it says, but fewer than it needs
        with pytest.raises(RuntimeError):
            llm.load_state(damaged(state, data[:n] + bytes(5)))
    # sound, but not of so many tokens
    for n_tokens in (-1, state.n_tokens + 1, len(state.input_ids), 10**6):
        other = copy.copy(state)
        other.n_tokens = n_tokens
        with pytest.raises(RuntimeError):
            llm.load_state(other)
    answers_right(llm, new_llm(SETTINGS))


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"model": "g3"}, "another model or another type of cache"),
        ({"type_k": 8, "type_v": 8, "flash_attn": True}, "another model or another type of cache"),
        ({"type_k": 0}, "another model or another type of cache"),
        ({"flash_attn": True}, "another model or another type of cache"),
        ({"n_ctx": 256}, "303 tokens.*n_ctx"),
    ],
    ids=str,
)
def test_a_state_of_something_else_is_refused(
    new_llm: Instances, zoo: Zoo, evicted: bool, settings: dict[str, Any], reason: str
) -> None:
    """The message says why, and the instance answers as a fresh one."""
    settings = dict(settings)
    path = zoo[settings.pop("model", "g2")].path
    llm = new_llm(SETTINGS)
    if evicted:
        greedy(llm, tokens_of(290, 8), 14)
    else:
        llm.eval(tokens_of(303, 8))
    assert llm.n_tokens == 303
    state = llm.save_state()
    assert state.dge["evicted"] == evicted
    other = new_llm(SETTINGS, path, **settings)
    greedy(other, tokens_of(90, 4), 10)
    with pytest.raises(RuntimeError, match=reason):
        other.load_state(state)
    assert other.n_tokens == 0 and other.dge_stats is None
    prompt = tokens_of(80, 9)
    assert greedy(other, prompt, 20) == greedy(new_llm(SETTINGS, path, **settings), prompt, 20)
    assert other.dge_stats.state == "evicted"


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize(
    "saved, loading", [((256, 64), (1024, 512)), ((1024, 512), (256, 64)), ((512, 100), (512, 37))]
)
def test_a_state_of_another_size_of_context(
    new_llm: Instances, evicted: bool, saved: tuple[int, int], loading: tuple[int, int]
) -> None:
    """Where the tokens fit, n_ctx and n_batch may differ, and what comes later may fill the context."""
    llm = new_llm(SETTINGS, n_ctx=saved[0], n_batch=saved[1])
    start = greedy(llm, PROMPT, 14 if evicted else 2)
    state = llm.save_state()
    other = new_llm(SETTINGS, n_ctx=loading[0], n_batch=loading[1])
    other.load_state(state)
    n = loading[0] - 150 - len(start)
    want = greedy(new_llm(SETTINGS, n_ctx=loading[0], n_batch=saved[1]), PROMPT if evicted else [*PROMPT, *start], 60)
    assert greedy(other, [*PROMPT, *start], 40) == (want[14:54] if evicted else want[:40])
    assert len(other.input_ids) == loading[0]
    other.load_state(state)
    assert len(greedy(other, [*PROMPT, *start], n)) == n
    with pytest.raises(ValueError, match="exceed context window"):
        other.create_completion(tokens_of(loading[0] + 1, 1))


@pytest.mark.parametrize("order", [1, -1])
def test_states_of_unlike_sizes(new_llm: Instances, order: int) -> None:
    """The smaller after the larger and the other way round, an empty one among them."""
    llm = new_llm(SETTINGS)
    states = [(llm.save_state(), [], None)]
    for n in (5, 25, 150, 500):
        prompt = tokens_of(n, n)
        start = greedy(llm, prompt, 8)
        states.append((llm.save_state(), [*prompt, *start], greedy(llm, [*prompt, *start], 10)))
    # that of an evicted sequence does not depend on the prompt
    assert [state.llama_state_size for state, _, _ in states[3:]] == [states[3][0].llama_state_size] * 2
    assert len({state.llama_state_size for state, _, _ in states}) == len(states) - 1
    for state, prompt, want in [*states[::order], *states[::-order]]:
        llm.load_state(state)
        if want is None:
            assert llm.n_tokens == 0
            answers_right(llm, new_llm(SETTINGS))
        else:
            assert greedy(llm, prompt, 10) == want


class Disk(llama_cpp.LlamaDiskCache):
    """LlamaDiskCache without its lines on stderr."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stored: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cache[tuple(key)] = value
        self.stored.append(value)


class Ram(llama_cpp.LlamaRAMCache):
    """LlamaRAMCache that remembers what it got."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stored: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.stored.append(value)


@pytest.mark.parametrize("dge", [SETTINGS, {**SETTINGS, "recall": 4}, {**SETTINGS, "new_turn": "append"}], ids=str)
@pytest.mark.parametrize("kind", ["ram", "small ram", "disk"])
def test_caches_with_several_chats(new_llm: Instances, tmp_path: Path, dge: dict[str, Any], kind: str) -> None:
    """Chats take turns on one instance. Each answer is that of an instance which has no cache for states."""
    n_state = 0
    if kind != "disk":
        probe = new_llm(dge)
        greedy(probe, PROMPT, 1)
        n_state = probe.save_state().llama_state_size
    cache: Any = Disk(str(tmp_path)) if kind == "disk" else Ram(2**30 if kind == "ram" else int(n_state * 1.5))
    llm, plain = new_llm(dge), new_llm(dge)
    llm.set_cache(cache)
    # the second is within the budget for two turns, so states of it are stored
    chats = [tokens_of(150, 1), tokens_of(8, 2), [*tokens_of(150, 1)[:60], *tokens_of(70, 3)]]
    for turn in range(4):
        for i, chat in enumerate(chats):
            out = [one.create_completion(chat, max_tokens=6, temperature=0.0) for one in (llm, plain)]
            texts = [o["choices"][0]["text"] for o in out]
            assert texts[0] == texts[1], (turn, i)
            assert llm.dge_stats.state == plain.dge_stats.state
            if i != 1:
                assert llm.dge_stats.state == "evicted"
            chats[i] = [*chat, *llm.tokenize(texts[0].encode(), add_bos=False), *tokens_of(5, 10 * turn + i)]
    assert len(cache.stored) >= 2 and not any(state.dge["evicted"] for state in cache.stored)


def test_a_cache_of_another_model_is_refused(new_llm: Instances, zoo: Zoo, tmp_path: Path) -> None:
    """States on disk outlive the instance that made them."""
    first = new_llm(SETTINGS)
    first.set_cache(Disk(str(tmp_path)))
    first.create_completion(PROMPT[:25], max_tokens=3, temperature=0.0)
    other = new_llm(SETTINGS, zoo["g3"].path)
    other.set_cache(Disk(str(tmp_path)))
    with pytest.raises(RuntimeError, match="another model"):
        other.create_completion(PROMPT, max_tokens=3, temperature=0.0)
    other.set_cache(None)
    answers_right(other, new_llm(SETTINGS, zoo["g3"].path))


# the C interface's files


def save_file(context: driver.Context, path: Path, seq: int | None, tokens: list[int]) -> int:
    array = (ctypes.c_int32 * max(len(tokens), 1))(*tokens)
    api, name = context.api, str(path).encode()
    if seq is None:
        assert api.llama_state_save_file(context.handle, name, array, len(tokens))
    else:
        assert api.llama_state_seq_save_file(context.handle, name, seq, array, len(tokens)) > 0
    return path.stat().st_size


def load_file(context: driver.Context, path: Path, seq: int | None) -> list[int] | None:
    """The tokens in the file, or None where it is refused."""
    array, n = (ctypes.c_int32 * 512)(), ctypes.c_size_t(0)
    api, name = context.api, str(path).encode()
    if seq is None:
        ok = api.llama_state_load_file(context.handle, name, array, 512, ctypes.byref(n))
    else:
        ok = api.llama_state_seq_load_file(context.handle, name, seq, array, 512, ctypes.byref(n))
    return array[: n.value] if ok else None


PARAMS = {"budget": BUDGET, "draft_tokens": DRAFT}
FILES = pytest.mark.parametrize("whole", [True, False], ids=["whole", "one sequence"])


def evicted_file(
    new_context: ContextFactory, path: Path, whole: bool, **settings: Any
) -> tuple[list[int], list[list[list[int]]], Any]:
    """A file of an evicted sequence; its tokens, kept entries and what comes next."""
    context = new_context("g2", dge=PARAMS, **settings)
    tokens = tokens_of(220, 1)
    evict_after(context, tokens[:165], 150, DRAFT - 1)
    n = save_file(context, path, None if whole else 0, tokens[:165])
    full = new_context("g2", dge=PARAMS)
    full.decode(tokens[:165], every=False)
    assert n < 0.35 * save_file(full, path.with_suffix(".full"), None if whole else 0, tokens[:165])
    return tokens, as_lists(context.kept()), decode_each(context, tokens[165:200])


@FILES
def test_file_of_an_evicted_sequence(new_context: ContextFactory, tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "state"
    tokens, kept, want = evicted_file(new_context, path, whole)
    context = new_context("g2", dge=PARAMS)
    assert load_file(context, path, None if whole else 0) == tokens[:165]
    assert as_lists(context.kept()) == kept and context.info()["state"] == driver.STATE_EVICTED
    assert np.array_equal(decode_each(context, tokens[165:200]), want)
    off = new_context("g2")
    assert load_file(off, path, None if whole else 0) is None
    assert np.isfinite(off.decode(tokens[:20])).all()


@pytest.mark.parametrize("kv_unified", [True, False])
def test_file_into_a_fragmented_cache(new_context: ContextFactory, tmp_path: Path, kv_unified: bool) -> None:
    """Rows of another sequence lie between the free cells; it does not notice, and what was loaded goes on."""
    path = tmp_path / "state"
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 3, "kv_unified": kv_unified}
    tokens, kept, want = evicted_file(new_context, path, False, **settings)
    twin, context = (new_context("g2", dge=PARAMS, **settings) for _ in range(2))
    other = tokens_of(300, 2)
    for each in (twin, context):
        for i in range(0, 120, 8):
            each.decode(other[i : i + 8], seq=1, every=False)
            each.decode(other[i : i + 8], seq=2, every=False)
        assert each.seq_rm(2, -1, -1)
    assert load_file(context, path, 0) == tokens[:165]
    assert as_lists(context.kept()) == kept
    got = decode_each(context, tokens[165:200])
    # in other cells sums are made in another order
    assert np.abs(got - want).max() < 1e-2 * np.abs(want).max()
    assert np.array_equal(got.argmax(axis=1), want.argmax(axis=1))
    assert (
        np.abs(decode_each(context, other[120:140], seq=1) - decode_each(twin, other[120:140], seq=1)).max()
        < 1e-2 * np.abs(want).max()
    )


@FILES
def test_damaged_file(new_context: ContextFactory, tmp_path: Path, whole: bool) -> None:
    """Truncated anywhere, or with a byte changed in our section: refused, and the context goes on."""
    path, bad = tmp_path / "state", tmp_path / "bad"
    tokens, _, _ = evicted_file(new_context, path, whole)
    data = path.read_bytes()
    seq = None if whole else 0
    context = new_context("g2", dge=PARAMS)
    rng = np.random.default_rng(3)
    mark = data.index(b"\x01\x6e\xed\xd6")

    def refused(what: bytes) -> bool:
        bad.write_bytes(what)
        return load_file(context, bad, seq) is None

    lengths = [*range(0, mark + 800, 23), *rng.integers(0, len(data), 60).tolist(), len(data) - 1]
    assert all(refused(data[:n]) for n in lengths)
    # mark, version, fingerprint, layers and heads
    n_head = 4 + 4 + 8 + 4 + 3 * 8
    for at in range(mark, mark + n_head):
        flipped = bytearray(data)
        flipped[at] ^= 0x40
        assert refused(bytes(flipped)), at - mark
    # counts and rows: some say nothing that could be checked, and no one may do harm
    n_refused = 0
    for at in range(mark + n_head, mark + n_head + 900):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        n_refused += refused(bytes(flipped))
        assert np.isfinite(context.decode([5], pos=context.pos_max() + 1)).all()
    assert n_refused > 300
    context.clear(False)
    fresh = new_context("g2", dge=PARAMS)
    for each in (context, fresh):
        prefill_and_arm(each, tokens[:150])
    assert np.array_equal(decode_each(context, tokens[150:180]), decode_each(fresh, tokens[150:180]))
    assert context.info()["state"] == driver.STATE_EVICTED
