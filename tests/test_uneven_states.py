"""A cache whose heads keep unlike numbers of rows: saved states, and what is in the cells that a head does not use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.driver import Context
from reference.models import ZOO
from reference.policies import Settings
from reference.rounding import GGML_TYPES
from reference.scenario import as_lists, decode_each, tokens_of
from reference.uneven import MODEL, SETTINGS, Sequence, settings_of, together

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

BUDGETS = pytest.mark.parametrize("s", list(SETTINGS.values()), ids=list(SETTINGS))
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
CACHES = [(False, "f32", "f32"), (False, "f16", "f16"), (True, "f16", "f16"), (True, "q8_0", "q8_0")]
CACHE = pytest.mark.parametrize("cache", CACHES, ids=lambda c: f"{'fa' if c[0] else 'no_fa'}-{c[1]}")


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
    a.evict(s, 120, 1)
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
    second.evict(s, 90, 8)
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
    a.evict(s, 120, 2)
    together((a, tokens_of(2, 3)), (b, tokens_of(2, 4)))
    data = context.state()

    other = new_context(MODEL, **settings, dge=s.as_params())
    stranger = Sequence(zoo, other, cache, 1)
    stranger.evict(s, 90, 5)
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
    """Cells that a head does not use are filled with NaN, or with a large value, in a saved state.

    NaN where flash attention skips masked cells, a large finite value where stock llama.cpp multiplies them by zero,
    as in test_poison.py.
    """
    settings = settings_of(cache, n_seq_max=2, n_ctx=512)
    context = new_context(MODEL, **settings, dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.evict(s, 120, 1)
    a.each(tokens_of(3, 2))
    data = bytearray(context.seq_state(0))
    clean = bytes(data)
    ranges = padding_of(context, clean, cache)
    assert len(ranges) > 20
    for start, stop in ranges:
        # the eviction leaves zeros there, which would be attended with a weight if the bias were missing
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
