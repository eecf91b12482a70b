"""Fixtures: tiny models, written once per session, and contexts on the library under test.

Without the library nothing here can be checked, so the import below fails and with it the whole suite.
"""

from __future__ import annotations

import os

# many tiny products: threads would only get in each other's way
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import llama_dge  # noqa: F401  # first: it decides which libllama llama_cpp loads
from reference.driver import Context, NativeModel
from reference.evicted import N_BEFORE, N_PROMPT, SETTINGS, TOKENS
from reference.instances import Instances, instances
from reference.models import ZOO, TinyModel, make_weights, write_gguf
from reference.scenario import F32, evict_after


@dataclass(frozen=True)
class Loaded:
    """A model of the zoo in the three forms in which tests use it."""

    weights: TinyModel
    path: Path
    native: NativeModel


class Zoo:
    """Loads the models of ZOO when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, Loaded] = {}

    def __getitem__(self, name: str) -> Loaded:
        if name not in self._loaded:
            weights = make_weights(ZOO[name])
            path = write_gguf(weights, self._folder / f"{name}.gguf")
            self._loaded[name] = Loaded(weights, path, NativeModel(path))
        return self._loaded[name]

    def close(self) -> None:
        for loaded in self._loaded.values():
            loaded.native.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    models = Zoo(tmp_path_factory.mktemp("models"))
    yield models
    models.close()


@pytest.fixture
def new_llm(zoo: Zoo) -> Iterator[Instances]:
    """Makes instances of llama_dge.Llama: new_llm(dge={"budget": 32}, model="one", n_ctx=512)."""
    with instances(zoo["g2"].path, zoo) as made:
        yield made


ContextFactory = Callable[..., Context]


@pytest.fixture
def new_context(zoo: Zoo) -> Iterator[ContextFactory]:
    """Makes contexts of a model of the zoo: new_context("g2", flash_attn=True, dge={"budget": 32})."""
    made: list[Context] = []

    def make(model: str, **settings: Any) -> Context:
        made.append(Context(zoo[model].native, **settings))
        return made[-1]

    yield make
    for context in made:
        context.close()


@pytest.fixture(params=["fused", "graph"])
def scored_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Scores by the fused operation, and by the graph that takes its place on a device that does not have it."""
    monkeypatch.setenv("LLAMA_DGE_FUSED", "1" if request.param == "fused" else "0")
    return str(request.param)


@pytest.fixture
def evicted_context(new_context: ContextFactory) -> Callable[..., Context]:
    """Makes a context with an evicted sequence 0 and 5 rows after the eviction."""

    def make(**settings: Any) -> Context:
        context = new_context("g2", **{**F32, "dge": SETTINGS.as_params(), **settings})
        evict_after(context, TOKENS[: N_BEFORE + 5], N_PROMPT, 2)
        return context

    return make
