"""Sequences that share one context: an eviction changes its own sequence only, and the others use what it frees.

Every sequence is compared with one that has a context for itself. In f32, without flash attention, rows in other cells
and in other batches change logits by the order of sums only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llama_dge.config import POLICIES
from reference import driver
from reference.driver import Context
from reference.forward import nmse
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
SAME = 1e-9
DGE: dict[str, Any] = {"budget": 40, "draft_tokens": 3, "scores": "both", "park": "ram"}
UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
LENGTHS = [300, 280, 90, 41, 333, 150, 30, 260]
N_CTX = 768


def prompt_of(seq: int) -> list[int]:
    return tokens_of(LENGTHS[seq], seq)


def answer_of(seq: int, n: int = 24) -> list[int]:
    return tokens_of(n, 100 + seq)


def together(context: Context, step: int, seqs: list[int]) -> dict[int, driver.Logits]:
    """One token of each sequence in one batch."""
    rows = [(answer_of(seq)[step], context.pos_max(seq) + 1, seq, True) for seq in seqs]
    return dict(zip(seqs, context.decode_batch(rows)))


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("elastic", [False, True])
def test_eight_sequences(new_context: ContextFactory, policy: str, elastic: bool) -> None:
    """Prefill, eviction and decoding of eight sequences in a cache that could not hold half of them full."""
    assert sum(LENGTHS) > 1.9 * N_CTX
    dge = {**DGE, "policy": policy, "park": "off"}
    settings: dict[str, Any] = {**F32, "n_ctx": N_CTX, "n_seq_max": 8, "elastic": elastic}
    context = new_context("g2", **settings, dge=dge)
    alone = [new_context("g2", **F32, dge=dge) for _ in LENGTHS]
    for seq, n_prompt in enumerate(LENGTHS):
        others = [context.seq_state(s) for s in range(seq)]
        status = []
        for each, s in ((context, seq), (alone[seq], 0)):
            each.decode(prompt_of(seq), seq=s, every=False)
            status.append(each.arm(n_prompt, s))
        assert status == [driver.OK if n_prompt > 40 else driver.NOTHING_TO_EVICT] * 2
        got = decode_each(context, answer_of(seq, 4), seq)
        assert nmse(got, decode_each(alone[seq], answer_of(seq, 4))) <= SAME
        # neither its rows nor its eviction changed a bit of the others
        assert [context.seq_state(s) for s in range(seq)] == others
        if n_prompt > 40:
            assert context.info(seq)["state"] == driver.STATE_EVICTED
            assert as_lists(context.kept(seq)) == as_lists(alone[seq].kept())
            # kept entries of the layer with the most, and four tokens of the answer
            assert context.info(seq)["n_rows"] == context.info(seq)["n_rows_after"] + 2
    assert sum(context.info(seq)["n_rows"] for seq in range(8)) <= N_CTX // 2 + 8 * 40
    for step in range(4, 24):
        got_of = together(context, step, list(range(8)))
        for seq, logits in got_of.items():
            assert nmse(logits, alone[seq].decode([answer_of(seq)[step]])[0]) <= SAME, (step, seq)
    assert context.info()["n_evictions"] == 7


def test_eight_sequences_would_not_fit(new_context: ContextFactory) -> None:
    """Without eviction the third prompt finds no cells."""
    context = new_context("g2", **F32, n_ctx=N_CTX, n_seq_max=8)
    for seq in range(8):
        context.decode(prompt_of(seq), seq=seq, every=False, check=False)
        if context.rc != 0:
            break
    assert context.rc == 1 and 2 <= seq <= 4


@UNIFIED
@pytest.mark.parametrize("elastic", [False, True])
def test_evictions_at_different_times(new_context: ContextFactory, kv_unified: bool, elastic: bool) -> None:
    """Four sequences in each batch, armed at unlike steps: each is evicted when its own draft is there."""
    seqs, armed_at = [0, 1, 2, 4], {0: 0, 1: 2, 2: 2, 4: 7}
    settings: dict[str, Any] = {**F32, "n_ctx": 5 * 512, "n_seq_max": 5, "kv_unified": kv_unified, "elastic": elastic}
    context = new_context("g2", **settings, dge=DGE)
    alone = {seq: new_context("g2", **F32, dge=DGE) for seq in seqs}
    for seq in seqs:
        context.decode(prompt_of(seq), seq=seq, every=False)
        alone[seq].decode(prompt_of(seq), every=False)
    states = []
    for step in range(16):
        for seq in seqs:
            if armed_at[seq] == step:
                # what was answered before belongs to the prompt
                assert context.arm(LENGTHS[seq] + step, seq) == alone[seq].arm(LENGTHS[seq] + step) == driver.OK
        got = together(context, step, seqs)
        for seq in seqs:
            assert nmse(got[seq], alone[seq].decode([answer_of(seq)[step]])[0]) <= SAME, (step, seq)
        states.append([context.info(seq)["state"] == driver.STATE_EVICTED for seq in seqs])
        assert states[-1] == [step >= armed_at[seq] + 2 for seq in seqs]
    for seq in seqs:
        assert as_lists(context.kept(seq)) == as_lists(alone[seq].kept())
        # and each has its own way back
        n = LENGTHS[seq] + armed_at[seq] + 2
        assert context.restore(n, seq) == alone[seq].restore(n) == n
        assert nmse(context.decode(tokens_of(5, 1), seq=seq), alone[seq].decode(tokens_of(5, 1))) <= SAME


@UNIFIED
@pytest.mark.parametrize("flash_attn, types", [(False, "f16"), (True, "q8_0")])
def test_an_eviction_changes_no_bit_of_others(
    new_context: ContextFactory, kv_unified: bool, flash_attn: bool, types: str
) -> None:
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 3, "kv_unified": kv_unified, "flash_attn": flash_attn}
    settings |= {"type_k": types, "type_v": types}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    for each in (context, twin):
        for seq in (1, 0, 2):
            each.decode(prompt_of(seq), seq=seq, every=False)
    before = [context.seq_state(seq) for seq in (1, 2)]
    assert context.evict(0) == driver.OK and context.info(0)["n_rows"] == 40
    assert [context.seq_state(seq) for seq in (1, 2)] == before
    for seq in (1, 2):
        got, want = decode_each(context, answer_of(seq), seq), decode_each(twin, answer_of(seq), seq)
        # new rows take the cells that are free now
        assert np.array_equal(got, want) if not kv_unified else nmse(got, want) < 1e-4


@pytest.mark.parametrize("elastic", [False, True])
def test_freed_cells_are_used(new_context: ContextFactory, elastic: bool) -> None:
    """A prompt that does not fit beside another fits as soon as that one is evicted, elastic or not."""
    context = new_context("g2", **F32, n_ctx=512, n_seq_max=2, elastic=elastic, dge=DGE)
    alone = new_context("g2", **F32)
    prefill_and_arm(context, prompt_of(0))
    second = tokens_of(420, 7)
    context.decode(second, seq=1, every=False, check=False)
    assert context.rc == 1 and context.pos_max(1) == -1
    decode_each(context, answer_of(0, 3))
    assert context.info()["n_rows"] == 43
    assert nmse(context.decode(second, seq=1), alone.decode(second)) <= SAME
    assert context.memory_info()["n_cells"] == 512


@pytest.mark.parametrize("shared_again", [False, True])
def test_shared_prefix_before_an_eviction(new_context: ContextFactory, shared_again: bool) -> None:
    """Copies of a prefix: none of them is evicted as long as another holds the rows, the last one is."""
    context = new_context("g2", **F32, n_ctx=1024, n_seq_max=3, dge=DGE)
    prefix = tokens_of(120, 8)
    context.decode(prefix, every=False)
    for seq in (1, 2):
        context.seq_cp(0, seq)
    own = {seq: tokens_of(30 + seq, 9 + seq) for seq in (0, 1, 2)}
    alone = {seq: new_context("g2", **F32, dge=DGE) for seq in own}
    for seq, tokens in own.items():
        alone[seq].decode(prefix, every=False)
        assert nmse(context.decode(tokens, seq=seq), alone[seq].decode(tokens)) <= SAME
        assert context.arm(120 + len(tokens), seq) == driver.ERR_SHARED
    assert context.info(0)["n_rows"] == 150
    assert context.seq_rm(0, -1, -1)
    assert context.arm(151, 1) == driver.ERR_SHARED
    if shared_again:
        # the other copy goes while this one is armed
        assert context.seq_rm(2, -1, -1)
        assert context.arm(151, 1) == alone[1].arm(151) == driver.OK
        context.seq_cp(1, 2)
        # shared again before the eviction: it is given up, and nothing is lost
        got = decode_each(context, answer_of(1, 6), 1)
        assert context.info(1)["error"] == driver.ERR_SHARED and context.info(1)["state"] == driver.STATE_FULL
        alone[1].disarm()
        assert nmse(got, decode_each(alone[1], answer_of(1, 6))) <= SAME
        assert nmse(context.decode([5], seq=2), new_decode(new_context, [*prefix, *own[1]], [5])) <= SAME
        return
    assert context.seq_rm(2, -1, -1)
    assert context.arm(151, 1) == alone[1].arm(151) == driver.OK
    got, want = decode_each(context, answer_of(1, 9), 1), decode_each(alone[1], answer_of(1, 9))
    assert context.info(1)["state"] == driver.STATE_EVICTED and nmse(got, want) <= SAME
    assert as_lists(context.kept(1)) == as_lists(alone[1].kept())


def new_decode(new_context: ContextFactory, prompt: list[int], tokens: list[int]) -> driver.Logits:
    context = new_context("g2", **F32)
    context.decode(prompt, every=False)
    return context.decode(tokens)


@UNIFIED
def test_copies_after_an_eviction(new_context: ContextFactory, kv_unified: bool) -> None:
    """Three answers to one prompt that was evicted once; one ends, one is restored, the third goes on."""
    context = new_context("g2", **F32, n_ctx=2048, n_seq_max=4, kv_unified=kv_unified, dge=DGE)
    prefill_and_arm(context, prompt_of(0))
    decode_each(context, answer_of(0, 5))
    alone = {}
    for seq in (1, 2, 3):
        context.seq_cp(0, seq)
        alone[seq] = new_context("g2", **F32, dge=DGE)
        prefill_and_arm(alone[seq], prompt_of(0))
        decode_each(alone[seq], answer_of(0, 5))
        # between streams the copy is made at the next decode
        assert nmse(decode_each(context, answer_of(seq, 4), seq), decode_each(alone[seq], answer_of(seq, 4))) <= SAME
    assert context.info(1)["n_rows"] == 40 + 5 + 4
    assert context.seq_rm(1, -1, -1)
    assert context.restore(LENGTHS[0], 2) == alone[2].restore(LENGTHS[0]) == LENGTHS[0]
    for seq in (2, 3):
        got, want = decode_each(context, answer_of(9), seq), decode_each(alone[seq], answer_of(9))
        assert nmse(got, want) <= SAME
    assert context.seq_rm(0, -1, -1)
    assert nmse(decode_each(context, answer_of(8), 3), decode_each(alone[3], answer_of(8))) <= SAME


@UNIFIED
@pytest.mark.parametrize("flash_attn", [False, True])
def test_shift_of_another_sequence(new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
    """A K-shift of a sequence that was not evicted leaves the one that was as it is."""
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 2, "kv_unified": kv_unified, "flash_attn": flash_attn}
    context, twin = (new_context("g2", **settings, dge=DGE) for _ in range(2))
    alone = new_context("g2", flash_attn=flash_attn)
    for each in (context, twin):
        prefill_and_arm(each, prompt_of(0))
        decode_each(each, answer_of(0, 5))
        each.decode(prompt_of(2), seq=1, every=False)
    alone.decode(prompt_of(2), every=False)
    assert not context.can_shift()
    for each, seq in ((context, 1), (alone, 0)):
        assert each.seq_rm(seq, 10, 30)
        each.seq_add(seq, 30, -1, -20)
    assert twin.seq_rm(1, 10, 30)
    before = context.seq_state(0)
    got, want = context.decode(answer_of(2), seq=1), alone.decode(answer_of(2))
    assert np.array_equal(got, want) if not kv_unified else nmse(got, want) < 1e-6
    assert context.seq_state(0) == before and not context.can_shift()
    twin.decode(answer_of(2), seq=1)
    got, want = decode_each(context, answer_of(0)), decode_each(twin, answer_of(0))
    assert np.array_equal(got, want)
