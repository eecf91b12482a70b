"""A cache whose heads keep unlike numbers of rows: sequences side by side, cells that are used again, copies.

The cells of an evicted sequence are shared by its heads, and a bias hides those that a head does not use. These
tests verify that the bias follows its sequence, and that the next one finds nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.forward import nmse
from reference.policies import Settings
from reference.scenario import as_lists, tokens_of
from reference.uneven import MODEL, SETTINGS, Sequence, is_uneven, settings_of, together

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

BUDGETS = pytest.mark.parametrize("s", list(SETTINGS.values()), ids=list(SETTINGS))
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
CACHES = [(False, "f32", "f32"), (False, "f16", "f16"), (True, "f16", "f16"), (True, "q8_0", "q8_0")]
CACHE = pytest.mark.parametrize("cache", CACHES, ids=lambda c: f"{'fa' if c[0] else 'no_fa'}-{c[1]}")


# two sequences


@CACHE
@UNIFIED
@BUDGETS
def test_side_by_side(
    zoo: Zoo, new_context: ContextFactory, s: Settings, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    """One sequence is evicted unevenly, then the other; alone and in one batch each follows its own reference."""
    context = new_context(MODEL, **settings_of(cache, n_seq_max=2, kv_unified=kv_unified), dge=s.as_params())
    a, b = (Sequence(zoo, context, cache, seq) for seq in range(2))
    rest = tokens_of(100, 5)
    b.decode(rest[:50])
    a.evict(s, 120, 1)
    for i in range(50, 60):
        a.decode([rest[i]])
        b.decode([rest[i]])
    together((a, rest[60:61]), (b, rest[61:62]))
    together((b, rest[62:66]), (a, rest[66:70]))
    a.decode(rest[:45])
    b.decode(rest[:3])

    assert context.seq_rm(1, -1, -1)
    b = Sequence(zoo, context, cache, 1)
    b.evict(s, 97, 2)
    for i in range(70, 74):
        together((a, rest[i : i + 1]), (b, rest[i + 10 : i + 11]))
    a.each(rest[90:93])
    b.each(rest[93:96])
    assert context.info(0)["n_evictions"] == 2


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
def test_the_other_sequence_does_not_notice(new_context: ContextFactory, flash_attn: bool, kv_unified: bool) -> None:
    """Logits of sequence 1 with and without the eviction of sequence 0.

    In a stream of its own they are equal bit for bit. In a unified cache its new rows lie in other cells
    after the eviction, and fewer cells are read: equal up to the order of sums.
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
        assert context.info()["state"] == (driver.STATE_EVICTED if arm else driver.STATE_FULL)
        assert not arm or is_uneven(context.kept())
        found.append(logits)
    with_eviction, without = (np.concatenate(logits) for logits in found)
    # f16 sums of flash attention: 1e-5 as in bounds.py
    assert nmse(with_eviction, without) <= (1e-5 if flash_attn else 1e-10)
    # up to the eviction, which falls due in the first llama_decode() behind the draft, whosever that is
    before = 30 if kv_unified else 60
    assert np.array_equal(with_eviction[:before], without[:before])


@CACHE
def test_three_sequences_take_turns(zoo: Zoo, new_context: ContextFactory, cache: tuple[bool, str, str]) -> None:
    """Sequences come, are evicted, decode together and go, in one small cache whose cells are used again and again."""
    s = SETTINGS["table"]
    for kv_unified in (True, False):
        context = new_context(
            MODEL, **settings_of(cache, n_seq_max=3, kv_unified=kv_unified, n_ctx=512 if kv_unified else 768),
            dge=s.as_params(),
        )  # fmt: skip
        rng = np.random.default_rng(11)
        live: dict[int, Sequence] = {}
        n_evictions = 0
        for step in range(60):
            seq = int(rng.integers(3))
            if seq not in live:
                live[seq] = Sequence(zoo, context, cache, seq)
                if rng.integers(3):
                    live[seq].evict(s, int(rng.integers(70, 110)), step)
                    n_evictions += 1
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
        assert n_evictions >= 8 and context.info(0)["n_evictions"] == n_evictions


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
    old.evict(s, 120, 1)
    old.each(tokens_of(5, 2))

    if how == "rm":
        assert context.seq_rm(0, -1, -1)
    elif how == "rm of all":
        assert context.seq_rm(-1, 0, -1)
    elif how == "keep of another":
        context.seq_keep(1)
    else:
        context.clear(how == "clear")
    assert context.info()["state"] == driver.STATE_EMPTY and context.info()["n_rows"] == 0

    fresh = new_context(MODEL, **settings, dge=s.as_params())
    # token by token at first, so that the graph of the last decode fits and is used again
    tokens = tokens_of(90, 3)
    for seq in (0, 1):
        got, want = ([*(c.decode([t], seq=seq) for t in tokens[:6]), c.decode(tokens[6:], seq=seq)]
                     for c in (context, fresh))  # fmt: skip
        assert nmse(np.concatenate(got), np.concatenate(want)) <= old.bound / 10
        if how.startswith("clear"):
            assert np.array_equal(np.concatenate(got), np.concatenate(want))
    # and a second eviction in the same sequence
    again = Sequence(zoo, context, cache, 0)
    assert context.seq_rm(0, -1, -1)
    again.evict(s, 97, 4)
    again.each(tokens_of(5, 5))


@CACHE
@BUDGETS
def test_keep_leaves_other_streams_alone(
    zoo: Zoo, new_context: ContextFactory, s: Settings, cache: tuple[bool, str, str]
) -> None:
    """llama_memory_seq_keep() removes sequences of its stream only; an evicted one of another stream stays."""
    context = new_context(MODEL, **settings_of(cache, n_seq_max=2, kv_unified=False), dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.evict(s, 120, 1)
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
    a.evict(s, 100, 1)
    b.evict(s, 100, 2)
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
    a.evict(s, 120, 1)
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
def test_copy_after_the_eviction(
    zoo: Zoo, new_context: ContextFactory, s: Settings, kv_unified: bool, cache: tuple[bool, str, str]
) -> None:
    context = new_context(MODEL, **settings_of(cache, n_seq_max=3, kv_unified=kv_unified), dge=s.as_params())
    a = Sequence(zoo, context, cache, 0)
    a.evict(s, 120, 1)
    a.each(tokens_of(3, 2))
    context.seq_cp(0, 2)
    c = a.copy_to(2)
    assert as_lists(context.kept(2)) == as_lists(context.kept(0))
    assert context.info(2)["state"] == driver.STATE_EVICTED and context.info(2)["n_rows"] == context.info(0)["n_rows"]
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
    again.evict(s, 97, 10)
    together((again, tokens_of(2, 11)), (b, tokens_of(2, 12)))
    b.each(tokens_of(2, 13))
    again.each(tokens_of(2, 14))
