"""A cache whose heads keep unlike numbers of rows: sequences side by side, cells that are used again, states, copies.

The cells of a cut sequence are shared by its heads, and a bias hides those that a head does not use. What is tested
here is that the bias follows its sequence wherever that goes, and that nothing of it is left for whoever comes next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.bounds import nmse_bounds
from reference.driver import Context
from reference.forward import Reference, nmse
from reference.models import ZOO
from reference.policies import Settings
from reference.rounding import GGML_TYPES
from reference.scenario import as_lists, decode_each, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

MODEL = "g2"  # 3 layers, 2 KV heads
SETTINGS = {
    "adaptive": Settings(budget=40, draft_tokens=2, head_budgets="adaptive"),
    "pyramid": Settings(policy="pyramidkv", budget=40, draft_tokens=2),
    "table": Settings(budget=40, draft_tokens=2, head_budgets="table", table=((8, 60), (30, 9), (45, 45))),
    # one head keeps its whole past
    "a head keeps all": Settings(draft_tokens=2, head_budgets="table", table=((10, 900), (10, 20), (30, 9))),
}
BUDGETS = pytest.mark.parametrize("s", list(SETTINGS.values()), ids=list(SETTINGS))
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
CACHES = [(False, "f32", "f32"), (False, "f16", "f16"), (True, "f16", "f16"), (True, "q8_0", "q8_0")]
CACHE = pytest.mark.parametrize("cache", CACHES, ids=lambda c: f"{'fa' if c[0] else 'no_fa'}-{c[1]}")


def settings_of(cache: tuple[bool, str, str], **others: Any) -> dict[str, Any]:
    return {"flash_attn": cache[0], "type_k": cache[1], "type_v": cache[2], "n_ctx": 1024, **others}


class Sequence:
    """A sequence of a context and the same one in the reference."""

    def __init__(self, zoo: Zoo, context: Context, cache: tuple[bool, str, str], seq: int) -> None:
        self.context, self.seq = context, seq
        self.reference = Reference(zoo[MODEL].weights, cache[1], cache[2], cache[0])
        self.bound = nmse_bounds(cache[1], cache[2], cache[0], ZOO[MODEL].n_layer)[0]

    def decode(self, tokens: list[int]) -> None:
        """At once, and compare."""
        assert nmse(self.context.decode(tokens, seq=self.seq), self.reference.step(tokens)) <= self.bound

    def each(self, tokens: list[int]) -> None:
        for token in tokens:
            self.decode([token])

    def cut(self, s: Settings, n_prompt: int, seed: int) -> None:
        """Prompt, draft and the cut; one token after it. The sequence must be empty."""
        tokens = tokens_of(n_prompt + s.draft_tokens, seed)
        self.decode(tokens[:n_prompt])
        status = self.context.arm(n_prompt, self.seq)
        assert status == driver.OK, self.context.status(status)
        self.each(tokens[n_prompt:-1])
        n = self.reference.n_tokens
        got = self.context.decode(tokens[-1:], seq=self.seq)
        info = self.context.info(self.seq)
        assert info["state"] == driver.STATE_CUT, self.context.status(info["error"])
        kept = self.context.kept(self.seq)
        assert info["n_rows_before"] == n and is_uneven(kept)
        self.reference.mask_all_but(kept)
        assert nmse(got, self.reference.step(tokens[-1:])) <= self.bound

    def copy_to(self, seq: int, context: Context | None = None) -> Sequence:
        """What another sequence must be like after it got the rows of this one."""
        twin = object.__new__(Sequence)
        twin.context, twin.seq = context or self.context, seq
        twin.reference, twin.bound = self.reference.fork(), self.bound
        return twin


def is_uneven(kept: Any) -> bool:
    return len({len(positions) for heads in kept for positions in heads}) > 1


def together(*parts: tuple[Sequence, list[int]]) -> None:
    """Tokens of several sequences in one llama_decode(), and compare."""
    context = parts[0][0].context
    rows = [(token, s.reference.n_tokens + i, s.seq, True) for s, tokens in parts for i, token in enumerate(tokens)]
    got = context.decode_batch(rows)
    for s, tokens in parts:
        assert nmse(got[: len(tokens)], s.reference.step(tokens)) <= s.bound, s.seq
        got = got[len(tokens) :]


# two sequences


@CACHE
@UNIFIED
@BUDGETS
def test_side_by_side(
    zoo: Zoo, new_context: ContextFactory, s: Settings, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    """One sequence is cut unevenly, then the other; alone and in one batch each follows its own reference."""
    context = new_context(MODEL, **settings_of(cache, n_seq_max=2, kv_unified=kv_unified), dge=s.as_params())
    a, b = (Sequence(zoo, context, cache, seq) for seq in range(2))
    rest = tokens_of(100, 5)
    b.decode(rest[:50])
    a.cut(s, 120, 1)
    for i in range(50, 60):
        a.decode([rest[i]])
        b.decode([rest[i]])
    together((a, rest[60:61]), (b, rest[61:62]))
    together((b, rest[62:66]), (a, rest[66:70]))
    a.decode(rest[:45])
    b.decode(rest[:3])

    assert context.seq_rm(1, -1, -1)
    b = Sequence(zoo, context, cache, 1)
    b.cut(s, 97, 2)
    for i in range(70, 74):
        together((a, rest[i : i + 1]), (b, rest[i + 10 : i + 11]))
    a.each(rest[90:93])
    b.each(rest[93:96])
    assert context.info(0)["n_cuts"] == 2


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
def test_the_other_sequence_does_not_notice(new_context: ContextFactory, flash_attn: bool, kv_unified: bool) -> None:
    """Logits of sequence 1 with and without the cut of sequence 0.

    In a stream of its own they are equal bit for bit. In a unified cache its new rows lie in other cells once the cut
    has freed some, and fewer cells are read: sums are taken in another order, so they are equal up to that.
    """
    s = SETTINGS["adaptive"]
    found = []
    for arm in (True, False):
        context = new_context(
            MODEL, n_ctx=1024, n_seq_max=2, kv_unified=kv_unified, flash_attn=flash_attn, dge=s.as_params(),
            type_k="f16" if flash_attn else "f32", type_v="f16" if flash_attn else "f32",
        )  # fmt: skip
        tokens = tokens_of(200, 6)
        logits = [context.decode(tokens[:30], seq=1)]
        context.decode(tokens[:150])
        if arm:
            assert context.arm(150) == driver.OK
        for i in range(150, 160):
            context.decode([tokens[i]])
            logits.append(context.decode([tokens[i]], seq=1))
        logits.append(context.decode(tokens[160:180], seq=1))
        for i in range(180, 190):
            pos = (context.pos_max(0) + 1, context.pos_max(1) + 1)
            logits.append(context.decode_batch([(tokens[i], pos[0], 0, False), (tokens[i], pos[1], 1, True)]))
        assert context.info()["state"] == (driver.STATE_CUT if arm else driver.STATE_FULL)
        assert not arm or is_uneven(context.kept())
        found.append(logits)
    with_cut, without = (np.concatenate(logits) for logits in found)
    # f16 sums of flash attention: 1e-5 as in bounds.py
    assert nmse(with_cut, without) <= (1e-5 if flash_attn else 1e-10)
    # up to the cut, which falls due in the first llama_decode() behind the draft, whosever that is
    before = 30 if kv_unified else 60
    assert np.array_equal(with_cut[:before], without[:before])


@CACHE
def test_three_sequences_take_turns(zoo: Zoo, new_context: ContextFactory, cache: tuple[bool, str, str]) -> None:
    """Sequences come, are cut, decode together and go, in one small cache whose cells are used again and again."""
    s = SETTINGS["table"]
    for kv_unified in (True, False):
        context = new_context(
            MODEL, **settings_of(cache, n_seq_max=3, kv_unified=kv_unified, n_ctx=512 if kv_unified else 768),
            dge=s.as_params(),
        )  # fmt: skip
        rng = np.random.default_rng(11)
        live: dict[int, Sequence] = {}
        n_cuts = 0
        for step in range(60):
            seq = int(rng.integers(3))
            if seq not in live:
                live[seq] = Sequence(zoo, context, cache, seq)
                if rng.integers(3):
                    live[seq].cut(s, int(rng.integers(70, 110)), step)
                    n_cuts += 1
                else:
                    live[seq].decode(tokens_of(int(rng.integers(3, 60)), step))
            elif rng.integers(4) == 0:
                assert context.seq_rm(seq, -1, -1)
                del live[seq]
            elif rng.integers(2) and len(live) > 1:
                n = int(rng.integers(1, 4))
                together(*((live[i], tokens_of(n, step + i)) for i in sorted(live)))
            else:
                live[seq].each(tokens_of(2, step))
        assert n_cuts >= 8 and context.info(0)["n_cuts"] == n_cuts


# cells that are used again


HOW = ["clear", "clear without data", "rm", "rm of all", "keep of another"]


@CACHE
@pytest.mark.parametrize(
    "how, kv_unified",
    # llama_memory_seq_keep() leaves other streams alone, see the next test
    [(how, unified) for how in HOW for unified in (True, False) if unified or how != "keep of another"],
)
def test_nothing_is_left_after_removal(
    zoo: Zoo, new_context: ContextFactory, how: str, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    """A new prompt in the cells that the bias of a removed sequence hid goes as in a fresh context."""
    s = SETTINGS["table"]
    settings = settings_of(cache, n_seq_max=2, kv_unified=kv_unified, n_ctx=512)
    context = new_context(MODEL, **settings, dge=s.as_params())
    old = Sequence(zoo, context, cache, 0)
    old.cut(s, 120, 1)
    old.each(tokens_of(5, 2))

    if how == "rm":
        assert context.seq_rm(0, -1, -1)
    elif how == "rm of all":
        assert context.seq_rm(-1, 0, -1)
    elif how == "keep of another":
        context.seq_keep(1)
    else:
        context.clear(how == "clear")
    assert context.info()["state"] == driver.STATE_FULL and context.info()["n_rows"] == 0

    fresh = new_context(MODEL, **settings, dge=s.as_params())
    # token by token at first, so that the graph of the last decode fits and is used again
    tokens = tokens_of(90, 3)
    for seq in (0, 1):
        got, want = ([*(c.decode([t], seq=seq) for t in tokens[:6]), c.decode(tokens[6:], seq=seq)]
                     for c in (context, fresh))  # fmt: skip
        assert nmse(np.concatenate(got), np.concatenate(want)) <= old.bound / 10
        if how.startswith("clear"):
            assert np.array_equal(np.concatenate(got), np.concatenate(want))
    # and a second cut in the same sequence
    again = Sequence(zoo, context, cache, 0)
    assert context.seq_rm(0, -1, -1)
    again.cut(s, 97, 4)
    again.each(tokens_of(5, 5))


@CACHE
@BUDGETS
def test_keep_leaves_other_streams_alone(
    zoo: Zoo, new_context: ContextFactory, s: Settings, cache: tuple[bool, str, str]
) -> None:
    """llama_memory_seq_keep() removes sequences of the same stream only, and a cut one in another stream stays cut."""
    context = new_context(MODEL, **settings_of(cache, n_seq_max=2, kv_unified=False), dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.cut(s, 120, 1)
    info = context.info()
    context.decode(tokens_of(20, 2), seq=1)
    context.seq_keep(1)
    assert context.pos_max(0) == a.reference.n_tokens - 1
    assert context.info() == info
    assert not context.seq_rm(0, 10, 20)
    a.each(tokens_of(4, 3))


@CACHE
def test_another_sequence_takes_hidden_cells(
    zoo: Zoo, new_context: ContextFactory, cache: tuple[bool, str, str]
) -> None:
    """Cells that an old bias hides are taken by a sequence that needs a bias of its own, in graphs that are alike."""
    s = SETTINGS["table"]
    context = new_context(MODEL, **settings_of(cache, n_seq_max=3, n_ctx=512), dge=s.as_params())
    a, b = Sequence(zoo, context, cache, 0), Sequence(zoo, context, cache, 1)
    a.cut(s, 100, 1)
    b.cut(s, 100, 2)
    b.each(tokens_of(3, 3))
    a.each(tokens_of(3, 4))
    # 50 rows or so in the cells of a, fewer than there are: they are the first free ones
    assert context.seq_rm(0, -1, -1)
    b.each(tokens_of(2, 5))
    b.decode(tokens_of(40, 6))
    b.each(tokens_of(30, 7))
    c = Sequence(zoo, context, cache, 2)
    c.decode(tokens_of(60, 8))
    for i in range(4):
        together((b, tokens_of(1, i)), (c, tokens_of(1, i)))
        b.each(tokens_of(1, i))
        c.each(tokens_of(1, i))


@CACHE
@BUDGETS
def test_rejected_tokens(zoo: Zoo, new_context: ContextFactory, s: Settings, cache: tuple[bool, str, str]) -> None:
    """Rows above the boundary can be removed and evaluated again, as speculative decoding does."""
    context = new_context(MODEL, **settings_of(cache), dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.cut(s, 120, 1)
    for seed in range(3):
        n = a.reference.n_tokens
        a.decode(tokens_of(6, seed))
        assert context.seq_rm(0, n + 2, -1)
        a.reference.truncate(n + 2)
        a.each(tokens_of(2, seed + 10))


# copies


@CACHE
@UNIFIED
@BUDGETS
def test_copy_after_the_cut(
    zoo: Zoo, new_context: ContextFactory, s: Settings, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    context = new_context(MODEL, **settings_of(cache, n_seq_max=3, kv_unified=kv_unified), dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.cut(s, 120, 1)
    a.each(tokens_of(3, 2))
    context.seq_cp(0, 2)
    c = a.copy_to(2)
    assert as_lists(context.kept(2)) == as_lists(context.kept(0))
    assert context.info(2)["state"] == driver.STATE_CUT and context.info(2)["n_rows"] == context.info(0)["n_rows"]
    c.each(tokens_of(3, 3))
    a.each(tokens_of(4, 4))
    c.decode(tokens_of(5, 5))
    together((a, tokens_of(1, 6)), (c, tokens_of(1, 7)))

    # the copy outlives the original, and the copy of the copy both
    assert context.seq_rm(0, -1, -1)
    c.each(tokens_of(3, 8))
    context.seq_cp(2, 1)
    b = c.copy_to(1)
    assert context.seq_rm(2, -1, -1)
    b.each(tokens_of(3, 9))
    again = Sequence(zoo, context, cache, 0)
    again.cut(s, 97, 10)
    together((again, tokens_of(2, 11)), (b, tokens_of(2, 12)))
    b.each(tokens_of(2, 13))
    again.each(tokens_of(2, 14))


# states


def fragment(context: Context, seq: int = 1) -> None:
    """Leave holes of three cells between cells of a sequence."""
    tokens = tokens_of(60, 20)
    for i in range(0, 60, 3):
        context.decode(tokens[i : i + 3], seq=seq)
        context.decode(tokens[i : i + 3], seq=seq + 1)
    assert context.seq_rm(seq, -1, -1)


@CACHE
@BUDGETS
@pytest.mark.parametrize("fragmented", [False, True], ids=["empty", "fragmented"])
def test_state_of_a_sequence(
    zoo: Zoo, new_context: ContextFactory, s: Settings, cache: tuple[bool, str, str], fragmented: bool
) -> None:
    settings = settings_of(cache, n_seq_max=3, n_ctx=512)
    context = new_context(MODEL, **settings, dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.cut(s, 120, 1)
    a.each(tokens_of(3, 2))
    data = context.seq_state(0)

    # into another context, whose own settings do not matter, and into another sequence
    other = new_context(MODEL, **settings, dge=replace(s, budget=20, head_budgets="uniform", table=()).as_params())
    if fragmented:
        fragment(other)
    assert other.seq_state_load(data, 1) == len(data)
    assert as_lists(other.kept(1)) == as_lists(context.kept(0))
    for name in ("bytes_before", "bytes_after", "bytes_kept", "n_rows", "boundary", "pos_min", "budget"):
        assert other.info(1)[name] == context.info(0)[name], name
    b = a.copy_to(1, other)
    b.each(tokens_of(3, 3))
    b.decode(tokens_of(45, 4))
    b.each(tokens_of(3, 5))

    # back over the original, which went on in the meantime
    saved = a.copy_to(0)
    a.each(tokens_of(2, 6))
    assert context.seq_state_load(data, 0) == len(data)
    saved.each(tokens_of(3, 7))
    # a state that is read over another uneven sequence: that one's bias goes
    context.clear()
    second = Sequence(zoo, context, cache, 0)
    second.cut(s, 90, 8)
    assert context.seq_state_load(other.seq_state(1), 0) > 0
    b.copy_to(0, context).each(tokens_of(3, 9))


@CACHE
@UNIFIED
@BUDGETS
def test_state_of_all(
    zoo: Zoo, new_context: ContextFactory, s: Settings, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    settings = settings_of(cache, n_seq_max=2, kv_unified=kv_unified)
    context = new_context(MODEL, **settings, dge=s.as_params())
    a, b = (Sequence(zoo, context, cache, seq) for seq in range(2))
    b.decode(tokens_of(20, 1))
    a.cut(s, 120, 2)
    together((a, tokens_of(2, 3)), (b, tokens_of(2, 4)))
    data = context.state()

    other = new_context(MODEL, **settings, dge=s.as_params())
    stranger = Sequence(zoo, other, cache, 1)
    stranger.cut(s, 90, 5)
    assert other.state_load(data) == len(data)
    c, d = a.copy_to(0, other), b.copy_to(1, other)
    assert other.info(1)["state"] == driver.STATE_FULL
    together((c, tokens_of(2, 6)), (d, tokens_of(3, 7)))
    c.each(tokens_of(3, 8))
    d.each(tokens_of(3, 9))
    assert context.state() == data


# padding


def padding_of(context: Context, data: bytes, cache: tuple[bool, str, str]) -> list[tuple[int, int]]:
    """Ranges of bytes in the state of a sequence that belong to heads which do not use their cell: (start, stop).

    K and V come last in a state, layer by layer: type (int32), bytes per row (uint64), rows. A transposed V: type,
    bytes per element and number of rows (int32 each), then one row of elements after the other.
    """
    kept, info = context.kept(), context.info()
    spec = ZOO[MODEL]
    n_cells = info["n_rows"]
    n_tail = info["n_rows_before"] - info["pos_min"]
    n_past = info["n_rows_after"] - n_tail  # past rows come first, in the first cells
    sizes = {1: 2, 0: 4, 8: 34 / 32}
    ranges = []

    def header(at: int, kind: str) -> list[int]:
        return np.frombuffer(data, kind, 1, at).tolist()

    at = len(data)
    k_type, v_type = (GGML_TYPES[name] for name in cache[1:])
    row = int(spec.n_head_kv * spec.head_size * sizes[v_type])
    head = row // spec.n_head_kv
    v_trans = not cache[0]
    for il in reversed(range(spec.n_layer)):
        at -= n_cells * row
        for ih, positions in enumerate(kept[il]):
            unused = range(len(positions) - n_tail, n_past)
            if v_trans:
                size = int(sizes[v_type])
                for j in range(ih * spec.head_size, (ih + 1) * spec.head_size):
                    ranges += [(at + (j * n_cells + r) * size, at + (j * n_cells + r + 1) * size) for r in unused]
            else:
                ranges += [(at + r * row + ih * head, at + r * row + (ih + 1) * head) for r in unused]
        at -= 12
        assert header(at, "<i4") == [v_type]
        assert header(at + 4, "<i4" if v_trans else "<u8") == [int(sizes[v_type]) if v_trans else row]
    row = int(spec.n_head_kv * spec.head_size * sizes[k_type])
    head = row // spec.n_head_kv
    for il in reversed(range(spec.n_layer)):
        at -= n_cells * row
        for ih, positions in enumerate(kept[il]):
            unused = range(len(positions) - n_tail, n_past)
            ranges += [(at + r * row + ih * head, at + r * row + (ih + 1) * head) for r in unused]
        at -= 12
        assert header(at, "<i4") == [k_type] and header(at + 4, "<u8") == [row]
    assert header(at - 8, "<u4") == [int(v_trans)] and header(at - 4, "<u4") == [spec.n_layer]
    return ranges


POISON = [
    ((True, "f16", "f16"), 0x7E00),
    ((True, "f16", "f16"), 0x6BCD),
    ((True, "q8_0", "q8_0"), 0xFFFF),
    ((True, "q8_0", "q8_0"), 0x6BCD),
    ((False, "f32", "f32"), 0x6BCD),
    ((False, "f32", "f32"), 0xEBCD),
    ((False, "f16", "f16"), 0x6BCD),
    ((False, "q8_0", "f16"), 0x6BCD),
]


@BUDGETS
@pytest.mark.parametrize("cache, pattern", POISON, ids=str)
def test_padding_may_hold_anything(
    zoo: Zoo, new_context: ContextFactory, s: Settings, cache: tuple[bool, str, str], pattern: int
) -> None:
    """Cells that a head does not use are filled with NaN, or with a large value, by way of a saved state.

    NaN where flash attention skips masked cells, a large finite value where stock llama.cpp multiplies them by zero,
    as in test_poison.py.
    """
    settings = settings_of(cache, n_seq_max=2, n_ctx=512)
    context = new_context(MODEL, **settings, dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.cut(s, 120, 1)
    a.each(tokens_of(3, 2))
    data = bytearray(context.seq_state(0))
    clean = bytes(data)
    ranges = padding_of(context, clean, cache)
    assert len(ranges) > 20
    for start, stop in ranges:
        # the cut leaves zeros there, which would be attended with a weight if the bias were missing
        assert not any(clean[start:stop])
        data[start:stop] = (pattern.to_bytes(2, "little") * stop)[: stop - start]
    assert bytes(data) != clean

    logits = []
    for state in (clean, bytes(data)):
        context.clear()
        assert context.seq_state_load(state, 0) == len(state)
        if state != clean:
            assert context.seq_state(0) == state
        got = [decode_each(context, tokens_of(8, 3)), context.decode(tokens_of(45, 4))]
        context.decode(tokens_of(20, 5), seq=1)
        for i in range(4):
            pos = (context.pos_max(0) + 1, context.pos_max(1) + 1)
            got.append(context.decode_batch([(7, pos[1], 1, True), (9 + i, pos[0], 0, True)]))
        logits.append(np.concatenate(got))
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)
