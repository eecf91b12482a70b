"""Calls in unusual orders and numbers: what a second reader of the native part found."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.driver import Context, failing_alloc
from reference.forward import nmse
from reference.instances import Instances, greedy, instances
from reference.models import write_lora
from reference.scenario import as_lists, cut_after, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
DGE: dict[str, Any] = {"budget": 32, "draft_tokens": 4, "window": 8}
TOKENS = tokens_of(400, 0)
N_PROMPT, N_DRAFT = 120, 3


@pytest.fixture
def new_llm(zoo: Zoo) -> Iterator[Instances]:
    with instances(zoo["g2"].path) as made:
        yield made


# parked rows


def test_refresh_is_switched_on_for_rows_that_are_parked_in_a_file(new_llm: Instances, tmp_path: Path) -> None:
    """Nothing is chosen from a file: the rows of the cut go on, and the next prompt is recalled from memory."""
    disk = {"budget": 64, "draft_tokens": 2, "park": "disk", "park_dir": str(tmp_path)}
    recall = {"budget": 64, "draft_tokens": 2, "recall": 4}
    llm = new_llm(disk)
    first = greedy(llm, TOKENS[:150], 16)
    assert len(list(tmp_path.iterdir())) == 1
    llm.set_dge(recall)
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_recalls == 0 and llm.dge_stats.error is None
    llm.eval([TOKENS[200]] * 9)
    assert llm.dge_stats.n_recalls == 0
    prompt = [*TOKENS[:150], *first, *TOKENS[160:170]]
    assert greedy(llm, prompt, 20) == greedy(new_llm(recall), prompt, 20)
    assert llm.dge_stats.n_recalls > 0 and not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_parked_files_are_the_users_own(new_context: ContextFactory, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cut_after(new_context("g2", dge={**DGE, "park": "disk", "park_dir": tmp_path}), TOKENS[:126], N_PROMPT, N_DRAFT)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("park", "recall"), [("ram", False), ("ram", True), ("disk", False)])
@pytest.mark.parametrize("n_left", [0, 2])
def test_draft_rows_that_were_removed_do_not_come_back(
    new_context: ContextFactory, tmp_path: Path, park: str, recall: bool, n_left: int
) -> None:
    context = new_context("g2", **F32, dge={**DGE, "park": park, "park_dir": tmp_path})
    cut_after(context, TOKENS[:126], N_PROMPT, N_DRAFT)
    if recall:
        context.enable(**DGE, park=park, recall=4)
    n = N_PROMPT + n_left
    assert context.seq_rm(0, n, -1) and context.info()["n_parked"] == n
    others = tokens_of(30, 5)
    decode_each(context, others)
    assert (context.info()["n_recalls"] > 0) == recall
    assert context.restore(1000) == n
    fresh = new_context("g2", **F32)
    fresh.decode(TOKENS[:n], every=False)
    assert nmse(context.decode(others), fresh.decode(others)) < 1e-9


def test_a_copy_keeps_the_draft_rows_that_its_source_lost(new_context: ContextFactory, tmp_path: Path) -> None:
    for park in ("ram", "disk"):
        context = new_context(
            "g2", **F32, n_seq_max=2, kv_unified=False, dge={**DGE, "park": park, "park_dir": tmp_path}
        )
        cut_after(context, TOKENS[:126], N_PROMPT, N_DRAFT)
        context.seq_cp(0, 1)
        assert context.seq_rm(0, N_PROMPT, -1)
        context.decode(TOKENS[300:310], seq=0)
        assert [context.info(s)["n_parked"] for s in (0, 1)] == [N_PROMPT, N_PROMPT + N_DRAFT]
        assert context.restore(1000, 1) == N_PROMPT + N_DRAFT
        fresh = new_context("g2", **F32)
        fresh.decode(TOKENS[: N_PROMPT + N_DRAFT], every=False)
        assert nmse(context.decode([5], seq=1), fresh.decode([5])) < 1e-9


def test_a_caller_that_moves_back_into_the_draft(new_llm: Instances) -> None:
    dge = {"budget": 64, "draft_tokens": 8}
    llm = new_llm(dge)
    greedy(llm, TOKENS[:150], 17)
    llm.n_tokens = 151
    own = tokens_of(30, 5)
    llm.eval(own)
    prompt = [*llm.input_ids[:151].tolist(), *own, *tokens_of(20, 6)]
    assert greedy(llm, prompt, 24) == greedy(new_llm(dge), prompt, 24)


# LoRA


@pytest.fixture
def switch(zoo: Zoo, tmp_path: Path) -> Callable[[Context, bool], None]:
    """Turns an adapter on and off."""
    path = write_lora(zoo["g2"].weights, tmp_path / "lora.gguf")
    adapter = driver.llama().llama_adapter_lora_init(zoo["g2"].native.handle, str(path).encode())
    assert adapter

    def run(context: Context, on: bool) -> None:
        api = driver.llama()
        adapters = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
        assert api.llama_set_adapters_lora(context.handle, adapters, int(on), (ctypes.c_float * 1)(1.0)) == 0

    return run


def test_rows_of_other_adapters_are_not_given_back(
    new_context: ContextFactory, switch: Callable[[Context, bool], None]
) -> None:
    context = new_context("g2", dge={**DGE, "draft_tokens": 1, "park": "ram"})
    switch(context, True)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    switch(context, False)
    context.decode([5])  # cuts what was made with the adapter
    assert context.info()["state"] == driver.STATE_EVICTED and context.restore(N_PROMPT) == 0

    # with the same one all along they are, and after a restore they still count as its own
    context.clear()
    switch(context, True)
    cut_after(context, TOKENS[:130], N_PROMPT, 0)
    assert context.reuse(150, N_PROMPT) > 0
    switch(context, False)
    assert context.restore(N_PROMPT) == context.reuse(150, N_PROMPT) == 0
    switch(context, True)
    assert context.restore(N_PROMPT) == N_PROMPT
    switch(context, False)
    assert context.reuse(150, N_PROMPT) == 0


def test_adapters_are_noted_by_sequence(new_context: ContextFactory, switch: Callable[[Context, bool], None]) -> None:
    context = new_context("g2", n_seq_max=3, dge={**DGE, "park": "ram"})
    switch(context, True)
    context.decode(TOKENS[:N_PROMPT], seq=0, every=False)
    switch(context, False)
    assert context.reuse(130, N_PROMPT, 0) == 0
    context.decode([7], seq=1)
    assert context.reuse(130, N_PROMPT, 0) == 0 and context.reuse(130, 1, 1) == 1
    context.seq_cp(0, 2)
    assert context.reuse(130, N_PROMPT, 2) == 0
    # some rows with it and some without
    context.decode([8], seq=0)
    switch(context, True)
    assert context.reuse(140, N_PROMPT, 0) == 0
    # a prompt from its start
    context.seq_rm(0, -1, -1)
    context.decode(TOKENS[:N_PROMPT], seq=0, every=False)
    assert context.reuse(130, N_PROMPT, 0) > 0


def test_adapters_are_not_forgotten_while_the_rows_are_there(
    new_context: ContextFactory, switch: Callable[[Context, bool], None]
) -> None:
    def new(n: int) -> Context:
        context = new_context("g2", n_seq_max=2, dge={**DGE, "park": "ram"})
        switch(context, True)
        context.decode(TOKENS[:n], seq=0, every=False)
        switch(context, False)
        assert context.reuse(n + 10, n) == 0
        return context

    context = new(N_PROMPT)
    assert context.arm(N_PROMPT) == driver.OK
    context.enable(**DGE, park="ram")
    assert context.reuse(N_PROMPT + 10, N_PROMPT) == 0

    context = new(N_PROMPT)
    assert context.seq_rm(0, 10, 20)
    context.seq_add(0, 20, -1, -10)
    assert context.reuse(N_PROMPT + 10, N_PROMPT - 10) == 0

    context = new(100)
    context.seq_cp(1, 0)  # of nothing
    assert context.reuse(210, 100) == 0
    context.decode(TOKENS[:200], seq=1, every=False)
    context.seq_cp(1, 0, 100, 200)  # rows without it behind those with it
    assert context.reuse(210, 200) == 0
    switch(context, True)
    assert context.reuse(210, 200) == 0


# memory


def test_states_of_several_streams_and_a_failing_allocation(new_context: ContextFactory) -> None:
    """What was read of the first stream is written into tensors that a growth for the second one had freed."""

    def new(elastic: bool) -> Context:
        return new_context("g2", **F32, n_ctx=4096, n_seq_max=2, kv_unified=False, elastic=elastic)

    source = new(False)
    for seq in (0, 1):
        source.decode(TOKENS[:300], seq=seq, every=False)
    whole = source.state()
    want = source.decode([5], seq=0)
    source.seq_rm(0, 300, -1)
    for n in range(3):
        context = new(True)
        with failing_alloc(n):
            loaded = context.state_load(whole)
        if loaded:
            assert np.array_equal(context.decode([5], seq=0), want)
        else:
            assert context.pos_max(0) == context.pos_max(1) == -1

    # of one sequence, with cells in two streams
    source.decode(tokens_of(600, 3), seq=1, every=False)
    crafted = source.seq_state(0)[:-4] + source.seq_state(1)[16:]
    context = new(True)
    context.seq_state_load(crafted, 0)
    context.clear()
    assert np.array_equal(context.decode(TOKENS[:300], seq=0)[-1], new(False).decode(TOKENS[:300], seq=0)[-1])


def test_an_elastic_cache_does_not_grow_for_a_batch_that_is_in_it(new_context: ContextFactory) -> None:
    prompt = tokens_of(1500, 1)

    def new() -> Context:
        context = new_context("g2", n_ctx=8192, n_batch=2048, elastic=True, dge={**DGE, "draft_tokens": 1})
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
    context.enable(**DGE)
    assert context.memory_info()["n_cells"] == before


def test_positions_far_apart_take_no_memory(new_context: ContextFactory) -> None:
    context = new_context("g2", dge=DGE)
    context.decode([5, 6, 7], pos=1_000_000_000)
    assert context.arm(3) == context.evict() == driver.ERR_SEQ


def test_numbers_that_would_overflow(new_context: ContextFactory) -> None:
    context = new_context("g2", dge=DGE)
    context.decode(TOKENS[:50], every=False)
    top = 2**31 - 1
    assert context.reuse(top, 50) == context.reuse(top, top) == driver.ERR_PARAMS
    assert context.reuse(1 << 30, 50) == 50


# scores


def test_sums_do_not_take_in_the_attention_of_another_sequence(new_context: ContextFactory) -> None:
    """A prompt of two sequences at once: the cells are both's, and only one of them is summed."""
    dge = {"policy": "h2o", "scores": "policy", "budget": 32, "window": 8, "draft_tokens": 1}

    def kept(tail: list[int]) -> Any:
        context = new_context("g2", **F32, n_seq_max=2, dge=dge)
        api, batch = context.api, context.api.llama_batch_init(512, 0, 2)
        batch.n_tokens = 100
        for i, token in enumerate(TOKENS[:100]):
            batch.token[i], batch.pos[i], batch.logits[i], batch.n_seq_id[i] = token, i, 0, 2
            batch.seq_id[i][0], batch.seq_id[i][1] = 1, 0  # queries are captured of one of them
        assert api.llama_decode(context.handle, batch) == 0
        api.llama_batch_free(batch)
        if tail:
            context.decode(tail, seq=1)
        context.seq_rm(1, -1, -1)
        status = context.evict()
        assert status == driver.OK, context.status(status)
        return as_lists(context.kept())

    assert kept(TOKENS[200:260]) == kept([])


@pytest.mark.slow
def test_scores_of_many_blocks_fit_into_a_graph(new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many keys and queries that a block is one query row: they are as many as the graph has room for."""
    monkeypatch.setenv("LLAMA_DGE_FUSED", "0")
    n = 6000
    dge = {"budget": n - 100, "window": n - 200, "scores": "policy", "draft_tokens": 1}
    context = new_context("g8", n_ctx=n + 256, flash_attn=True, dge=dge)
    prefill_and_arm(context, tokens_of(n, 1))
    assert context.evict() == driver.OK and context.info()["n_rows"] == n - 100


# lost sequences


def test_eviction_is_not_switched_off_while_a_sequence_is_lost(new_context: ContextFactory) -> None:
    context = new_context("g2", **F32, n_ctx=2048, elastic=True, dge={**DGE, "park": "off", "draft_tokens": 1})
    prefill_and_arm(context, tokens_of(600, 3))
    lib = driver.dge_library()
    lib.llama_dge_debug_fail_move(2)
    context.decode([4], check=False)
    lib.llama_dge_debug_fail_move(0)
    if context.info()["error"] != driver.ERR_LOST:
        # the first growth is another one: this time rows had moved
        context.clear()
        prefill_and_arm(context, tokens_of(600, 3))
        lib.llama_dge_debug_fail_move(2)
        context.decode([4], check=False)
        lib.llama_dge_debug_fail_move(0)
    assert context.info()["error"] == driver.ERR_LOST
    assert context.disable() == driver.ERR_LOST
    context.clear()
    assert context.disable() == driver.OK
