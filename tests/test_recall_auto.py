"""Recall when it pays (`recall="auto"`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference import driver
from reference.forward import Reference
from reference.policies import attention, group_mean
from reference.recall import BUDGET, recall
from reference.scenario import decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


@pytest.mark.parametrize("mass", [1e-3, 0.9])
def test_auto(new_context: ContextFactory, mass: float) -> None:
    """It checks after every token; a low threshold fires only after 8, a high one also when attention moves away."""
    context = new_context("g2", dge=recall(-1, recall_mass=mass))
    tokens = tokens_of(400, 14)
    prefill_and_arm(context, tokens[:150])
    decode_each(context, tokens[150:351])
    info = context.info()
    assert info["state"] == driver.STATE_EVICTED and info["n_rows"] <= BUDGET + 9
    if mass < 0.1:
        # the eviction at 151 knows no mass, so the first check selects; then every 8 rows
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
    for token in tokens[152:159]:  # before it selects in any case
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
