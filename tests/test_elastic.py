"""A cache that grows with use and shrinks after an eviction: the same logits, fewer cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.driver import Context, dge_library, failing_alloc
from reference.elastic import DGE, N_CTX, TOKENS, bytes_of, cells_for
from reference.forward import nmse
from reference.scenario import as_lists, decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


# the ladder


@pytest.mark.parametrize("n_ctx", [256, 512, 768, 1024, N_CTX, 10_240, 1_000_192])
def test_ladder(new_context: ContextFactory, n_ctx: int) -> None:
    context = new_context("one", n_ctx=n_ctx, elastic=True)
    n_max = context.memory_info()["n_cells_max"]
    assert n_max == n_ctx

    def cells_of(n_rows: int) -> int:
        return context.estimate(n_rows, elastic=True, draft_tokens=1)["n_cells"]

    last = 0
    for n_rows in (1, 255, 256, 511, 512, 513, 768, 769, 1280, 1281, 2000, 5000, 100_000, 2**24):
        n = cells_of(n_rows)
        assert last <= n <= n_max and (n >= n_rows or n == n_max)
        # a step is worth its copy, and not more than half is empty
        assert n == n_max or (n % 256 == 0 and n >= 512 and (n == 512 or n <= 1.5 * n_rows + 512))
        last = n
    if n_ctx == N_CTX:
        assert [cells_of(n) for n in (1, 512, 513, 769, 1281)] == [cells_for(n) for n in (1, 512, 513, 769, 1281)]
        assert [cells_for(n) for n in (1, 512, 513, 769, 1281)] == [512, 512, 768, 1280, 2048]


def test_elastic_only_where_asked(new_context: ContextFactory) -> None:
    context, plain = new_context("g2", n_ctx=N_CTX, elastic=True), new_context("g2", n_ctx=N_CTX)
    assert dge_library().llama_dge_is_elastic(context.handle)
    assert not dge_library().llama_dge_is_elastic(plain.handle)
    assert (plain.memory_info()["n_cells"], plain.memory_info()["n_cells_max"]) == (N_CTX, N_CTX)
    assert (context.memory_info()["n_cells"], context.memory_info()["n_cells_max"]) == (512, N_CTX)
    assert context.api.llama_n_ctx(context.handle) == plain.api.llama_n_ctx(plain.handle) == N_CTX
    # nothing to save in a small one
    small = new_context("g2", n_ctx=512, elastic=True)
    assert small.memory_info()["n_cells"] == 512 and not dge_library().llama_dge_is_elastic(small.handle)


# the same logits


@pytest.mark.parametrize(
    "flash_attn, types", [(False, ("f16", "f16")), (True, ("f16", "f16")), (True, ("q8_0", "q4_0"))]
)
@pytest.mark.parametrize("n_batch, n_ubatch", [(1, 1), (7, 7), (32, 32), (512, 512), (512, 7)])
def test_growth_changes_no_bit(
    new_context: ContextFactory, flash_attn: bool, types: tuple[str, str], n_batch: int, n_ubatch: int
) -> None:
    settings: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": n_batch, "n_ubatch": n_ubatch, "flash_attn": flash_attn}
    settings |= {"type_k": types[0], "type_v": types[1]}
    context, plain = new_context("one", **settings, elastic=True), new_context("one", **settings)
    # rows that are there at each step: around every size of the cache
    steps = [3, 509, 511, 512, 513, 767, 769, 770, 1279, 1281] + ([1300, 2047, 2048] if n_batch > 7 else [])
    seen = set()
    n = 0
    for stop in steps:
        if n_batch == 1 and stop > 520:
            break
        got, want = context.decode(TOKENS[n:stop]), plain.decode(TOKENS[n:stop])
        assert np.array_equal(got, want), stop
        n = stop
        n_cells = context.memory_info()["n_cells"]
        assert n_cells == cells_for(n)
        assert context.memory_info()["kv"] * N_CTX == plain.memory_info()["kv"] * n_cells
        assert context.memory_info()["kv_max"] == plain.memory_info()["kv"]
        seen.add(n_cells)
    assert len(seen) >= (2 if n_batch == 1 else 4)
    assert context.state() == plain.state()
    if n == N_CTX:
        # full is full, as without elastic memory
        for each in (context, plain):
            each.decode([5], check=False)
            assert each.rc == 1


@UNIFIED
@pytest.mark.parametrize("n_ubatch", [7, 512])
def test_two_sequences(new_context: ContextFactory, kv_unified: bool, n_ubatch: int) -> None:
    """Several sequences in one batch; streams have the size that the longest of them needs."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified, "n_ubatch": n_ubatch}
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    n = [0, 0]
    for n_new in ((100, 300), (0, 111), (1, 1), (300, 0), (37, 411), (3, 4)):
        rows = [
            (TOKENS[(7 + seq) * i % N_CTX], i, seq, True) for seq in (0, 1) for i in range(n[seq], n[seq] + n_new[seq])
        ]
        for start in range(0, len(rows), 512):
            assert np.array_equal(context.decode_batch(rows[start:][:512]), plain.decode_batch(rows[start:][:512]))
        n = [a + b for a, b in zip(n, n_new)]
        want = sum(n) if kv_unified else max(n)
        assert context.memory_info()["n_cells"] == cells_for(want)
        assert context.memory_info()["kv"] == bytes_of(cells_for(want), 3, 128, 1 if kv_unified else 2)
    assert context.state() == plain.state()


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True])
def test_eviction_shrinks(new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
    """After an eviction there are few cells, then they grow again; the logits are those of a cache of one size."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified, "flash_attn": flash_attn}
    context = new_context("g2", **settings, elastic=True, dge=DGE)
    plain = new_context("g2", **settings, dge=DGE)
    for n_prompt in (700, 1000):
        tokens = TOKENS[: n_prompt + 300]
        got = evict_after(context, tokens, n_prompt, 2)
        assert np.array_equal(got, evict_after(plain, tokens, n_prompt, 2))
        assert as_lists(context.kept()) == as_lists(plain.kept())
        # 42 rows were kept and 298 came: 256 cells did not suffice
        assert context.memory_info()["n_cells"] == 512
        assert context.memory_info()["kv"] == bytes_of(512, 3, 128, 1 if kv_unified else 2)
        assert plain.memory_info()["n_cells"] == (1 if not kv_unified else 2) * N_CTX
        got, want = context.decode(TOKENS[:400]), plain.decode(TOKENS[:400])
        assert np.array_equal(got, want)
        assert context.memory_info()["n_cells"] == 768
        for each in (context, plain):
            assert each.seq_rm(0, -1, -1)


def test_memory_after_the_eviction(new_context: ContextFactory) -> None:
    """Rows of the budget, the draft and room for an answer: 0.15 of the full cache at most."""
    settings: dict[str, Any] = {"n_ctx": 8192, "elastic": True, "n_ubatch": 512}
    context = new_context("one", **settings, dge={**DGE, "budget": 512, "park": "off"})
    prefill_and_arm(context, tokens_of(8000, 1))
    full = context.memory_info()
    decode_each(context, TOKENS[:3])
    info = context.memory_info()
    assert context.info()["state"] == driver.STATE_EVICTED
    assert full["n_cells"] == 8192 and info["n_cells"] == 768
    assert info["kv"] <= 0.15 * full["kv"] and info["kv_max"] == full["kv"] == full["kv_max"]
    # the buffers of graphs follow at the next decode
    context.decode(TOKENS[3:4])
    assert context.memory_info()["compute"] < 0.3 * full["compute"]


@UNIFIED
def test_others_keep_the_cache_large(new_context: ContextFactory, kv_unified: bool) -> None:
    """An eviction frees no cell of another sequence, which stays bit-identical."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified}
    context, plain = new_context("g2", **settings, elastic=True, dge=DGE), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:600], every=False)
        each.decode(TOKENS[1000:1400], seq=1, every=False)
    before = context.seq_state(1)
    assert context.arm(600) == driver.OK
    decode_each(context, TOKENS[600:603])
    assert context.info()["state"] == driver.STATE_EVICTED
    assert context.memory_info()["n_cells"] == (1280 if kv_unified else 768)
    assert context.seq_state(1) == before == plain.seq_state(1)
    got, want = context.decode(TOKENS[:20], seq=1), plain.decode(TOKENS[:20], seq=1)
    assert nmse(got, want) < 1e-6 if kv_unified else np.array_equal(got, want)


@pytest.mark.parametrize("flash_attn, pattern", [(True, driver.NAN_F16), (False, driver.LARGE_F16)])
def test_poison_at_every_step(new_context: ContextFactory, flash_attn: bool, pattern: int) -> None:
    """What a copy of the cache brings along in free cells is never read, nor is what a larger one adds."""
    settings: dict[str, Any] = {"n_ctx": N_CTX, "flash_attn": flash_attn, "n_ubatch": 50}
    context = new_context("g2", **settings, elastic=True, dge=DGE)
    plain = new_context("g2", **settings, dge=DGE)

    def step(n: int, m: int) -> None:
        context.poison(pattern)
        got = context.decode(TOKENS[n:m])
        assert np.isfinite(got).all() and np.array_equal(got, plain.decode(TOKENS[n:m])), (n, m)
        context.poison(pattern)

    for n, m in ((0, 13), (13, 500), (500, 513), (513, 771)):
        step(n, m)
    for each in (context, plain):
        assert each.arm(771) == driver.OK
    for n in (771, 772, 773, 774):
        step(n, n + 1)
    assert context.info()["state"] == driver.STATE_EVICTED and context.memory_info()["n_cells"] == 256
    for n, m in ((775, 900), (900, 1100), (1100, 1400), (1400, 1401)):
        step(n, m)
    assert context.memory_info()["n_cells"] == 768


# states


# memory functions while growth is needed


@pytest.mark.parametrize("data", [True, False])
def test_clear(new_context: ContextFactory, data: bool) -> None:
    context, plain = new_context("g2", n_ctx=N_CTX, elastic=True), new_context("g2", n_ctx=N_CTX)
    for n in (700, 100, 1300):
        for each in (context, plain):
            each.clear(data)
        assert np.array_equal(context.decode(TOKENS[:n]), plain.decode(TOKENS[:n]))


@pytest.mark.parametrize("n_new", [3, 400, 900])
@pytest.mark.parametrize("first", [0, 1])
def test_stream_copy_that_is_not_made_yet(new_context: ContextFactory, n_new: int, first: int) -> None:
    """llama.cpp copies streams at the next decode, for which the cache has to grow."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": False}
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:490], every=False)
        each.seq_cp(0, 1)
    for seq in (first, 1 - first):
        tokens = TOKENS[500 + seq :][:n_new]
        assert np.array_equal(context.decode(tokens, seq=seq), plain.decode(tokens, seq=seq))
    assert context.memory_info()["n_cells"] == cells_for(490 + n_new)


@UNIFIED
@pytest.mark.parametrize("failing", [False, True])
def test_shift_that_is_not_made_yet(new_context: ContextFactory, kv_unified: bool, failing: bool) -> None:
    """A K-shift and growth fall due together; a growth that fails does not lose the shift."""
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified}
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:400], every=False)
        assert each.seq_rm(0, 20, 120)
        each.seq_add(0, 120, -1, -100)
    if failing:
        with failing_alloc(2):
            context.decode(TOKENS[:500], check=False)
        assert context.rc == 1
    assert np.array_equal(context.decode(TOKENS[:500]), plain.decode(TOKENS[:500]))
    assert context.state() == plain.state()


def test_removed_rows_make_room(new_context: ContextFactory) -> None:
    """Cells that are free are used before there are more, wherever they lie."""
    context = new_context("g2", n_ctx=N_CTX, n_seq_max=2, elastic=True)
    plain = new_context("g2", n_ctx=512, n_seq_max=2)
    for each in (context, plain):
        each.decode(TOKENS[:250], every=False)
        each.decode(TOKENS[:250], seq=1, every=False)
        assert each.seq_rm(0, 100, -1)
        assert each.seq_rm(1, 200, -1)
    assert np.array_equal(context.decode(TOKENS[:150]), plain.decode(TOKENS[:150]))
    assert context.memory_info()["n_cells"] == 512


@pytest.mark.parametrize("recall", [0, 3])
@pytest.mark.parametrize("n_after", [0, 1, 2, 5])
def test_graph_buffers_are_as_the_context_expects(new_context: ContextFactory, recall: int, n_after: int) -> None:
    """llama.cpp warns of compute buffers that changed behind its back, even where nobody asked for messages."""
    tokens = tokens_of(1500, 40)
    dge = {"budget": 40, "park": "ram", "recall": recall}
    context = new_context("g2", n_ctx=2048, elastic=True, dge=dge)
    context.decode(tokens, every=False)
    assert context.arm(1500) == driver.OK
    for token in tokens[:n_after]:
        context.decode([token])
    with driver.captured_log() as lines:
        context.close()
    assert [line for line in lines if "compute buffer size" in line]
    assert not [line for line in lines if "does not match" in line]


def test_an_elastic_cache_does_not_grow_for_a_batch_that_is_in_it(new_context: ContextFactory) -> None:
    prompt = tokens_of(1500, 1)

    def new() -> Context:
        context = new_context("g2", n_ctx=8192, n_batch=2048, elastic=True, dge={"budget": 32, "draft_tokens": 1})
        context.decode(prompt, every=False)
        context.clear()  # has grown already, so that the next prompt changes nothing
        return context

    cells = []
    for by_decode in (True, False):
        context = new()
        prefill_and_arm(context, prompt)
        if by_decode:
            context.decode([5])
        else:
            assert context.evict() == driver.OK
        cells.append(context.memory_info()["n_cells"])
    assert cells[0] == cells[1] <= 512

    context = new()
    context.decode(prompt, every=False)
    before = context.memory_info()["n_cells"]
    context.enable(budget=32, draft_tokens=4)
    assert context.memory_info()["n_cells"] == before
