"""Evictions with model and cache on a Vulkan device: `make test-vulkan`. Mesa's driver for the CPU will do.

With LLAMA_DGE_TEST_DEVICE=CUDA and a library that is built for it, the same on another device (scripts/gpu_check.sh).
The tests of the CPU that are imported here run once more, with contexts whose layers and cache are on the device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import test_mask_equivalence
import test_recall
from reference import driver
from reference.forward import nmse
from reference.instances import Instances
from reference.policies import Settings
from reference.scenario import decode_each, evict_after, prefill_and_arm, tokens_of
from test_kept_sets import test_draft_scores_follow_the_draft as test_draft_scores_follow_the_draft
from test_mask_equivalence import EvictedRun, mutants
from test_recall import test_a_budget_for_all_rows_is_the_full_cache as test_a_budget_for_all_rows_is_the_full_cache

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

pytestmark = pytest.mark.vulkan

DEVICE = os.environ.get("LLAMA_DGE_TEST_DEVICE", "Vulkan")

# NMSE of logits, largest and median: products of f16 and of quantised types are computed otherwise than on the CPU, and
# values are rounded to q8_0 otherwise (4e-4 and 1.4e-4 were measured). What rounding to q4_0 otherwise does (0.022
# before any eviction) is more than a wrong row does: there test_vulkan_gather.py compares bytes
BOUNDS = {"f32": (5e-5, 5e-6), "f16": (1e-4, 1e-5), "q8_0": (1e-3, 3e-4)}

CACHES = [(False, "f32", "f32"), (False, "f16", "f16"), (True, "f16", "f16"), (True, "q8_0", "q8_0")]


class OnDevice:
    """The models of the zoo with all layers on the device; each is loaded when it is first asked for."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        self.models: dict[str, driver.NativeModel] = {}

    def __getitem__(self, name: str) -> driver.NativeModel:
        if name not in self.models:
            path = self.zoo[name].path  # which also loads it on the CPU
            with driver.captured_log() as log:
                self.models[name] = driver.NativeModel(path, n_gpu_layers=99)
            offloaded = re.search(r"offloaded (\d+)/(\d+) layers to GPU", "".join(log))
            assert offloaded is not None, f"no {DEVICE} device: run these tests by `make test-vulkan`"
            assert offloaded[1] == offloaded[2]
        return self.models[name]


@pytest.fixture(scope="module")
def on_device(zoo: Zoo) -> Iterator[OnDevice]:
    models = OnDevice(zoo)
    yield models
    for model in models.models.values():
        model.close()


@pytest.fixture
def new_context(on_device: OnDevice) -> Iterator[ContextFactory]:
    """Takes the place of the fixture of that name."""
    made: list[driver.Context] = []

    def make(model: str, **settings: Any) -> driver.Context:
        native = on_device[model]  # also captures what is logged
        with driver.captured_log() as log:
            made.append(driver.Context(native, **settings))
        # proof of action: no part of the cache is in host memory
        buffers = re.findall(r"(\S+) KV buffer size", "".join(log))
        assert buffers and all(name.startswith(DEVICE) for name in buffers), buffers
        return made[-1]

    yield make
    for context in made:
        context.close()


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of this device in the imported tests."""

    def nmse_bounds(type_k: str, type_v: str, *_: Any) -> tuple[float, float]:
        return max(BOUNDS[type_k], BOUNDS[type_v])

    for module in (test_mask_equivalence, test_recall):
        monkeypatch.setattr(module, "nmse_bounds", nmse_bounds)


def case_of(cache: tuple[bool, str, str], **settings: Any) -> dict[str, Any]:
    case: dict[str, Any] = {"policy": "snapkv", "scores": "both", "pooling": "max"}
    case.update(draft_tokens=2, budget=41, model="g3", n_ubatch=512, n_prompt=257, batches="later", cache=cache)
    return {**case, **settings}


CASES = [
    *(case_of(cache) for cache in CACHES),
    case_of(CACHES[2], model="g1", scores="draft", draft_tokens=5, n_ubatch=32, batches="first"),
    case_of(CACHES[3], model="g2", scores="policy", pooling="avg", draft_tokens=1),
    case_of(CACHES[1], model="g8", pooling="avg"),
    case_of(CACHES[2], policy="streamingllm"),
]


@pytest.mark.parametrize("case", CASES, ids=test_mask_equivalence.case_id)
def test_eviction_equals_mask(zoo: Zoo, new_context: ContextFactory, case: Mapping[str, Any]) -> None:
    test_mask_equivalence.test_eviction_equals_mask(zoo, new_context, case)


@pytest.mark.parametrize("cache", CACHES[1:], ids=str)
def test_a_wrong_eviction_is_seen(zoo: Zoo, new_context: ContextFactory, cache: tuple[bool, str, str]) -> None:
    """The bounds of this device are wide, and yet no wrong set of rows is within them."""
    run = EvictedRun(zoo, new_context, case_of(cache))
    kept = run.context.kept()
    for name, wrong in mutants(run, kept, len(kept), len(kept[0])).items():
        worst = max(nmse(got, want) for got, want in zip(run.after, run.want(wrong)))
        assert worst > BOUNDS[cache[1]][0], name


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("scores", ["draft", "policy", "both"])
def test_kept_sets_equal_the_cpus(
    zoo: Zoo, new_context: ContextFactory, cache: tuple[bool, str, str], scores: str
) -> None:
    """The same rows, but for a few that score almost the same."""
    s = Settings(scores=scores, draft_tokens=3)
    n_prompt, tokens = 203, tokens_of(206, 1)
    settings = {"flash_attn": cache[0], "type_k": cache[1], "type_v": cache[2], "dge": s.as_params()}
    cpu = driver.Context(zoo["g3"].native, **settings)
    device = new_context("g3", **settings)
    sets = []
    for context in (cpu, device):
        evict_after(context, tokens, n_prompt, 2)
        sets.append([set(rows.tolist()) for heads in context.kept() for rows in heads])
    cpu.close()
    differ = [len(a - b) for a, b in zip(*sets)]
    assert max(differ) <= 1, differ
    assert sum(differ) <= len(differ) // 4 or cache[1] == "q8_0"


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("cache", CACHES[1:], ids=str)
def test_a_restored_cache_is_the_full_one(
    new_context: ContextFactory, cache: tuple[bool, str, str], elastic: bool
) -> None:
    """Rows that left the device are restored bit for bit."""
    settings = {"flash_attn": cache[0], "type_k": cache[1], "type_v": cache[2], "elastic": elastic}
    tokens, question = tokens_of(170, 3), tokens_of(12, 4)
    context = new_context("g2", **settings, dge={"budget": 40, "draft_tokens": 2, "park": "ram"})
    evicted = evict_after(context, tokens, 150, 1)
    assert context.info()["n_parked"] == 151
    assert context.restore(150) == 150
    full = new_context("g2", **settings)
    full.decode(tokens[:150])
    want = decode_each(full, question)
    got = decode_each(context, question)
    assert nmse(got, want) < 1e-10
    # the check can fail: what an evicted cache answers is further away
    full = new_context("g2", **settings)
    full.decode(tokens[:151])
    assert nmse(evicted[0], decode_each(full, tokens[151:])[0]) > 1e-6


@pytest.mark.parametrize("model, flash_attn, kind", [("g2", True, "f16"), ("g3", False, "f16"), ("g2", True, "q8_0")])
def test_recall_equals_the_masked_cache(
    zoo: Zoo, new_context: ContextFactory, model: str, flash_attn: bool, kind: str
) -> None:
    test_recall.test_every_step_equals_the_masked_cache(
        zoo, new_context, model, flash_attn, kind, "snapkv", "uniform", 4, False
    )


def test_h2o_sums_on_the_device(zoo: Zoo, new_context: ContextFactory) -> None:
    """Column sums of the whole prompt, accumulated over micro-batches, select the CPU's rows."""
    dge = {"budget": 40, "policy": "h2o", "scores": "policy", "draft_tokens": 1}
    tokens = tokens_of(180, 5)
    cpu = driver.Context(zoo["g3"].native, n_ubatch=32, dge=dge)
    sets = []
    for context in (cpu, new_context("g3", n_ubatch=32, dge=dge)):
        prefill_and_arm(context, tokens[:150])
        decode_each(context, tokens[150:])
        assert context.info()["state"] == driver.STATE_EVICTED
        sets.append([set(rows.tolist()) for heads in context.kept() for rows in heads])
    cpu.close()
    assert sum(len(a - b) for a, b in zip(*sets)) <= 2
    assert np.isfinite(decode_each(context, tokens_of(3, 6))).all()


@pytest.mark.parametrize("cache", [(False, "f16"), (True, "f16"), (True, "q8_0")], ids=str)
def test_a_whole_model(new_llm: Instances, cache: tuple[bool, str]) -> None:
    """SmolLM2-135M, all layers on the device: the rows and the answer are those of the CPU."""
    from llama_dge.models import fetch, read_manifest

    path = fetch(read_manifest()["smollm2-135m"])
    kind = driver.GGML_TYPES[cache[1]]
    prompt = "The capital of Italy is Rome. " + "Grass is green and the sky is blue. " * 8 + "The capital of Italy is"
    answers, kept = [], []
    for layers in (0, 99):
        llm = new_llm(
            {"budget": 40, "draft_tokens": 3},
            path,
            n_ctx=512,
            n_gpu_layers=layers,
            flash_attn=cache[0],
            type_k=kind,
            type_v=kind if cache[0] else driver.GGML_TYPES["f16"],
        )
        answers.append(llm(prompt, max_tokens=8, temperature=0)["choices"][0]["text"])
        assert llm.dge_stats.rows_after < llm.dge_stats.rows_before, llm.dge_stats.error
        kept.append({(il, ih, p) for il in range(30) for ih in range(3) for p in llm.dge_kept(il, ih)})
        llm.close()
    assert answers[0] == answers[1] and "Rome" in answers[0]
    share = len(kept[0] & kept[1]) / len(kept[0])
    assert share > (0.95 if cache[1] == "q8_0" else 0.98), share
