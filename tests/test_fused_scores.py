"""Which way scores are computed: by the fused operation ATTN_SCORE, or by the graph that takes its place.

Tests that use the fixture `scored_by` prove that both ways are right; this file proves that they are two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reference import driver
from reference.forward import Reference
from reference.models import ZOO
from reference.policies import Settings, disagreement, past_scores
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

N_PROMPT = 120


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_operation_of_scores(new_context: ContextFactory, scored_by: str, policy: str, flash_attn: bool) -> None:
    s = Settings(scores="policy", budget=40, window=8, draft_tokens=1)
    names: list[str] = []
    context = new_context("g2", flash_attn=flash_attn, dge={**s.as_params(), "policy": policy}, operations=names)
    tokens = tokens_of(N_PROMPT + 1, 3)
    prefill_and_arm(context, tokens[:N_PROMPT])
    n_prefill = names.count("ATTN_SCORE")
    decode_each(context, tokens[N_PROMPT:])
    assert context.info()["state"] == driver.STATE_EVICTED
    n_layer = ZOO["g2"].n_layer
    # once per layer: while the prompt is evaluated, or at the eviction
    assert n_prefill == (n_layer if scored_by == "fused" and policy == "h2o" else 0)
    assert names.count("ATTN_SCORE") == (n_layer if scored_by == "fused" else 0)
    assert names.count("POOL_2D") == (n_layer if scored_by == "graph" else 0)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_sums_that_are_not_added_in_place(
    new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, flash_attn: bool
) -> None:
    """As on Metal: another operation adds, once per layer and ubatch, and the rows that are kept are the same."""
    tokens = tokens_of(N_PROMPT + 1, 3)
    kept, n_add = [], []
    for fused in ("1", "apart", "0"):
        monkeypatch.setenv("LLAMA_DGE_FUSED", fused)
        s = Settings(scores="policy", budget=40, window=8, draft_tokens=1)
        names: list[str] = []
        context = new_context(
            "g2",
            flash_attn=flash_attn,
            n_ubatch=32,
            dge={**s.as_params(), "policy": "h2o"},
            operations=names,
        )
        prefill_and_arm(context, tokens[:N_PROMPT])
        assert names.count("ATTN_SCORE") == (0 if fused == "0" else 4 * ZOO["g2"].n_layer)
        n_add.append(names.count("ADD"))
        decode_each(context, tokens[N_PROMPT:])
        assert context.info()["state"] == driver.STATE_EVICTED
        kept.append(as_lists(context.kept()))
    assert n_add[1] - n_add[0] == 4 * ZOO["g2"].n_layer
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("n_seq, fused", [(2, True), (4, False)])
def test_cells_among_those_of_others(zoo: Zoo, new_context: ContextFactory, n_seq: int, fused: bool) -> None:
    """Rows of several prompts alternate: the operation hides the others' cells, unless these are too many."""
    s = Settings(scores="policy", budget=40, window=8, draft_tokens=1)
    names: list[str] = []
    context = new_context(
        "one", n_ctx=2048, n_seq_max=n_seq, type_k="f32", type_v="f32", dge=s.as_params(), operations=names
    )
    tokens = [tokens_of(N_PROMPT + 1, seed) for seed in range(n_seq)]
    rows = [(tokens[seq][i], i, seq, False) for i in range(N_PROMPT) for seq in range(n_seq)]
    for start in range(0, len(rows), 100):
        context.decode_batch(rows[start : start + 100])
    for seq in range(n_seq):
        assert context.arm(N_PROMPT, seq) == driver.OK
    context.decode_batch([(tokens[seq][N_PROMPT], N_PROMPT, seq, True) for seq in range(n_seq)])
    assert names.count("ATTN_SCORE") == (n_seq if fused else 0)
    assert names.count("POOL_2D") == (0 if fused else n_seq)
    for seq in range(n_seq):
        reference = Reference(zoo["one"].weights)
        reference.run(tokens[seq][:N_PROMPT])
        for row, positions in zip(past_scores(reference.q[0], reference.k[0], N_PROMPT, s), context.kept(seq)[0]):
            assert disagreement(row, positions, 32) <= 2e-5


@pytest.mark.usefixtures("scored_by")
def test_a_selection_reads_quantised_keys_as_they_are(zoo: Zoo, new_context: ContextFactory) -> None:
    """A product in the type of the keys would round the queries and reorder close entries."""
    s = Settings(scores="policy", budget=40, window=8)
    context = new_context(
        "one",
        flash_attn=True,
        type_k="q4_0",
        type_v="f16",
        dge={**s.as_params(), "scores": "auto", "draft_tokens": 2, "park": "ram", "recall": 1},
    )
    tokens = tokens_of(190, 8)
    prefill_and_arm(context, tokens[:150])
    reference = Reference(zoo["one"].weights, "q4_0", "f16", True)
    reference.run(tokens[:150])
    n_same = n_all = 0
    for token in tokens[150:]:
        context.decode([token])
        info = context.info()
        if info["n_recalls"] > 0:
            n = info["n_rows_before"]
            for row, positions in zip(past_scores(reference.q[0], reference.k[0], n, s), context.kept()[0]):
                n_same += disagreement(row, positions, 32) == 0.0
                n_all += 1
        reference.step([token])
    assert n_all > 40
    assert n_same >= 0.95 * n_all, (n_same, n_all)


@pytest.mark.slow
def test_scores_of_many_blocks_fit_into_a_graph(new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many keys and queries that a block is one query row: they are as many as the graph has room for."""
    monkeypatch.setenv("LLAMA_DGE_FUSED", "0")
    n = 6000
    dge = {"budget": n - 100, "window": n - 200, "scores": "policy", "draft_tokens": 1}
    context = new_context("g8", n_ctx=n + 256, flash_attn=True, dge=dge)
    prefill_and_arm(context, tokens_of(n, 1))
    assert context.evict() == driver.OK and context.info()["n_rows"] == n - 100
