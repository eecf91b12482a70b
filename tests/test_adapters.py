"""Entries that were made with other LoRA adapters are neither reused nor restored."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reference import driver
from reference.driver import Context
from reference.models import write_lora
from reference.scenario import evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory, Zoo


DGE: dict[str, Any] = {"budget": 32, "draft_tokens": 4, "window": 8}
TOKENS = tokens_of(400, 0)
N_PROMPT = 120


@pytest.fixture
def switch(zoo: Zoo, tmp_path: Path) -> Callable[[Context, bool], None]:
    """Turns an adapter on and off."""
    path = write_lora(zoo["g2"].weights, tmp_path / "lora.gguf")
    adapter = driver.llama().llama_adapter_lora_init(zoo["g2"].native.handle, str(path).encode())
    assert adapter

    def run(context: Context, on: bool) -> None:
        api = driver.llama()
        adapters = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
        assert api.llama_set_adapters_lora(context.handle, adapters, int(on), (ctypes.c_float * 1)(1.0)) == 0

    return run


def test_entries_of_other_adapters_are_not_restored(
    new_context: ContextFactory, switch: Callable[[Context, bool], None]
) -> None:
    context = new_context("g2", dge={**DGE, "draft_tokens": 1, "park": "ram"})
    switch(context, True)
    prefill_and_arm(context, TOKENS[:N_PROMPT])
    switch(context, False)
    context.decode([5])  # evicts what was made with the adapter
    assert context.info()["state"] == driver.STATE_EVICTED and context.restore(N_PROMPT) == 0

    # with the same one all along they are, and after a restore they still count as its own
    context.clear()
    switch(context, True)
    evict_after(context, TOKENS[:130], N_PROMPT, 0)
    assert context.reuse(150, N_PROMPT) > 0
    switch(context, False)
    assert context.restore(N_PROMPT) == context.reuse(150, N_PROMPT) == 0
    switch(context, True)
    assert context.restore(N_PROMPT) == N_PROMPT
    switch(context, False)
    assert context.reuse(150, N_PROMPT) == 0


def test_adapters_are_noted_by_sequence(new_context: ContextFactory, switch: Callable[[Context, bool], None]) -> None:
    context = new_context("g2", n_seq_max=3, dge={**DGE, "park": "ram"})
    switch(context, True)
    context.decode(TOKENS[:N_PROMPT], seq=0, every=False)
    switch(context, False)
    assert context.reuse(130, N_PROMPT, 0) == 0
    context.decode([7], seq=1)
    assert context.reuse(130, N_PROMPT, 0) == 0 and context.reuse(130, 1, 1) == 1
    context.seq_cp(0, 2)
    assert context.reuse(130, N_PROMPT, 2) == 0
    # some rows with it and some without
    context.decode([8], seq=0)
    switch(context, True)
    assert context.reuse(140, N_PROMPT, 0) == 0
    # a prompt from its start
    context.seq_rm(0, -1, -1)
    context.decode(TOKENS[:N_PROMPT], seq=0, every=False)
    assert context.reuse(130, N_PROMPT, 0) > 0


def test_adapters_are_not_forgotten_while_the_entries_are_there(
    new_context: ContextFactory, switch: Callable[[Context, bool], None]
) -> None:
    def new(n: int) -> Context:
        context = new_context("g2", n_seq_max=2, dge={**DGE, "park": "ram"})
        switch(context, True)
        context.decode(TOKENS[:n], seq=0, every=False)
        switch(context, False)
        assert context.reuse(n + 10, n) == 0
        return context

    context = new(N_PROMPT)
    assert context.arm(N_PROMPT) == driver.OK
    context.enable(**DGE, park="ram")
    assert context.reuse(N_PROMPT + 10, N_PROMPT) == 0

    context = new(N_PROMPT)
    assert context.seq_rm(0, 10, 20)
    context.seq_add(0, 20, -1, -10)
    assert context.reuse(N_PROMPT + 10, N_PROMPT - 10) == 0

    context = new(100)
    context.seq_cp(1, 0)  # of nothing
    assert context.reuse(210, 100) == 0
    context.decode(TOKENS[:200], seq=1, every=False)
    context.seq_cp(1, 0, 100, 200)  # rows without it behind those with it
    assert context.reuse(210, 200) == 0
    switch(context, True)
    assert context.reuse(210, 200) == 0
