"""Recall on models with sinks, soft caps, norms of heads, windows and other scales, against the NumPy reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.budgets import all_scores
from reference.forward import Reference, nmse
from reference.kind_bounds import F32, Cache, logits_bounds, tolerance
from reference.mutants import wrong_scores
from reference.policies import Settings, disagreement
from reference.recall import BUDGET, WINDOW, recall
from reference.scenario import Kept, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

EVERY, N_PROMPT = 5, 120
# the last queries rank as SnapKV's window does
S = Settings(scores="policy", budget=BUDGET, window=WINDOW, draft_tokens=1, pooling="none")


def cut_to(sequence: Reference, n: int) -> Reference:
    """The first n rows, queries included."""
    twin = sequence.fork()
    twin.truncate(n)
    return twin


def worst_gap(sequence: Reference, kept: Kept, n_rows: int) -> float:
    """How far a selection among the first n_rows entries is from the best one."""
    scores = all_scores(sequence, n_rows, S)
    gaps = [
        disagreement(row, positions, BUDGET - WINDOW)
        for of_layer, heads in zip(scores, kept)
        for row, positions in zip(of_layer, heads)
    ]
    return max(gaps)


@pytest.mark.parametrize("recall_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("cache", [F32, (True, "q8_0", "q8_0")], ids=["no_fa-f32", "fa-q8_0"])
@pytest.mark.parametrize("kind", ["qwen3", "granite", "gemma2", "gpt_oss", "phi2"])
def test_selections_and_logits(
    zoo: Zoo, new_context: ContextFactory, kind: str, cache: Cache, recall_async: bool
) -> None:
    """Each step equals the masked cache, each selection the reference's; other scores than attention's would show."""
    flash_attn, type_k, type_v = cache
    kv = {"flash_attn": flash_attn, "type_k": type_k, "type_v": type_v, "n_ctx": 512}
    context = new_context(kind, **kv, dge=recall(EVERY, recall_async=recall_async, pooling=S.pooling))
    sequence = Reference(zoo[kind].weights, type_k, type_v, flash_attn)
    tokens = tokens_of(N_PROMPT + 30, 8)
    prefill_and_arm(context, tokens[:N_PROMPT])
    sequence.run(tokens[:N_PROMPT])

    errors, gaps, n_recalls, is_evicted = [], [], 0, False
    wrong: dict[str, float] = {}
    for token in tokens[N_PROMPT:]:
        got = context.decode([token])[0]
        info = context.info()
        if info["n_recalls"] != n_recalls or (info["state"] == driver.STATE_EVICTED and not is_evicted):
            kept = context.kept()
            if is_evicted:
                # a thread selects from the entries of one selection before
                chosen = cut_to(sequence, sequence.n_tokens - (EVERY if recall_async else 0))
                gaps.append(worst_gap(chosen, kept, chosen.n_tokens))
                for name, other in wrong_scores(chosen).items():
                    wrong[name] = max(wrong.get(name, 0.0), worst_gap(other, kept, chosen.n_tokens))
            is_evicted, n_recalls = True, info["n_recalls"]
            sequence.mask_all_but(kept)
        errors.append(nmse(got, sequence.step([token])[0]))

    largest, median = logits_bounds(kind, cache)
    assert max(errors) <= largest and np.median(errors) <= median
    assert n_recalls == len(gaps) == 5 - recall_async and max(gaps) <= tolerance(kind, cache)
    assert wrong and min(wrong.values()) > 2 * tolerance(kind, cache), wrong
