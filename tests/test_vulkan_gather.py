"""Rows that stay are gathered on the device: the cache is, byte for byte, what the host would have made of it.

Part of `make test-vulkan`. The host's path is proven on the CPU by the other tests, and LLAMA_DGE_GATHER=host takes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import test_lost_sequences
import test_mask_equivalence
from reference import driver
from reference.forward import nmse
from reference.scenario import decode_each, evict_after, tokens_of
from test_gather import EVEN, F16, F16_FA, PARKED, Q8_FA, context_of, evict, gathered
from test_gather import test_cells_out_of_order as test_cells_out_of_order
from test_gather import test_the_bytes_are_the_hosts as test_the_bytes_are_the_hosts
from test_vulkan import BOUNDS, DEVICE, case_of
from test_vulkan import bounds as bounds
from test_vulkan import new_context as new_context
from test_vulkan import on_device as on_device

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo

pytestmark = pytest.mark.vulkan


@pytest.fixture
def device() -> str:
    """Takes the place of the fixture of that name: the imported tests run on the device."""
    return "device"


@pytest.mark.parametrize("by", ["device", "host"])
def test_the_switch_takes_a_path(new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setenv("LLAMA_DGE_GATHER", by)
    context = context_of(new_context, "g1", F16, dge=EVEN)
    context.decode(tokens_of(60, 3))
    assert gathered(evict(context)) == (2 if by == "device" else 0, 2)


def test_a_device_that_fails(new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sequence is empty then, and the other one goes on; more of this on the CPU, in test_lost_sequences.py."""
    monkeypatch.setenv("LLAMA_DGE_GATHER", "device")
    test_lost_sequences.each_layer_fails(new_context, tmp_path, "device", "ram", BOUNDS["f32"][0])


class PartlyOnDevice:
    """Contexts whose last layers are on the device, the first one on the CPU."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        self.open: list[driver.Context | driver.NativeModel] = []

    def __call__(self, name: str, **settings: Any) -> driver.Context:
        model = driver.NativeModel(self.zoo[name].path, n_gpu_layers=self.zoo[name].weights.spec.n_layer)
        with driver.captured_log() as log:
            context = driver.Context(model, **settings)
        self.open += [model, context]
        # proof of action: a part of the cache is here, a part is there
        buffers = re.findall(r"(\S+) KV buffer size", "".join(log))
        assert len(buffers) == 2 and sum(buffer.startswith(DEVICE) for buffer in buffers) == 1, buffers
        return context


@pytest.fixture
def new_split_context(zoo: Zoo) -> Iterator[ContextFactory]:
    contexts = PartlyOnDevice(zoo)
    yield contexts
    for item in reversed(contexts.open):
        item.close()


def test_layers_on_both_sides(new_split_context: ContextFactory, zoo: Zoo) -> None:
    """An eviction of a model that is offloaded in part equals the masked cache."""
    context = context_of(new_split_context, "g2", F16_FA, dge=EVEN)
    context.decode(tokens_of(60, 3))
    assert gathered(evict(context)) == (2, 3)
    test_mask_equivalence.test_eviction_equals_mask(zoo, new_split_context, case_of(F16_FA, model="g2"))


@pytest.mark.parametrize("cache", [F16, Q8_FA], ids=str)
def test_layers_on_both_sides_come_back(new_split_context: ContextFactory, cache: tuple[bool, str, str]) -> None:
    tokens, question = tokens_of(170, 3), tokens_of(6, 4)
    context = context_of(new_split_context, "g2", cache, elastic=True, dge={**EVEN, **PARKED})
    evict_after(context, tokens, 150, 1)
    assert context.restore(150) == 150
    full = context_of(new_split_context, "g2", cache)
    full.decode(tokens[:150])
    assert nmse(decode_each(context, question), decode_each(full, question)) < 1e-10
