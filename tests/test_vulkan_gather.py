"""Rows that stay are gathered on the device: the cache is, byte for byte, what the host would have made of it.

Part of `make test-vulkan`. The host's path is proven on the CPU by the other tests, and LLAMA_DGE_GATHER=host takes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of
from test_vulkan import new_context as new_context
from test_vulkan import on_device as on_device

if TYPE_CHECKING:
    from conftest import ContextFactory

pytestmark = pytest.mark.vulkan

CACHES = {
    "f32": (False, "f32", "f32"),
    "f16": (False, "f16", "f16"),
    "f16-fa": (True, "f16", "f16"),
    "q8_0-fa": (True, "q8_0", "q8_0"),
    "q4_0-fa": (True, "q4_0", "q4_0"),
}

EVEN: dict[str, Any] = {"budget": 40, "draft_tokens": 2, "park": "off"}
UNEVEN = {**EVEN, "head_budgets": "adaptive"}


def settings_of(cache: str) -> dict[str, Any]:
    flash_attn, type_k, type_v = CACHES[cache]
    return {"flash_attn": flash_attn, "type_k": type_k, "type_v": type_v}


def cut(context: driver.Context, seq: int = 0) -> tuple[int, int]:
    """Cut now; layers whose rows a device gathered, and all layers."""
    with driver.captured_log() as log:
        status = context.cut(seq)
    assert status == driver.OK, context.status(status)
    info = context.info(seq)
    assert info["state"] == driver.STATE_CUT
    assert info["n_rows_after"] < info["n_rows_before"]
    found = re.search(r"rows of (\d+) of (\d+) layers gathered on a device", "".join(log))
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("dge", [EVEN, UNEVEN, {**UNEVEN, "park": "ram"}], ids=["even", "uneven", "parked"])
@pytest.mark.parametrize("cache, model", [(cache, "g2") for cache in CACHES] + [("f16-fa", "g8"), ("f16", "g1")])
def test_the_bytes_are_the_hosts(
    new_context: ContextFactory,
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    model: str,
    dge: dict[str, Any],
    elastic: bool,
) -> None:
    """Even and uneven counts of heads, with empty rows behind the shorter ones."""
    tokens, results = tokens_of(603 if elastic else 190, 3), {}
    for gather in ("device", "host"):
        monkeypatch.setenv("LLAMA_DGE_GATHER", gather)
        context = new_context(model, elastic=elastic, dge=dge, **settings_of(cache))
        prefill_and_arm(context, tokens[:-1])
        decode_each(context, tokens[-1:])
        n_cells = context.memory_info()["n_cells"]
        n_gathered, n_layers = cut(context)
        assert n_gathered == (n_layers if gather == "device" else 0)
        assert (context.memory_info()["n_cells"] < n_cells) == elastic
        results[gather] = (as_lists(context.kept()), context.state())
    assert results["device"][0] == results["host"][0]
    assert results["device"][1] == results["host"][1]
