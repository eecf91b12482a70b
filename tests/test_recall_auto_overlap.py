"""Recall when it pays (`recall="auto"`), and choices that a thread makes (`recall_async`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.bounds import nmse_bounds
from reference.forward import Reference, nmse
from reference.models import ZOO
from reference.policies import Settings, attention, disagreement, group_mean, past_scores
from reference.recall import BUDGET, WINDOW, recall
from reference.scenario import decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


@pytest.mark.parametrize("mass", [1e-3, 0.9])
def test_auto(new_context: ContextFactory, mass: float) -> None:
    """It looks after every token; a low threshold fires only after 8, another one when attention moves away, too."""
    context = new_context("g2", dge=recall(-1, recall_mass=mass))
    tokens = tokens_of(400, 14)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:351])
    info = context.info()
    assert info["state"] == driver.STATE_EVICTED and info["n_rows"] <= BUDGET + 9
    if mass < 0.1:
        # the cut at 151 knows no mass, so the first look chooses; then every 8 rows
        assert info["n_recalls"] == 1 + (350 - 152) // 8 and info["n_checks"] == 199 - 24
    else:
        assert 30 < info["n_recalls"] < 190 and info["n_checks"] > 170


@pytest.mark.usefixtures("scored_by")
def test_auto_measures_the_attention_that_is_held(zoo: Zoo, new_context: ContextFactory) -> None:
    """What it acts on is the reference's: just below that fall nothing fires, just above it does."""
    tokens = tokens_of(300, 15)
    reference = Reference(zoo["one"].weights, "f16", "f16")
    reference.run(tokens[:150])
    probe = new_context("one", dge=recall(-1, recall_mass=1e-6))
    prefill_and_arm(probe, tokens[:150])
    decode_each(probe, tokens[150:153])
    assert probe.info()["n_recalls"] == 1 and probe.info()["n_rows_before"] == 152
    kept = probe.kept()
    reference.step(tokens[150:151])
    reference.step(tokens[151:152])

    def held() -> float:
        n = reference.n_tokens
        rows = group_mean(attention(reference.q[0], reference.k[0], n - 1, n)[:, 0], 2)
        return float(np.mean([rows[h][np.concatenate([kept[0][h], np.arange(152, n)])].sum() for h in range(2)]))

    # masked rows matter to what is decoded, but not to the queries of a model of one layer
    first = held()
    falls = []
    for token in tokens[152:159]:  # before it chooses in any case
        reference.step([token])
        falls.append(held() / first)
    assert min(falls) < 0.9
    at = int(np.argmin(falls))
    lowest_before = min([1.0, *falls[:at]])
    assert lowest_before > falls[at] * 1.02
    for factor, n_recalls in ((0.99, 1), (1.01, 2)):
        context = new_context("one", dge=recall(-1, recall_mass=falls[at] * factor))
        prefill_and_arm(context, tokens[:150])
        decode_each(context, tokens[150 : 154 + at])
        assert context.info()["n_recalls"] == n_recalls, (factor, context.info())


@pytest.mark.parametrize(
    "model, flash_attn, elastic, head_budgets",
    [
        ("g1", True, False, "uniform"),
        ("g2", False, True, "adaptive"),
        ("g8", True, True, "uniform"),
    ],
)
def test_overlap_is_one_choice_late(
    zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool, elastic: bool, head_budgets: str
) -> None:
    """A thread chooses from what was there at the choice before; every step still equals the masked cache."""
    every = 5
    dge = recall(every, recall_async=True, head_budgets=head_budgets)
    context = new_context(model, flash_attn=flash_attn, elastic=elastic, dge=dge)
    reference = Reference(zoo[model].weights, "f16", "f16", flash_attn)
    tokens = tokens_of(230, 20)
    prefill_and_arm(context, tokens[:150])
    reference.run(tokens[:150])
    s = Settings(scores="policy", budget=BUDGET, window=WINDOW)
    n_recalls, is_cut, gaps, errors = 0, False, [], []
    for token in tokens[150:]:
        got = context.decode([token])[0]
        info = context.info()
        if info["n_recalls"] != n_recalls or (info["state"] == driver.STATE_EVICTED and not is_cut):
            is_cut = True
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
def test_whatever_ends_a_choice_that_a_thread_makes(new_context: ContextFactory, what: str) -> None:
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
