"""Budgets per layer and per head: which rows stay, and that attention sees these rows and no others.

Heads that keep fewer rows than the largest one leave cells unused, which a bias must hide. The rows kept are compared
with the NumPy rules of reference/budgets.py, the logits with the NumPy forward pass, masked by the library's kept sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llama_dge.config import POLICIES
from reference import driver
from reference.bounds import nmse_bounds
from reference.budgets import (
    OWN,
    all_scores,
    caps_of,
    choose,
    head_caps,
    kept_gaps,
    kept_uneven,
    layer_caps,
    pyramid_caps,
)
from reference.covering import covering_set, pairs_of
from reference.forward import Reference, evaluated, nmse
from reference.models import ZOO, ModelSpec
from reference.policies import Settings
from reference.rounding import is_quantized
from reference.scenario import F32, Kept, as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

# policy and budgets
RULES = [
    ("snapkv", "uniform"),
    ("snapkv", "adaptive"),
    ("snapkv", "table"),
    ("pyramidkv", "exact"),
    ("pyramidkv", "reference"),
    ("pyramidkv", "adaptive"),
    ("pyramidkv", "reference adaptive"),
    ("pyramidkv", "table"),
    ("h2o", "uniform"),
    ("h2o", "adaptive"),
    ("h2o", "table"),
    ("tova", "uniform"),
    ("tova", "table"),
    ("streamingllm", "uniform"),
    ("streamingllm", "table"),
]


def table_for(spec: ModelSpec, n_prompt: int, least: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each layer and head, unlike everywhere: one head keeps the least, one more than there is."""
    rows = np.random.default_rng([spec.n_layer, spec.n_head_kv]).integers(least, 60, (spec.n_layer, spec.n_head_kv))
    rows[0, 0], rows[-1, -1] = least, n_prompt + 5
    return tuple(tuple(int(n) for n in heads) for heads in rows)


def settings_for(rule: tuple[str, str], spec: ModelSpec, n_prompt: int, **others: Any) -> Settings:
    policy, budgets = rule
    if budgets == "table":
        s = Settings(policy=policy, **others)
        least = s.window + (s.sinks if policy == "streamingllm" else 0)
        others |= {"head_budgets": "table", "table": table_for(spec, n_prompt, least)}
    elif "adaptive" in budgets:
        others["head_budgets"] = "adaptive"
    if "reference" in budgets:
        others["layer_budgets"] = "reference"
    return Settings(policy=policy, **others)


def rule_id(rule: tuple[str, str]) -> str:
    return "-".join(rule).replace(" ", "-")


def is_uneven(kept: Kept) -> bool:
    return len({len(positions) for heads in kept for positions in heads}) > 1


def row_bytes(type_name: str, head_size: int) -> int:
    """Bytes of one row of one head."""
    sizes = {"f32": 4 * head_size, "f16": 2 * head_size, "q8_0": head_size // 32 * 34}
    return sizes[type_name]


# the rules


def test_every_policy_of_the_library_has_a_reference() -> None:
    assert {policy for policy, _ in RULES} == set(OWN) == set(POLICIES)


# kept sets


@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
@pytest.mark.parametrize("rule", RULES, ids=rule_id)
@pytest.mark.parametrize("model", ["g1", "g3", "g8", "deep"])
def test_f32_kept_sets_equal_the_reference(
    zoo: Zoo, new_context: ContextFactory, model: str, rule: tuple[str, str], scores: str
) -> None:
    n_prompt, spec = 133, ZOO[model]
    poolings = {"draft": ("none", "max"), "policy": ("max", "avg"), "both": ("avg", "max")}[scores]
    for budget, draft_tokens, pooling in ((48, 1, poolings[0]), (21, 4, poolings[1])):
        s = settings_for(rule, spec, n_prompt, scores=scores, pooling=pooling, budget=budget, draft_tokens=draft_tokens)
        tokens = tokens_of(n_prompt + draft_tokens, budget)
        context = new_context(model, **F32, dge=s.as_params())
        prefill_and_arm(context, tokens[:n_prompt])
        decode_each(context, tokens[n_prompt:])
        assert context.info()["state"] == driver.STATE_EVICTED, context.status(context.info()["error"])
        kept = context.kept()
        reference = evaluated(zoo[model].weights, tokens[:-1], n_prompt)
        assert as_lists(kept) == as_lists(kept_uneven(reference, n_prompt, s))
        assert is_uneven(kept) == (rule[1] != "uniform")


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0")], ids="-".join)
@pytest.mark.parametrize("rule", [c for c in RULES if c[1] != "uniform" and c[0] != "streamingllm"], ids=rule_id)
def test_kept_sets_with_flash_attention(
    zoo: Zoo, new_context: ContextFactory, rule: tuple[str, str], types: tuple[str, str]
) -> None:
    """Rounding may exchange rows with almost equal scores, and shift a row of an adaptive budget between heads."""
    n_prompt, spec = 133, ZOO["g3"]
    s = settings_for(rule, spec, n_prompt, scores="both", budget=40, draft_tokens=3)
    tokens = tokens_of(n_prompt + 3, 9)
    context = new_context("g3", flash_attn=True, type_k=types[0], type_v=types[1], dge=s.as_params())
    prefill_and_arm(context, tokens[:n_prompt])
    decode_each(context, tokens[n_prompt:])
    kept = context.kept()
    reference = evaluated(zoo["g3"].weights, tokens[:-1], n_prompt, types, flash_attn=True)
    gaps = kept_gaps(reference, kept, n_prompt, s)
    assert gaps.max() <= (2e-2 if is_quantized(types[0]) else 5e-3)
    assert (gaps == 0.0).mean() >= 0.5
    caps = caps_of(kept, s.window + 2)
    want = head_caps(all_scores(reference, n_prompt, s), n_prompt, s)
    assert [sum(heads) for heads in caps] == [sum(heads) for heads in want]
    assert np.abs(np.asarray(caps) - np.asarray(want)).max() <= (2 if s.head_budgets == "adaptive" else 0)


@pytest.mark.parametrize("kind", ["exact", "reference"])
@pytest.mark.parametrize("n_prompt, budget", [(200, 64), (110, 64), (119, 64), (120, 64), (66, 64), (400, 9), (90, 8)])
def test_pyramid_over_seven_layers(new_context: ContextFactory, kind: str, n_prompt: int, budget: int) -> None:
    """Long prompts, prompts with no room for a pyramid (fewer than 2 c rows), and ones with room for half of it."""
    s = Settings(policy="pyramidkv", layer_budgets=kind, budget=budget, draft_tokens=1)
    context = new_context("deep", **F32, dge=s.as_params())
    tokens = tokens_of(n_prompt + 1, 3)
    prefill_and_arm(context, tokens[:n_prompt])
    decode_each(context, tokens[n_prompt:])
    caps = caps_of(context.kept(), s.window)
    assert caps == [[cap] * 2 for cap in pyramid_caps(7, n_prompt, n_prompt - 8, budget - 8, kind)]
    if kind == "exact":
        assert sum(map(sum, caps)) == 2 * 7 * (budget - 8)
    # the cases are those that they should be
    assert is_uneven(context.kept()) == (n_prompt >= 2 * (budget - 8) > 0 and (kind, budget) != ("reference", 9))


# mask equivalence

FACTORS: dict[str, Sequence[Any]] = {
    "rule": RULES,
    "scores": ["draft", "policy", "both"],
    # flash attention, type of K, type of V; a quantised V needs flash attention
    "cache": [
        (False, "f32", "f32"),
        (True, "f32", "f32"),
        (False, "f16", "f16"),
        (True, "f16", "f16"),
        (False, "q8_0", "f16"),
        (True, "q8_0", "q8_0"),
    ],
    "model": ["g1", "g2", "g3", "g8", "one"],
    "draft_tokens": [1, 2, 5],
    "budget": [24, 41],
    "n_prompt": [97, 130, 190],
    "n_ubatch": [1, 7, 32, 512],
    "batches": ["first", "later", "prompt", "long prompt"],
}

# tokens per llama_decode() after the eviction; flash attention takes another routine from 64 on
BATCHES = {
    "first": (5,) + (1,) * 20 + (7,),
    "later": (1,) * 12 + (5,) + (1,) * 15,
    "prompt": (1, 1, 45, 1, 1, 3),
    "long prompt": (1, 70, 1, 1, 1),
    "few": (1, 1, 5, 1, 1, 1),
}


def is_quick(case: Mapping[str, Any]) -> bool:
    # the reference's flash attention goes row by row
    return not (case.get("n_ubatch") == 1 and case.get("n_prompt") == 190)


CASES = covering_set(FACTORS, is_quick)


def case_id(case: Mapping[str, Any]) -> str:
    flash_attn, type_k, type_v = case["cache"]
    numbers = f"k{case['draft_tokens']}-b{case['budget']}-L{case['n_prompt']}-u{case['n_ubatch']}"
    attention = "fa" if flash_attn else "no_fa"
    return f"{rule_id(case['rule'])}-{case['scores']}-{case['model']}-{attention}-{type_k}-{type_v}-{numbers}"


def test_every_pair_of_settings_occurs() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    for a, values_a in FACTORS.items():
        for b, values_b in FACTORS.items():
            if a < b:
                assert all(((a, x), (b, y)) in covered for x in values_a for y in values_b if is_quick({a: x, b: y}))


class EvictedRun:
    """A prompt, its draft, the eviction, and more tokens in the library; the reference up to the eviction."""

    def __init__(self, zoo: Zoo, new_context: ContextFactory, case: Mapping[str, Any]) -> None:
        flash_attn, type_k, type_v = case["cache"]
        self.spec = ZOO[case["model"]]
        self.n_prompt, self.n_ubatch = case["n_prompt"], case["n_ubatch"]
        self.settings = settings_for(
            case["rule"],
            self.spec,
            self.n_prompt,
            pooling="none" if case["scores"] == "draft" else "max",
            **{n: case[n] for n in ("scores", "draft_tokens", "budget")},
        )
        self.n_before = self.n_prompt + case["draft_tokens"] - 1
        self.sizes = BATCHES[case["batches"]]
        tokens = tokens_of(self.n_before + sum(self.sizes), 1)
        prompt, draft, self.rest = (
            tokens[: self.n_prompt],
            tokens[self.n_prompt : self.n_before],
            tokens[self.n_before :],
        )

        self.context = new_context(
            case["model"],
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            n_ubatch=self.n_ubatch,
            dge=self.settings.as_params(),
        )
        prefill_and_arm(self.context, prompt)
        for token in draft:
            self.context.decode([token])
        assert self.context.info()["state"] == driver.STATE_ARMED
        self.after = np.concatenate([self.context.decode(part) for part in self._parts()])

        self.reference = Reference(zoo[case["model"]].weights, type_k, type_v, flash_attn)
        self.reference.run(prompt, n_ubatch=self.n_ubatch)
        for token in draft:
            self.reference.step([token])

    def _parts(self) -> list[list[int]]:
        starts = np.cumsum((0, *self.sizes[:-1]))
        return [self.rest[start : start + n] for start, n in zip(starts, self.sizes)]

    def want(self, sequence: Reference) -> Any:
        return np.concatenate([sequence.run(part, n_ubatch=self.n_ubatch) for part in self._parts()])

    def masked(self, kept: Any) -> Reference:
        sequence = self.reference.fork()
        sequence.mask_all_but(kept)
        return sequence


def check_numbers(run: EvictedRun, case: Mapping[str, Any]) -> None:
    """The eviction happened; rows and bytes are those expected and those reported."""
    s, spec, kept, info = run.settings, run.spec, run.context.kept(), run.context.info()
    assert info["state"] == driver.STATE_EVICTED and info["error"] == driver.OK and info["n_evictions"] == 1
    n_tail = run.n_before - run.n_prompt + s.window
    n_past = run.n_prompt - s.window
    caps = caps_of(kept, n_tail)
    if s.head_budgets == "table":
        assert caps == [[min(n - s.window, n_past) for n in heads] for heads in s.table]
    else:
        per_layer = layer_caps(spec.n_layer, run.n_prompt, s)
        assert [sum(heads) for heads in caps] == [cap * spec.n_head_kv for cap in per_layer]
        if s.head_budgets == "uniform":
            assert caps == [[cap] * spec.n_head_kv for cap in per_layer]
    for positions in (positions for heads in kept for positions in heads):
        assert (np.diff(positions) > 0).all() and positions[0] >= 0
        assert positions[-n_tail:].tolist() == list(range(n_past, run.n_before))

    most = max(map(max, caps)) + n_tail
    assert (info["n_rows_before"], info["n_rows_after"]) == (run.n_before, most)
    assert info["n_rows"] == most + len(run.rest)
    _, type_k, type_v = case["cache"]
    size = row_bytes(type_k, spec.head_size) + row_bytes(type_v, spec.head_size)
    n_heads = spec.n_layer * spec.n_head_kv
    assert info["bytes_before"] == run.n_before * n_heads * size
    assert info["bytes_after"] == most * n_heads * size
    assert info["bytes_kept"] == sum(len(positions) for heads in kept for positions in heads) * size
    assert info["bytes_kept"] < info["bytes_before"]
    assert (info["bytes_kept"] < info["bytes_after"]) == is_uneven(kept)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_eviction_equals_mask(zoo: Zoo, new_context: ContextFactory, case: Mapping[str, Any]) -> None:
    run = EvictedRun(zoo, new_context, case)
    check_numbers(run, case)
    flash_attn, type_k, type_v = case["cache"]
    largest, median = nmse_bounds(type_k, type_v, flash_attn, run.spec.n_layer)
    errors = [nmse(got, want) for got, want in zip(run.after, run.want(run.masked(run.context.kept())))]
    assert max(errors) <= largest
    assert float(np.median(errors)) <= median


def padded(run: EvictedRun) -> dict[str, Reference]:
    """References that are wrong in the ways in which a bias could be wrong."""
    kept = run.context.kept()
    most = max(len(positions) for heads in kept for positions in heads)
    wrong: dict[str, Reference] = {}

    # cells that a head does not use hold zeros: attended, they take a weight of exp(0) from all others
    full = [[[*p, *np.setdiff1d(np.arange(run.n_before), p)[: most - len(p)]] for p in heads] for heads in kept]
    every = range(run.spec.n_layer)
    worst = max(every, key=lambda il: sum(most - len(p) for p in kept[il]))
    for name, layers in {"no bias at all": every, f"no bias in layer {worst}": [worst]}.items():
        sequence = run.masked([full[il] if il in layers else kept[il] for il in every])
        for il in layers:
            sequence.k[il], sequence.v[il] = sequence.k[il].copy(), sequence.v[il].copy()
            for ih, positions in enumerate(kept[il]):
                zero = np.setdiff1d(full[il][ih], positions)
                sequence.k[il][zero, ih], sequence.v[il][zero, ih] = 0.0, 0.0
        wrong[name] = sequence

    n_past = run.n_prompt - run.settings.window
    shorter = [[p[p < n_past] for p in heads] for heads in kept]
    for il, heads in enumerate(shorter):
        few = min(len(p) for p in heads)
        if few < max(len(p) for p in heads):
            rule = [list(of_layer) for of_layer in kept]
            rule[il] = [np.concatenate([p[:few], kept[il][0][kept[il][0] >= n_past]]) for p in heads]
            wrong[f"the shortest head's bias for all heads of layer {il}"] = run.masked(rule)
        shifted = [list(of_layer) for of_layer in kept]
        shifted[il] = [kept[il][ih][kept[il][ih] != p[-1]] if len(p) else kept[il][ih] for ih, p in enumerate(heads)]
        wrong[f"the last past row of each head of layer {il} hidden"] = run.masked(shifted)
    return wrong


@pytest.mark.parametrize("cache", [(False, "f32", "f32"), (True, "f16", "f16"), (True, "q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("rule", [("snapkv", "adaptive"), ("h2o", "table"), ("pyramidkv", "exact")], ids=rule_id)
def test_a_wrong_bias_is_seen(
    zoo: Zoo, new_context: ContextFactory, rule: tuple[str, str], cache: tuple[bool, str, str]
) -> None:
    """The check above can fail: a wrong bias moves the logits beyond its bounds."""
    case = {"rule": rule, "cache": cache, "model": "g2", "scores": "draft", "draft_tokens": 2, "budget": 41}
    run = EvictedRun(zoo, new_context, {**case, "n_prompt": 130, "n_ubatch": 32, "batches": "few"})
    bound = nmse_bounds(cache[1], cache[2], cache[0], run.spec.n_layer)[0]
    assert nmse(run.after, run.want(run.masked(run.context.kept()))) <= bound
    for name, sequence in padded(run).items():
        assert nmse(run.after, run.want(sequence)) > 2 * bound, name


def test_several_threads_and_a_large_cache(zoo: Zoo, new_context: ContextFactory) -> None:
    """From 512 cells on, the CPU's flash attention splits the rows of one token over threads."""
    n_prompt = 700
    s = Settings(pooling="none", head_budgets="adaptive", budget=600, draft_tokens=1)
    tokens = tokens_of(n_prompt + 12, 4)
    context = new_context("g3", flash_attn=True, n_threads=3, dge=s.as_params())
    prefill_and_arm(context, tokens[:n_prompt])
    got = decode_each(context, tokens[n_prompt:])
    kept = context.kept()
    assert context.info()["n_kv"] >= 512 and is_uneven(kept)
    reference = Reference(zoo["g3"].weights, "f16", "f16", True)
    reference.run(tokens[:n_prompt])
    reference.mask_all_but(kept)
    want = np.concatenate([reference.step([token]) for token in tokens[n_prompt:]])
    assert nmse(got, want) <= nmse_bounds("f16", "f16", True, 2)[0]
    # and selected by the rule, up to rounding
    scores = all_scores(
        evaluated(zoo["g3"].weights, tokens[:n_prompt], n_prompt, ("f16", "f16"), flash_attn=True), n_prompt, s
    )
    caps = caps_of(kept, s.window)
    overlap = [
        len(np.intersect1d(positions, rows)) / max(len(rows), 1)
        for of_layer, heads, caps_h in zip(scores, kept, caps)
        for positions, rows in zip(heads, choose(of_layer, caps_h, s))
    ]
    assert min(overlap) >= 0.99
