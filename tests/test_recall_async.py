"""Recall with selections that a thread makes (`recall_async`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.bounds import nmse_bounds
from reference.forward import Reference, nmse
from reference.models import ZOO
from reference.policies import Settings, disagreement, past_scores
from reference.recall import BUDGET, WINDOW, recall
from reference.scenario import decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


@pytest.mark.parametrize(
    "model, flash_attn, elastic, head_budgets",
    [
        ("g1", True, False, "uniform"),
        ("g2", False, True, "adaptive"),
        ("g8", True, True, "uniform"),
    ],
)
def test_async_is_one_selection_late(
    zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool, elastic: bool, head_budgets: str
) -> None:
    """A thread selects from the entries of one selection before; every step still equals the masked cache."""
    every = 5
    dge = recall(every, recall_async=True, head_budgets=head_budgets)
    context = new_context(model, flash_attn=flash_attn, elastic=elastic, dge=dge)
    reference = Reference(zoo[model].weights, "f16", "f16", flash_attn)
    tokens = tokens_of(230, 20)
    prefill_and_arm(context, tokens[:150])
    reference.run(tokens[:150])
    s = Settings(scores="policy", budget=BUDGET, window=WINDOW)
    n_recalls, is_evicted, gaps, errors = 0, False, [], []
    for token in tokens[150:]:
        got = context.decode([token])[0]
        info = context.info()
        if info["n_recalls"] != n_recalls or (info["state"] == driver.STATE_EVICTED and not is_evicted):
            is_evicted = True
            kept = context.kept()
            if info["n_recalls"] != n_recalls:
                assert info["n_recalls"] == n_recalls + 1
                chosen_at = reference.n_tokens - every
                for q, k, heads in zip(reference.q, reference.k, kept):
                    for row, positions in zip(past_scores(q[:chosen_at], k[:chosen_at], chosen_at, s), heads):
                        if head_budgets == "uniform":
                            gaps.append(disagreement(row, positions, BUDGET - WINDOW))
                        # all that came since is there
                        assert set(range(chosen_at - WINDOW, reference.n_tokens)) <= set(positions.tolist())
            n_recalls = info["n_recalls"]
            reference.mask_all_but(kept)
        errors.append(nmse(got, reference.step([token])[0]))
        if info["state"] == driver.STATE_EVICTED and head_budgets == "uniform":
            assert info["n_rows"] <= BUDGET + 2 * every + 1
    largest, median = nmse_bounds("f16", "f16", flash_attn, ZOO[model].n_layer)
    assert max(errors) < largest and np.median(errors) < median
    assert n_recalls == (229 - 151) // every - 1
    assert not gaps or (max(gaps) < 2e-2 and np.mean(np.asarray(gaps) == 0.0) > 0.8)


@pytest.mark.parametrize("what", ["clear", "seq_rm", "restore", "enable", "disable", "free", "state", "tail"])
def test_whatever_ends_a_selection_on_a_thread(new_context: ContextFactory, what: str) -> None:
    """No thread reads rows that are gone; what comes next is as in a fresh context."""
    tokens = tokens_of(300, 21)
    dge = recall(3, recall_async=True)
    context = new_context("g2", n_ctx=1024, dge=dge)
    state = context.state()
    for n in range(6):
        prefill_and_arm(context, tokens[:150])
        decode_each(context, tokens[150 : 155 + n])
        assert context.info()["state"] == driver.STATE_EVICTED
        if what == "clear":
            context.clear(False)
        elif what == "seq_rm":
            assert context.seq_rm(0, -1, -1)
        elif what == "restore":
            assert context.restore(1000) == 151 and context.seq_rm(0, -1, -1)
        elif what == "enable":
            context.enable(**dge)
            context.clear(False)
        elif what == "disable":
            context.clear(False)
            assert context.disable() == driver.OK
            context.enable(**dge)
        elif what == "free":
            context.close()
            context = new_context("g2", n_ctx=1024, dge=dge)
        elif what == "state":
            assert context.state_load(state) == len(state)
        elif what == "tail":
            last = context.pos_max()
            assert context.seq_rm(0, last, -1)
            decode_each(context, tokens[200:212])
            context.clear(False)
    fresh = new_context("g2", n_ctx=1024, dge=dge)
    for each in (context, fresh):
        prefill_and_arm(each, tokens[:150])
    assert np.array_equal(decode_each(context, tokens[150:190]), decode_each(fresh, tokens[150:190]))
