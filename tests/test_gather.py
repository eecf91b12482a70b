"""Rows that stay are gathered by graphs of ggml's operations: the cache is, byte for byte, what the host makes of it.

With LLAMA_DGE_GATHER=cpu the CPU computes these graphs in a device's place; test_vulkan_gather.py has the same on a
device. The host's path is proven by the other tests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from reference import driver, messages
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

# flash attention, types of K and V. Without flash attention V is transposed
F32, F16, F16_FA = (False, "f32", "f32"), (False, "f16", "f16"), (True, "f16", "f16")
Q8_K, Q8_FA, Q4_FA = (False, "q8_0", "f16"), (True, "q8_0", "q8_0"), (True, "q4_0", "q4_0")

EVEN: dict[str, Any] = {"budget": 40, "draft_tokens": 2, "park": "off"}
UNEVEN = {**EVEN, "head_budgets": "adaptive"}  # heads with fewer rows have empty ones, which are zero
PARKED = {"park": "ram"}


def context_of(
    new_context: ContextFactory, model: str, cache: tuple[bool, str, str], **settings: Any
) -> driver.Context:
    return new_context(model, flash_attn=cache[0], type_k=cache[1], type_v=cache[2], **settings)


def evict(context: driver.Context, seq: int = 0) -> str:
    """Evict now; what was logged."""
    with driver.captured_log() as lines:
        status = context.evict(seq)
    assert status == driver.OK, context.status(status)
    info = context.info(seq)
    assert info["state"] == driver.STATE_EVICTED
    assert info["n_rows_after"] < info["n_rows_before"]
    return "".join(lines)


def gathered(log: str) -> tuple[int, int]:
    """Layers whose rows a device gathered, and all layers."""
    found = re.search(messages.GATHERED, log)
    assert found is not None
    return int(found[1]), int(found[2])


CASES = [
    ("g2", F32, UNEVEN, False),
    ("g3", F16, {**UNEVEN, **PARKED}, False),
    ("g1", F16, EVEN, True),
    ("g8", F16_FA, UNEVEN, True),
    ("g2", Q8_K, UNEVEN, True),
    ("g2", Q8_FA, {**EVEN, **PARKED}, True),
    ("g2", Q4_FA, EVEN, False),
    ("g8", Q8_FA, EVEN, False),  # heads of 34 bytes: always moved by the host
]


@pytest.fixture
def device() -> str:
    """Value of LLAMA_DGE_GATHER; test_vulkan_gather.py has another one."""
    return "cpu"


@pytest.mark.parametrize("by", ["cpu", "device", "host"])
def test_the_switch_takes_a_path(new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setenv("LLAMA_DGE_GATHER", by)
    context = context_of(new_context, "g1", F16, dge=EVEN)
    context.decode(tokens_of(60, 3))
    assert gathered(evict(context)) == (2 if by == "cpu" else 0, 2)


@pytest.mark.parametrize("model, cache, dge, elastic", CASES)
def test_the_bytes_are_the_hosts(
    new_context: ContextFactory,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    model: str,
    cache: tuple[bool, str, str],
    dge: dict[str, Any],
    elastic: bool,
) -> None:
    """An eviction by the device and by the host give the same bytes.

    An elastic cache, which the device copies when it grows and shrinks, holds what one of full size does.
    """
    tokens, results = tokens_of(531 if elastic else 190, 3), []
    for by in (device, "host"):
        monkeypatch.setenv("LLAMA_DGE_GATHER", by)
        context = context_of(new_context, model, cache, elastic=elastic and by == device, dge=dge)
        prefill_and_arm(context, tokens[:-1])
        decode_each(context, tokens[-1:])
        n_cells = context.memory_info()["n_cells"]
        n_gathered, n_layers = gathered(evict(context))
        assert n_gathered == (n_layers if by == device and (model, cache) != ("g8", Q8_FA) else 0)
        assert (context.memory_info()["n_cells"] < n_cells) == (elastic and by == device)
        counts = {len(rows) for heads in context.kept() for rows in heads}
        assert (len(counts) > 1) == ("head_budgets" in dge)
        results.append((as_lists(context.kept()), context.state(), context.info()["n_parked"]))
    assert results[0] == results[1]
    if dge["park"] == "ram":
        assert results[0][2] == len(tokens)


@pytest.mark.parametrize("cache", [F16, F16_FA], ids=str)
def test_cells_out_of_order(
    new_context: ContextFactory, monkeypatch: pytest.MonkeyPatch, device: str, cache: tuple[bool, str, str]
) -> None:
    """Cells of two sequences among each other: rows move in several runs, and those of the other stay."""
    tokens, other, results = tokens_of(120, 3), tokens_of(60, 4), []
    for by in (device, "no memory", "host"):
        monkeypatch.setenv("LLAMA_DGE_GATHER", device if by == "no memory" else by)
        context = context_of(new_context, "g2", cache, n_seq_max=2, dge=UNEVEN)
        for i in range(6):
            context.decode(tokens[20 * i : 20 * (i + 1)], seq=0, every=False)
            context.decode(other[10 * i : 10 * (i + 1)], seq=1, every=False)
        # holes in front, which later rows fill
        assert context.seq_rm(1, 0, -1)
        context.decode(other[:25], seq=1, every=False)
        with driver.failing_alloc(2 if by == "no memory" else 0):  # the first is for the bias
            log = evict(context)
        assert gathered(log) == (3 if by == device else 0, 3)
        assert (messages.NO_MEMORY_FOR_LAYER in log) == (by == "no memory")
        results.append((as_lists(context.kept()), context.state()))
        assert context.pos_max(1) == 24
    assert results[0] == results[2]
    assert results[1] == results[2]
