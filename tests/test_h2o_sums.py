"""H2O's sums: the attention that a row gets from all rows, summed while these are evaluated.

The sums are on the device and show in the rows that are kept. With every budget from the least on, a kept set per
budget gives the order of the rows, and the order is compared with sums over the full attention matrix in NumPy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.budgets import h2o_sums, kept_gaps, rank_scores
from reference.forward import Reference, evaluated
from reference.h2o import EXACT, FLASH, S, check, evict, finish
from reference.policies import snapkv_score, top_positions
from reference.scenario import F32, as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

WINDOW = 8
FA = pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
MODELS = pytest.mark.parametrize("model", ["g1", "g2", "g3", "g8"])


# the sums


@FA
@MODELS
@pytest.mark.usefixtures("scored_by")
@pytest.mark.parametrize("draft_tokens", [1, 3, 6])
def test_order_of_the_sums(
    zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool, draft_tokens: int
) -> None:
    """Budgets 9, 10, 11, ... until nothing is evicted: each adds one row to each head, the next of the reference's."""
    n_prompt, n_draft = 60, draft_tokens - 1
    tokens = tokens_of(n_prompt + draft_tokens, 1)
    s = replace(S, draft_tokens=draft_tokens)
    context = new_context(model, flash_attn=flash_attn, **F32)
    reference = evaluated(zoo[model].weights, tokens[:-1], n_prompt, flash_attn=flash_attn)
    scores = [rank_scores(q, k, n_prompt, s) for q, k in zip(reference.q, reference.k)]
    order: dict[tuple[int, int], list[int]] = {}
    for budget in range(9, n_prompt):
        context.clear()
        context.enable(**replace(s, budget=budget).as_params())
        kept = evict(context, tokens, n_prompt)
        for il, heads in enumerate(kept):
            for ih, positions in enumerate(heads):
                assert positions[budget - WINDOW :].tolist() == list(range(n_prompt - WINDOW, n_prompt + n_draft))
                seen = order.setdefault((il, ih), [])
                (new,) = np.setdiff1d(positions[: budget - WINDOW], seen)
                seen.append(int(new))
    n_swapped = 0
    for (il, ih), rows in order.items():
        of_head = scores[il][ih]
        tolerance = FLASH if flash_attn and il > 0 else EXACT
        # each row is the best of the rest, up to the tolerance
        rest = of_head[rows]
        best_left = np.maximum.accumulate(rest[::-1])[::-1]
        assert ((best_left - rest) / best_left).max() <= tolerance
        n_swapped += int((best_left != rest).sum())
    assert flash_attn or n_swapped <= 2
    # attention over few rows has a wide spread; if not, the order would prove nothing
    assert all(np.ptp(np.log(of_head)) > 1.0 for of_layer in scores for of_head in of_layer)


def test_the_reference_tells_what_is_counted(zoo: Zoo) -> None:
    """Sums over all rows, over the window and over more or fewer rows of the draft give other kept sets."""
    tokens = tokens_of(120, 2)
    reference = evaluated(zoo["g3"].weights, tokens, 114)
    for q, k in zip(reference.q, reference.k):
        sums = {n: h2o_sums(q, k, n)[:, : 114 - WINDOW] for n in (113, 114, 115, 117, 119, 120)}
        window = snapkv_score(q, k, 114, WINDOW)
        for ih in range(2):
            rank = {n: top_positions(rows[ih], 40).tolist() for n, rows in sums.items()}
            assert rank[114] != top_positions(window[ih], 40).tolist()
        # each row of a sum adds up to 1: no weight is lost
        assert h2o_sums(q, k, 114).sum(axis=1) == pytest.approx([114.0, 114.0])
    order = [np.argsort(sums[n], axis=1).tolist() for n in sums]
    assert all(a != b for i, a in enumerate(order) for b in order[:i])


CHUNKS = [(512, 1), (512, 7), (512, 32), (512, 512), (64, 64), (33, 10), (100, 32), (5, 5), (1, 1)]


@FA
@pytest.mark.parametrize("model", ["g2", "g8"])
def test_chunks_do_not_matter(zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool) -> None:
    n_prompt, s = 163, replace(S, draft_tokens=3, budget=40)
    tokens = tokens_of(n_prompt + 3, 3)
    reference = evaluated(zoo[model].weights, tokens[:-1], n_prompt, flash_attn=flash_attn)
    found = []
    for n_batch, n_ubatch in CHUNKS:
        context = new_context(
            model, flash_attn=flash_attn, **F32, n_batch=n_batch, n_ubatch=n_ubatch, dge=s.as_params()
        )
        kept = evict(context, tokens, n_prompt)
        check(reference, kept, n_prompt, s, flash_attn)
        found.append(as_lists(kept))
    # the first layer's Q and K do not depend on chunks at all
    assert all(kept[0] == found[0][0] for kept in found)
    assert flash_attn or all(kept == found[0] for kept in found)


@FA
@pytest.mark.usefixtures("scored_by")
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("bf16", "bf16"), ("q4_0", "q4_0")], ids="-".join)
def test_other_caches(zoo: Zoo, new_context: ContextFactory, types: tuple[str, str], flash_attn: bool) -> None:
    """K is read as it is stored; rounding of the rows below makes the difference to the reference."""
    type_k, type_v = types if flash_attn else (types[0], "f16")
    n_prompt, s = 140, replace(S, draft_tokens=2)
    tokens = tokens_of(n_prompt + 2, 4)
    context = new_context("g3", flash_attn=flash_attn, type_k=type_k, type_v=type_v, dge=s.as_params())
    kept = evict(context, tokens, n_prompt)
    reference = Reference(zoo["g3"].weights, type_k, type_v, flash_attn)
    reference.run(tokens[:n_prompt])
    reference.step(tokens[n_prompt : n_prompt + 1])
    gaps = kept_gaps(reference, kept, n_prompt, s)
    assert gaps[:2].max() <= EXACT  # K of the first layer is rounded alike
    assert gaps.max() <= {"f16": 5e-3, "bf16": 2e-2, "q8_0": 2e-2, "q4_0": 1e-1}[types[0]]
    assert (gaps == 0).mean() >= 0.5


@pytest.mark.usefixtures("scored_by")
def test_a_long_micro_batch_is_summed_in_blocks(zoo: Zoo, new_context: ContextFactory) -> None:
    """A block of the graph is 24 MiB: 768 rows of 4 heads over 2048 cells."""
    n_prompt, s = 1900, replace(S, budget=300)
    tokens = tokens_of(n_prompt + 1, 5)
    context = new_context("one", n_ctx=2048, n_batch=2048, n_ubatch=2048, **F32, dge=s.as_params())
    kept = evict(context, tokens, n_prompt)
    reference = Reference(zoo["one"].weights)
    for start in range(0, n_prompt, 100):
        reference.step(tokens[start : min(start + 100, n_prompt)])
    check(reference, kept, n_prompt, s)


@pytest.mark.usefixtures("scored_by")
def test_many_streams_are_summed_in_blocks(zoo: Zoo, new_context: ContextFactory) -> None:
    """K in f32 of 64 streams with 1024 cells each is 32 MiB: one KV head after the other."""
    n_prompt, n_seq, s = 800, 64, replace(S, budget=100)
    tokens = tokens_of(n_prompt + 1, 5)
    context = new_context(
        "one", n_ctx=1024 * n_seq, n_seq_max=n_seq, kv_unified=False, **F32, dge=s.as_params()
    )  # fmt: skip
    context.decode(tokens[:790], seq=0)
    for i in range(790, n_prompt):
        rows = [(tokens[i], i, 0, False), *((tokens[i - seq], i - 790, seq, False) for seq in range(1, n_seq))]
        context.decode_batch(rows)
    assert context.arm(n_prompt) == driver.OK
    kept = finish(context, tokens[n_prompt:])
    reference = Reference(zoo["one"].weights)
    for start in range(0, n_prompt, 100):
        reference.step(tokens[start : start + 100])
    check(reference, kept, n_prompt, s)


@pytest.mark.parametrize("scores", ["draft", "both"])
def test_other_scores(zoo: Zoo, new_context: ContextFactory, scores: str) -> None:
    n_prompt, s = 140, replace(S, draft_tokens=4, scores=scores)
    tokens = tokens_of(n_prompt + 4, 6)
    reference = evaluated(zoo["g3"].weights, tokens[:-1], n_prompt)
    check(reference, evict(new_context("g3", **F32, dge=s.as_params()), tokens, n_prompt), n_prompt, s)
    # with the draft's scores H2O is SnapKV
    if scores == "draft":
        snapkv = evict(new_context("g3", **F32, dge=replace(s, policy="snapkv").as_params()), tokens, n_prompt)
        check(reference, snapkv, n_prompt, s)


def test_draft_scores_need_no_sums(new_context: ContextFactory) -> None:
    """Nothing is accumulated, so a prompt whose end was evaluated again can be evicted."""
    s = replace(S, scores="draft")
    tokens = tokens_of(121, 7)
    context = new_context("g3", **F32, dge=s.as_params())
    context.decode(tokens_of(130, 8))
    assert context.reuse(120, 60) == 60
    assert context.seq_rm(0, 60, -1)
    context.decode(tokens[60:120])
    assert context.arm(120) == driver.OK
    finish(context, tokens[120:])


# several sequences


@FA
@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
@pytest.mark.usefixtures("scored_by")
def test_two_sequences_in_one_batch(zoo: Zoo, new_context: ContextFactory, kv_unified: bool, flash_attn: bool) -> None:
    """Rows of two prompts alternate in one llama_decode(): each sum is that of its own sequence."""
    n_prompt, s = 90, replace(S, draft_tokens=3)
    tokens = [tokens_of(n_prompt + 3, seed) for seed in (9, 10)]
    context = new_context(
        "g2", flash_attn=flash_attn, **F32, n_seq_max=2, kv_unified=kv_unified, n_ubatch=50, dge=s.as_params()
    )
    rows = [(tokens[seq][i], i, seq, False) for i in range(n_prompt) for seq in (0, 1)]
    for start in range(0, len(rows), 60):
        context.decode_batch(rows[start : start + 60])
    for seq in (0, 1):
        assert context.arm(n_prompt, seq) == driver.OK
    for i in range(n_prompt, n_prompt + 3):
        context.decode_batch([(tokens[seq][i], i, seq, True) for seq in (0, 1)])
    for seq in (0, 1):
        assert context.info(seq)["state"] == driver.STATE_EVICTED
        reference = evaluated(zoo["g2"].weights, tokens[seq][:-1], n_prompt, flash_attn=flash_attn)
        check(reference, context.kept(seq), n_prompt, s, flash_attn)


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
def test_beside_an_evicted_sequence(zoo: Zoo, new_context: ContextFactory, kv_unified: bool) -> None:
    """A prompt is summed beside an unevenly evicted sequence, in the same batches and in the cells that it freed."""
    n_prompt, s = 90, replace(S, head_budgets="adaptive")
    tokens = [tokens_of(200, seed) for seed in (11, 12)]
    context = new_context("g2", **F32, n_seq_max=2, kv_unified=kv_unified, n_ctx=256 if kv_unified else 512,
                          dge=s.as_params())  # fmt: skip
    evict(context, tokens[0][:121], 120)
    at = 121
    for start in range(0, n_prompt, 15):
        rows = [(tokens[1][i], i, 1, False) for i in range(start, start + 15)]
        context.decode_batch([*rows, (tokens[0][at], at, 0, True)])
        at += 1
    assert context.arm(n_prompt, 1) == driver.OK
    kept = finish(context, tokens[1][n_prompt : n_prompt + 1], 1)
    check(evaluated(zoo["g2"].weights, tokens[1][:n_prompt], n_prompt), kept, n_prompt, s)


@FA
@pytest.mark.usefixtures("scored_by")
def test_cells_that_are_used_again(zoo: Zoo, new_context: ContextFactory, flash_attn: bool) -> None:
    """Sums of another prompt in the same cells do not count."""
    n_prompt, s = 90, replace(S, draft_tokens=3)
    context = new_context("g2", flash_attn=flash_attn, **F32, n_seq_max=2, n_ctx=256, dge=s.as_params())
    for i, removal in enumerate(["clear", "rm", "rm after the eviction", "keep", "rm in part"]):
        old, tokens = tokens_of(100, 20 + i), tokens_of(n_prompt + 3, 30 + i)
        context.decode(old)
        if removal == "rm after the eviction":
            assert context.arm(100) == driver.OK
            finish(context, tokens_of(8, 40))
        if removal == "clear":
            context.clear(False)
        elif removal == "keep":
            context.seq_keep(1)
        elif removal == "rm in part":
            # cells of one sequence go to another
            assert context.seq_rm(0, 20, -1)
        else:
            assert context.seq_rm(0, -1, -1)
        seq = 1 if removal == "rm in part" else 0
        kept = evict(context, tokens, n_prompt, seq)
        check(evaluated(zoo["g2"].weights, tokens[:-1], n_prompt, flash_attn=flash_attn), kept, n_prompt, s, flash_attn)
        assert context.seq_rm(-1, -1, -1)


def test_sums_do_not_take_in_the_attention_of_another_sequence(new_context: ContextFactory) -> None:
    """A prompt of two sequences at once: the cells are both's, and only one of them is summed."""
    dge = {"policy": "h2o", "scores": "policy", "budget": 32, "window": 8, "draft_tokens": 1}

    def kept(tail: list[int]) -> Any:
        context = new_context("g2", **F32, n_seq_max=2, dge=dge)
        api, batch = context.api, context.api.llama_batch_init(512, 0, 2)
        batch.n_tokens = 100
        for i, token in enumerate(tokens_of(100, 0)):
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

    assert kept(tokens_of(60, 1)) == kept([])


# free cells


@pytest.mark.parametrize("flash_attn, pattern", [(False, 0x6BCD), (True, 0xEBCD), (True, 0x7E00)])
@pytest.mark.usefixtures("scored_by")
def test_free_cells_may_hold_anything(new_context: ContextFactory, flash_attn: bool, pattern: int) -> None:
    """Sums see rows of their sequence only. NaN with flash attention, which never reads a masked cell."""
    tokens = tokens_of(140, 60)
    s = replace(S, draft_tokens=3)
    found = []
    for poison in (False, True):
        context = new_context("g2", flash_attn=flash_attn, type_k="f16", type_v="f16", n_ubatch=50, dge=s.as_params())
        if poison:
            assert context.poison(pattern) > 0
        prefill_and_arm(context, tokens[:130])
        if poison:
            assert context.poison(pattern) > 0
        logits = decode_each(context, tokens[130:])
        assert context.info()["state"] == driver.STATE_EVICTED
        found.append((logits, as_lists(context.kept())))
    assert np.isfinite(found[0][0]).all()
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
