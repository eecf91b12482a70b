"""After an eviction, decoding equals decoding on the full cache with everything masked that was evicted.

The kept positions come from the library, the logits that they must lead to from the NumPy forward pass. Whether they
are the right ones is the business of test_kept_sets.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from reference import driver
from reference.bounds import nmse_bounds
from reference.covering import covering_set, pairs_of
from reference.forward import Reference, nmse
from reference.models import N_VOCAB, ZOO
from reference.policies import Settings, top_positions

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

FACTORS: dict[str, Sequence[Any]] = {
    "policy": ["snapkv", "streamingllm"],
    "scores": ["draft", "policy", "both"],
    "pooling": ["none", "max", "avg"],
    "draft_tokens": [1, 2, 5],
    "budget": [24, 41],
    "model": ["g1", "g2", "g3", "g8", "one"],
    "n_ubatch": [1, 7, 32, 512],
    "n_prompt": [97, 130, 255, 257],
    # flash attention, type of K, type of V; a quantised V needs flash attention
    "cache": [
        (False, "f32", "f32"),
        (True, "f32", "f32"),
        (False, "f16", "f16"),
        (True, "f16", "f16"),
        (False, "bf16", "bf16"),
        (True, "bf16", "bf16"),
        (False, "q8_0", "f16"),
        (True, "q8_0", "q8_0"),
        (False, "q4_0", "f16"),
        (True, "q4_0", "q4_0"),
        (True, "q4_1", "q4_1"),
        (True, "q5_0", "q5_0"),
        (True, "q5_1", "q5_1"),
        (True, "iq4_nl", "iq4_nl"),
        (True, "q8_0", "q4_0"),
    ],
    "batches": ["first", "later"],
}

# tokens per llama_decode() after the eviction: a batch of several is where a causal mask over moved rows goes wrong
BATCHES = {"first": (5,) + (1,) * 20 + (7,), "later": (1,) * 12 + (5,) + (1,) * 15}

CASES = covering_set(FACTORS)

Kept = list[list[npt.NDArray[np.int32]]]


class EvictedRun:
    """One sequence in the library and in the reference, up to the eviction and 32 tokens beyond."""

    def __init__(self, zoo: Zoo, new_context: ContextFactory, case: Mapping[str, Any], seed: int = 0) -> None:
        flash_attn, type_k, type_v = case["cache"]
        names = ("policy", "scores", "pooling", "draft_tokens", "budget")
        self.settings = Settings(**{name: case[name] for name in names})
        self.n_prompt, n_draft = case["n_prompt"], case["draft_tokens"] - 1
        self.n_before = self.n_prompt + n_draft
        self.sizes = BATCHES[case["batches"]]
        rng = np.random.default_rng([seed, self.n_prompt])
        tokens = rng.integers(3, N_VOCAB, self.n_before + sum(self.sizes)).tolist()
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
            n_ubatch=case["n_ubatch"],
            dge=self.settings.as_params(),
        )
        self.before = [self.context.decode(prompt)]
        assert self.context.arm(self.n_prompt) == driver.OK
        self.before += [self.context.decode([token]) for token in draft]
        assert self.context.info()["state"] == driver.STATE_ARMED
        self.after = self._in_batches(lambda part: self.context.decode(part))

        self.reference = Reference(zoo[case["model"]].weights, type_k, type_v, flash_attn)
        self.before_want = [self.reference.run(prompt, n_ubatch=case["n_ubatch"])]
        self.before_want += [self.reference.step([token]) for token in draft]
        self.n_ubatch = case["n_ubatch"]

    def _in_batches(self, decode: Any, n_batches: int | None = None) -> npt.NDArray[Any]:
        starts = np.cumsum((0, *self.sizes[:-1]))
        parts = [self.rest[start : start + n] for start, n in zip(starts, self.sizes)]
        return np.concatenate([decode(part) for part in parts[:n_batches]])

    def want(self, kept: Kept | None, n_batches: int | None = None) -> npt.NDArray[np.float64]:
        """The reference's logits after the eviction, with all rows but these masked (None: nothing masked)."""
        sequence = self.reference.fork()
        if kept is not None:
            sequence.mask_all_but(kept)
        return self._in_batches(lambda part: sequence.run(part, n_ubatch=self.n_ubatch), n_batches)


def test_every_pair_of_settings_occurs() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    for a, values_a in FACTORS.items():
        for b, values_b in FACTORS.items():
            if a < b:
                assert all(((a, x), (b, y)) in covered for x in values_a for y in values_b)


def case_id(case: Mapping[str, Any]) -> str:
    flash_attn, type_k, type_v = case["cache"]
    attention = "fa" if flash_attn else "no_fa"
    numbers = f"k{case['draft_tokens']}-L{case['n_prompt']}-u{case['n_ubatch']}"
    return f"{case['model']}-{attention}-{type_k}-{type_v}-{case['policy']}-{case['scores']}-{numbers}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_eviction_equals_mask(zoo: Zoo, new_context: ContextFactory, case: Mapping[str, Any]) -> None:
    run = EvictedRun(zoo, new_context, case)
    spec = zoo[case["model"]].weights.spec
    budget, n_draft = case["budget"], case["draft_tokens"] - 1

    # proof of action: the eviction was made, once, and kept the rows that it should
    info = run.context.info()
    assert info["state"] == driver.STATE_EVICTED and info["error"] == driver.OK and info["n_evictions"] == 1
    assert (info["n_prompt"], info["n_draft"], info["budget"]) == (run.n_prompt, n_draft, budget)
    assert (info["n_rows_before"], info["n_rows_after"]) == (run.n_before, budget + n_draft)
    assert info["n_rows"] == budget + n_draft + len(run.rest)
    assert info["n_kv"] == 256 < run.n_before + len(run.rest) or run.n_prompt < 256
    assert info["n_layer"] == spec.n_layer and run.context.layers() == list(range(spec.n_layer))
    assert info["boundary"] == run.n_prompt - 1
    assert info["bytes_after"] * info["n_rows_before"] == info["bytes_before"] * info["n_rows_after"] > 0
    assert run.context.pos_max() == run.n_before + len(run.rest) - 1
    kept = run.context.kept()
    assert [len(heads) for heads in kept] == [spec.n_head_kv] * spec.n_layer
    for positions in (positions for heads in kept for positions in heads):
        assert len(positions) == budget + n_draft and (np.diff(positions) > 0).all()
        assert positions[0] >= 0
        assert positions[-(8 + n_draft) :].tolist() == list(range(run.n_prompt - 8, run.n_before))

    flash_attn, type_k, type_v = case["cache"]
    largest, median = nmse_bounds(type_k, type_v, flash_attn, spec.n_layer)
    assert nmse(np.concatenate(run.before), np.concatenate(run.before_want)) <= largest
    errors = [nmse(got, want) for got, want in zip(run.after, run.want(kept))]
    assert max(errors) <= largest
    assert float(np.median(errors)) <= median


def mutants(run: EvictedRun, kept: Kept, n_layer: int, n_head_kv: int) -> dict[str, Kept | None]:
    """Kept sets that are wrong in the ways in which an eviction could be wrong."""

    def changed(il: int, ih: int, positions: npt.ArrayLike) -> Kept:
        copy = [list(heads) for heads in kept]
        copy[il][ih] = np.sort(np.asarray(positions, dtype=np.int32))
        return copy

    wrong: dict[str, Kept | None] = {"nothing was evicted": None}
    n_past = run.n_prompt - run.settings.window
    for il in range(n_layer):
        for ih in range(n_head_kv):
            rows = kept[il][ih]
            # the row that the rest of the sequence attends most, and one that was evicted
            probe = run.reference.q[il][run.n_before - 1].reshape(n_head_kv, -1, run.reference.q[il].shape[2])[ih]
            logits = (probe @ run.reference.k[il][:, ih].T).mean(axis=0)
            best = rows[rows < n_past][np.argmax(logits[rows[rows < n_past]])]
            evicted = np.setdiff1d(np.arange(n_past), rows)
            other = evicted[top_positions(-logits[evicted], 1)[0]]
            wrong[f"one row swapped in layer {il}, head {ih}"] = changed(il, ih, [*rows[rows != best], other])
            wrong[f"window shifted in layer {il}, head {ih}"] = changed(
                il, ih, [*rows[rows < n_past], *(rows[rows >= n_past] - 1)]
            )
        wrong[f"heads exchanged in layer {il}"] = [
            list(reversed(heads)) if i == il else list(heads) for i, heads in enumerate(kept)
        ]
        wrong[f"layer {il} not evicted"] = [
            [np.arange(run.n_before)] * n_head_kv if i == il else list(heads) for i, heads in enumerate(kept)
        ]
    wrong["the newest row lost"] = [[rows[:-1] for rows in heads] for heads in kept]
    return wrong


@pytest.mark.parametrize("cache", [(False, "f32", "f32"), (True, "f16", "f16"), (True, "q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("model", ["one", "g2", "g3"])
def test_a_wrong_eviction_is_seen(
    zoo: Zoo, new_context: ContextFactory, model: str, cache: tuple[bool, str, str]
) -> None:
    """The check above can fail: each wrong kept set moves the logits by far more than its bounds."""
    case = {
        "model": model,
        "cache": cache,
        "policy": "snapkv",
        "scores": "draft",
        "pooling": "none",
        "draft_tokens": 2,
        "budget": 24,
        "n_prompt": 130,
        "n_ubatch": 32,
        "batches": "later",
    }
    run = EvictedRun(zoo, new_context, case)
    kept = run.context.kept()
    spec = ZOO[model]
    assert nmse(run.after, run.want(kept)) <= nmse_bounds(cache[1], cache[2], cache[0], spec.n_layer)[0]
    for name, wrong in mutants(run, kept, spec.n_layer, spec.n_head_kv).items():
        logits = run.want(wrong, 14)  # 12 tokens one by one, 5 at once, one more
        assert nmse(run.after[: len(logits)], logits) > 1e-3, name
