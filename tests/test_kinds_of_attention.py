"""Kept sets and logits on every kind of attention, against the NumPy reference.

The kinds: attention sinks, soft caps, norms of Q and K, partial RoPE, three-dimensional positions, windows beside full
layers, scales other than 1/sqrt(head_size), biases, heads of which a quantised cache rotates blocks of 64, 128, 256, or
nothing. Each test has a counterpart in which the reference is wrong in one point, and has to disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

import reference.forward
from reference import driver
from reference.budgets import kept_gaps
from reference.forward import Reference, evaluated, nmse
from reference.kind_bounds import F32, Cache, logits_bounds, tolerance
from reference.models import KINDS
from reference.mutants import wrong_last_logits, wrong_models, wrong_scores
from reference.policies import Settings
from reference.scenario import Kept, decode_each, tokens_of
from reference.spec import TinyModel

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

Q8: Cache = (True, "q8_0", "q8_0")
# flash attention, type of K, type of V
CACHES: list[Cache] = [
    F32,
    (True, "f32", "f32"),
    (False, "f16", "f16"),
    (True, "f16", "f16"),
    (False, "q8_0", "f16"),
    Q8,
]
DEEP = "gemma2_27b"  # 46 layers: slow in NumPy
CASES = [(kind, cache) for kind in KINDS for cache in CACHES if kind != DEEP or cache == F32]

N_PROMPT, N_DRAFT, N_REST = 150, 2, 14
TOKENS = tokens_of(N_PROMPT + N_DRAFT + N_REST, 5)
# what ranks: each is a way of its own through the library
SCORES = {
    "draft": Settings(budget=48, draft_tokens=N_DRAFT + 1, pooling="none"),
    "snapkv": Settings(budget=48, draft_tokens=N_DRAFT + 1, scores="policy"),
    "h2o": Settings(policy="h2o", budget=48, draft_tokens=N_DRAFT + 1, scores="policy"),
    "tova": Settings(policy="tova", budget=48, draft_tokens=N_DRAFT + 1, scores="policy"),
}


def case_id(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{'fa' if value[0] else 'no_fa'}-{value[1]}-{value[2]}"


EACH_CASE = pytest.mark.parametrize("kind, cache", CASES, ids=case_id)
EACH_KIND = pytest.mark.parametrize("kind", list(KINDS))


@dataclass
class Run:
    """What the library did: positions kept, logits before the eviction and after it."""

    kept: Kept
    before: npt.NDArray[np.float32]
    after: npt.NDArray[np.float32]


def run(zoo: Zoo, kind: str, cache: Cache, s: Settings, tokens: list[int], n_prompt: int, n_ubatch: int = 512) -> Run:
    """Prompt and draft, which are asserted to lead to an eviction of the full layers; then one by one, and five."""
    flash_attn, type_k, type_v = cache
    context = driver.Context(
        zoo[kind].native,
        n_ctx=512,
        n_ubatch=n_ubatch,
        flash_attn=flash_attn,
        type_k=type_k,
        type_v=type_v,
        dge=s.as_params(),
    )
    n_before, spec = n_prompt + s.draft_tokens - 1, KINDS[kind]
    before = [context.decode(tokens[:n_prompt])]
    assert context.arm(n_prompt) == driver.OK
    before.append(decode_each(context, tokens[n_prompt:n_before]))
    assert context.info()["state"] == driver.STATE_ARMED
    after = [decode_each(context, tokens[n_before:-5]), context.decode(tokens[-5:])]
    info, full = context.info(), [il for il in range(spec.n_layer) if not spec.slides(il)]
    assert info["state"] == driver.STATE_EVICTED, context.status(info["error"])
    assert context.layers() == full and info["n_layer"] == len(full) > 0
    kept = context.kept()
    assert {len(rows) for heads in kept for rows in heads} == {s.budget + s.draft_tokens - 1}
    context.close()
    return Run(kept, np.concatenate(before), np.concatenate(after))


def prompt_of(weights: TinyModel, cache: Cache) -> Reference:
    """The reference with the prompt and the draft."""
    return evaluated(weights, TOKENS[: N_PROMPT + N_DRAFT], N_PROMPT, cache[1:], cache[0])


class Pairs:
    """What reference and library make of the same tokens, each made once."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._references: dict[tuple[str, Cache], Reference] = {}
        self._runs: dict[tuple[str, Cache, str], Run] = {}

    def reference(self, kind: str, cache: Cache) -> Reference:
        if (kind, cache) not in self._references:
            self._references[kind, cache] = prompt_of(self._zoo[kind].weights, cache)
        return self._references[kind, cache]

    def run(self, kind: str, cache: Cache, scores: str) -> Run:
        key = (kind, cache, scores)
        if key not in self._runs:
            self._runs[key] = run(self._zoo, kind, cache, SCORES[scores], TOKENS, N_PROMPT)
        return self._runs[key]


@pytest.fixture(scope="module")
def pairs(zoo: Zoo) -> Pairs:
    return Pairs(zoo)


def gaps_of(sequence: Reference, kept: dict[str, Kept]) -> dict[str, npt.NDArray[np.float64]]:
    """How far the kept sets are from the best entries, per way of scoring, for each layer and head."""
    return {scores: kept_gaps(sequence, kept[scores], N_PROMPT, s) for scores, s in SCORES.items()}


def assert_kept(kind: str, cache: Cache, gaps: dict[str, npt.NDArray[np.float64]]) -> None:
    assert {name for name, gap in gaps.items() if gap.max() > tolerance(kind, cache)} == set(), gaps
    # rounding may exchange neighbours in a head here and there, no more
    assert float(np.mean(np.concatenate(list(gaps.values())) == 0)) >= (0.95 if cache == F32 else 0.5)


def masked_logits(sequence: Reference, kept: Kept | None, rest: list[int]) -> npt.NDArray[np.float64]:
    """Logits of the tokens after the eviction with all other entries masked, or with none masked."""
    twin = sequence.fork()
    if kept is not None:
        twin.mask_all_but(kept)
    return np.concatenate([*(twin.step([token]) for token in rest[:-5]), twin.step(rest[-5:])])


def errors(got: npt.ArrayLike, want: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray([nmse(a, b) for a, b in zip(np.asarray(got), np.asarray(want))])


# the library agrees with the reference


@EACH_CASE
def test_kept_sets(pairs: Pairs, kind: str, cache: Cache) -> None:
    kept = {scores: pairs.run(kind, cache, scores).kept for scores in SCORES}
    assert_kept(kind, cache, gaps_of(pairs.reference(kind, cache), kept))


@pytest.mark.parametrize("cache", [F32, Q8], ids=case_id)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != DEEP])
def test_kept_sets_without_the_fused_operation(
    zoo: Zoo, pairs: Pairs, monkeypatch: pytest.MonkeyPatch, kind: str, cache: Cache
) -> None:
    monkeypatch.setenv("LLAMA_DGE_FUSED", "0")
    tokens = TOKENS[: N_PROMPT + N_DRAFT + 6]
    kept = {scores: run(zoo, kind, cache, s, tokens, N_PROMPT).kept for scores, s in SCORES.items()}
    assert_kept(kind, cache, gaps_of(pairs.reference(kind, cache), kept))


@EACH_CASE
def test_logits(zoo: Zoo, pairs: Pairs, kind: str, cache: Cache) -> None:
    """Before the eviction, and after it with every entry masked that was not kept."""
    made, sequence = pairs.run(kind, cache, "draft"), pairs.reference(kind, cache)
    largest, median = logits_bounds(kind, cache)

    full = Reference(zoo[kind].weights, cache[1], cache[2], cache[0])
    before = errors(made.before[:N_PROMPT], full.run(TOKENS[:N_PROMPT]))
    assert before.max() <= largest and np.median(before) <= median

    rest = TOKENS[N_PROMPT + N_DRAFT :]
    after = errors(made.after, masked_logits(sequence, made.kept, rest))
    assert after.max() <= largest and np.median(after) <= median
    # without the mask, no token's are
    assert errors(made.after, masked_logits(sequence, None, rest)).min() > 10 * median


@pytest.mark.parametrize("flash_attn", [False, True], ids=["no_fa", "fa"])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_prompt_longer_than_the_cache_of_the_windows(zoo: Zoo, kind: str, flash_attn: bool) -> None:
    """Layers with a window reuse their cells, so that these hold other positions than those of the full layers."""
    n_prompt, s, cache = 330, SCORES["draft"], (flash_attn, "f32", "f32")
    tokens = tokens_of(n_prompt + N_DRAFT + N_REST, 6)
    made = run(zoo, kind, cache, s, tokens, n_prompt, n_ubatch=32)
    sequence = Reference(zoo[kind].weights, "f32", "f32", flash_attn)
    sequence.run(tokens[:n_prompt], n_ubatch=32)
    for token in tokens[n_prompt : n_prompt + N_DRAFT]:
        sequence.step([token])
    assert kept_gaps(sequence, made.kept, n_prompt, s).max() <= tolerance(kind, cache)
    after = errors(made.after, masked_logits(sequence, made.kept, tokens[n_prompt + N_DRAFT :]))
    assert after.max() <= logits_bounds(kind, cache)[0] and np.median(after) <= logits_bounds(kind, cache)[1]


@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "granite", "gemma3", "phi2"])
def test_rotation_of_a_quantised_cache(
    zoo: Zoo, new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Blocks of 64, 128, 64 (heads of 192) and 256 entries of K, of 64 of V; nothing in heads of 96.

    The logits of a prompt tell: rounding to 4 bits is another one in a space that is rotated in another way.
    """
    d = KINDS[kind].head_size
    tokens, cache = TOKENS[:100], (True, "q4_0", "q4_0")
    context = new_context(kind, flash_attn=True, type_k="q4_0", type_v="q4_0")
    got = context.decode(tokens)

    def median_error(of_k: int, of_v: int) -> float:
        monkeypatch.setattr(reference.forward, "rotation_size_k", lambda *_: of_k)
        monkeypatch.setattr(reference.forward, "rotation_size_v", lambda *_: of_v)
        return float(np.median(errors(got, Reference(zoo[kind].weights, *cache[1:], True).run(tokens))))

    right = {64: (64, 64), 128: (128, 64), 192: (64, 64), 256: (256, 64), 96: (0, 0)}[d]
    bound = logits_bounds(kind, cache)[1]
    assert median_error(*right) <= bound
    wrong = {(0, right[1]), (right[0], 0), (32, right[1]), (right[0], 32)} - {right}
    assert all(median_error(*sizes) > 5 * bound for sizes in wrong)


# a reference that is wrong in one point does not


def n_disagree(gaps: dict[str, npt.NDArray[np.float64]], least: float) -> int:
    """Ways of scoring whose kept sets show it; after pooling, or from one query, the order may stay the same."""
    return sum(bool(gap.max() > least) for gap in gaps.values())


@EACH_KIND
def test_a_wrong_model_is_seen(zoo: Zoo, pairs: Pairs, kind: str) -> None:
    """Scale, cap, sinks, norms, windows, RoPE, biases: both in the logits and in kept sets."""
    kept = {scores: pairs.run(kind, F32, scores).kept for scores in SCORES}
    rest, after = TOKENS[N_PROMPT + N_DRAFT :][: -N_REST // 2], pairs.run(kind, F32, "draft").after
    wrong, last = wrong_models(zoo[kind].weights), wrong_last_logits(zoo[kind].weights)
    if kind == DEEP:
        # what it has that the other models do not
        wrong, last = {name: model for name, model in wrong.items() if name.startswith("scale")}, {}
    for name, weights in {**wrong, **last}.items():
        sequence = prompt_of(weights, F32)
        logits = masked_logits(sequence, kept["draft"], rest)[:-5]
        assert np.median(errors(after[: len(logits)], logits)) > 10 * logits_bounds(kind, F32)[0], name
        if name not in last:
            gaps = gaps_of(sequence, kept)
            assert n_disagree(gaps, 10 * tolerance(kind, F32)) >= 2, (name, gaps)


@pytest.mark.parametrize("kind, cache", [case for case in CASES if case[1] in (F32, Q8)], ids=case_id)
def test_a_wrong_score_is_seen(pairs: Pairs, kind: str, cache: Cache) -> None:
    """Scores that go another way than attention does: another scale, no cap, no sinks, queries that are not rotated."""
    kept = {scores: pairs.run(kind, cache, scores).kept for scores in SCORES}
    for name, sequence in wrong_scores(pairs.reference(kind, cache)).items():
        gaps = gaps_of(sequence, kept)
        if cache == F32:
            assert n_disagree(gaps, 10 * tolerance(kind, cache)) >= 2, (name, gaps)
        else:
            assert n_disagree(gaps, 2 * tolerance(kind, cache)) >= 1, (name, gaps)
