"""The reference itself: it must agree with llama.cpp on a full cache before it may judge an evicted one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reference.bounds import nmse_bounds
from reference.budgets import adaptive_caps, pyramid_caps
from reference.forward import Reference, nmse
from reference.models import N_VOCAB
from reference.policies import disagreement, pool, top_positions
from reference.rounding import hadamard, is_quantized, round_to
from test_mask_equivalence import FACTORS

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

MODELS = ["g1", "g2", "g3", "g8", "one"]

CACHES = FACTORS["cache"]  # those that mask equivalence is judged by


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", CACHES, ids=lambda c: f"{'fa' if c[0] else 'no-fa'}-{c[1]}-{c[2]}")
def test_logits_equal_llama_cpp(
    zoo: Zoo, new_context: ContextFactory, model: str, cache: tuple[bool, str, str]
) -> None:
    flash_attn, type_k, type_v = cache
    tokens = np.random.default_rng(1).integers(3, N_VOCAB, 150).tolist()
    context = new_context(model, flash_attn=flash_attn, type_k=type_k, type_v=type_v, n_ubatch=100)
    reference = Reference(zoo[model].weights, type_k, type_v, flash_attn)

    got = [context.decode(tokens[:130])] + [context.decode([token]) for token in tokens[130:]]
    want = [reference.run(tokens[:130], n_ubatch=100)] + [reference.step([token]) for token in tokens[130:]]

    errors = [nmse(a, b) for a, b in zip(np.concatenate(got), np.concatenate(want))]
    largest, median = nmse_bounds(type_k, type_v, flash_attn, zoo[model].weights.spec.n_layer)
    assert max(errors) <= largest
    assert float(np.median(errors)) <= median


def test_mask_hides_rows(zoo: Zoo) -> None:
    """A masked row has no influence at all, and hiding an unmasked one does matter."""
    tokens = np.random.default_rng(2).integers(3, N_VOCAB, 60).tolist()
    full = Reference(zoo["one"].weights)
    full.run(tokens[:50])
    kept = [[np.arange(0, 50, 2), np.arange(25, 50)]]
    logits = []
    for spoil in (False, True):
        evicted = full.fork()
        evicted.mask_all_but(kept)
        if spoil:
            evicted.k[0], evicted.v[0] = evicted.k[0].copy(), evicted.v[0].copy()
            evicted.k[0][1:50:2, 0], evicted.v[0][1:50:2, 0] = 9.0, 9.0
            evicted.k[0][:25, 1], evicted.v[0][:25, 1] = 9.0, 9.0
        logits.append(evicted.run(tokens[50:]))
    assert np.array_equal(logits[0], logits[1])
    assert nmse(full.run(tokens[50:]), logits[0]) > 1e-2


def test_nothing_masked_changes_nothing(zoo: Zoo) -> None:
    tokens = np.random.default_rng(3).integers(3, N_VOCAB, 60).tolist()
    full = Reference(zoo["g2"].weights)
    full.run(tokens[:50])
    same = full.fork()
    same.mask_all_but([[np.arange(50)] * 2] * 3)
    assert np.array_equal(full.run(tokens[50:]), same.run(tokens[50:]))


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"])
def test_rounding_is_a_projection_with_the_right_step(kind: str) -> None:
    rows = np.random.default_rng(4).standard_normal((20, 64))
    once = round_to(rows, kind)
    bits = {"f16": 11, "bf16": 8, "q8_0": 7, "q5_0": 4, "q5_1": 4}.get(kind, 2.8)
    assert 0 < np.abs(once - rows).max() / np.abs(rows).max() <= 2**-bits
    if not is_quantized(kind):
        assert np.array_equal(round_to(once, kind), once)


def test_hadamard_is_its_own_inverse() -> None:
    for n in (64, 128):
        assert np.allclose(hadamard(n) @ hadamard(n), np.eye(n))


def test_ties_go_to_the_later_position_and_nan_loses() -> None:
    assert top_positions([1, 2, 2, 2, 1], 2).tolist() == [2, 3]
    assert top_positions([np.nan, 0.0, -np.inf, 0.0, np.nan], 3).tolist() == [1, 3, 4]
    assert top_positions([0.5, np.nan, 0.5, 0.25], 3).tolist() == [0, 2, 3]


def test_pooling_at_the_edges() -> None:
    row = np.array([[-3.0, -1.0, -2.0, -5.0]])
    assert pool(row, "max", 3).tolist() == [[-1.0, -1.0, -1.0, -2.0]]
    assert pool(row, "avg", 3)[0] == pytest.approx([-4 / 3, -2.0, -8 / 3, -7 / 3])
    assert pool(row, "none", 3) is row


def test_disagreement_tells_rounding_from_error() -> None:
    scores = np.array([0.5, 0.1, 0.3, 0.3, 0.2999999, 0.05])
    assert disagreement(scores, [0, 2, 3], 3) == 0.0
    assert disagreement(scores, [0, 3], 2) == 0.0
    assert disagreement(scores, [0, 2], 2) == float("inf")  # of two equal scores the earlier row
    assert disagreement(scores, [0, 3, 4], 3) == pytest.approx(1e-7 / 0.3, rel=1e-3)
    assert disagreement(scores, [0, 1, 3], 3) > 0.5
    assert disagreement(scores, [0, 3], 3) == float("inf")


def test_published_pyramids() -> None:
    """B = 32, w = 8 in the official code: 47 rows and one less per layer."""
    for n_layer, last in ((28, 20), (32, 16)):
        caps = pyramid_caps(n_layer, 7500, 7492, 24, "reference")
        assert caps == list(range(47, last - 1, -1))
        exact = pyramid_caps(n_layer, 7500, 7492, 24, "exact")
        assert sum(exact) == 24 * n_layer < sum(caps) and exact == sorted(exact, reverse=True)
        assert (exact[0], exact[-1]) == (47, 1)


def test_adaptive_totals() -> None:
    for scores in (np.ones((3, 20)), np.array([[1e30] * 20, [0.0] * 20, [-np.inf] * 20]), np.full((3, 20), np.nan)):
        for n_cap in range(21):
            caps = adaptive_caps(scores, n_cap)
            assert sum(caps) == 3 * n_cap and min(caps) >= 0 and max(caps) <= 20
    # all of the 8 best in the first head: round(0.8 * 8) + 0 rows, then one more for it and one for the next
    assert adaptive_caps(np.array([[9.0] * 10, [0.0] * 10]), 4) == [7, 1]
