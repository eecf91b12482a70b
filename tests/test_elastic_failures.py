"""A cache that grows with use, where memory ends: nothing is lost.

The library's own fault injection lets its n-th allocation fail. A device that fails: test_lost_sequences.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver, messages
from reference.driver import Context, dge_library, failing_alloc
from reference.elastic import DGE, N_CTX, TOKENS, sizes
from reference.scenario import as_lists, decode_each, evict_after, prefill_and_arm

if TYPE_CHECKING:
    from conftest import ContextFactory

UNIFIED = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])


# growth that fails


@pytest.mark.parametrize("later", [False, True], ids=["first resize", "later resize"])
@pytest.mark.parametrize("flash_attn, types", [(False, ("f16", "f16")), (True, ("q8_0", "q4_0"))])
def test_growth_fails_at_each_layer(
    new_context: ContextFactory, later: bool, flash_attn: bool, types: tuple[str, str]
) -> None:
    """llama_decode() returns 1, the log names the missing memory, and nothing is lost."""
    settings: dict[str, Any] = {"n_ctx": N_CTX, "flash_attn": flash_attn, "type_k": types[0], "type_v": types[1]}
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    n = 600 if later else 490
    for each in (context, plain):
        each.decode(TOKENS[:n], every=False)
    old, new = (768, 1280) if later else (512, 768)
    n_batch = 250
    for nth in (1, 2, 3):
        before, state = sizes(context), context.state()
        assert before["n_cells"] == old
        with failing_alloc(nth), driver.captured_log() as log:
            context.decode(TOKENS[n : n + n_batch], check=False)
        assert context.rc == 1
        assert sizes(context)["n_cells"] == old and context.state() == state
        assert context.pos_max() == n - 1
        if nth == 1:
            assert sizes(context) == before
        # one of three layers has no room yet, two, or all
        missing = plain.memory_info()["kv"] / N_CTX * (new - old) / 3 * (4 - nth) / 1024 / 1024
        found = re.search(messages.MISSING, "".join(log))
        assert found and abs(float(found[1]) - missing) <= 0.051, log
        # what needs no more cells goes on
        token = TOKENS[n : n + 1]
        assert np.array_equal(context.decode(token), plain.decode(token))
        n += 1
    assert np.array_equal(context.decode(TOKENS[n : n + n_batch]), plain.decode(TOKENS[n : n + n_batch]))
    assert sizes(context)["n_cells"] == new and sizes(context)["kv"] == sizes(plain)["kv"] * new // N_CTX


def test_a_failed_later_resize_holds_no_more_memory_than_it_has_to(new_context: ContextFactory) -> None:
    """After a growth that failed some buffers may be larger, as reported, until the next resize."""
    context = new_context("deep", n_ctx=N_CTX, elastic=True)
    context.decode(TOKENS[:600], every=False)
    before = sizes(context)
    for _ in range(3):
        with failing_alloc(7):
            context.decode(TOKENS[600:900], check=False)
        assert context.rc == 1
        assert before["kv"] <= sizes(context)["kv"] <= before["kv"] * 1280 // 768
    context.decode(TOKENS[600:900])
    assert sizes(context)["kv"] == before["kv"] * 1280 // 768


@UNIFIED
def test_growth_fails_for_one_of_two(new_context: ContextFactory, kv_unified: bool) -> None:
    settings: dict[str, Any] = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "kv_unified": kv_unified}
    context, plain = new_context("g2", **settings, elastic=True), new_context("g2", **settings)
    for each in (context, plain):
        each.decode(TOKENS[:200], every=False)
        each.decode(TOKENS[:450:2], seq=1, every=False)
    with failing_alloc(2):
        context.decode(TOKENS[:400], seq=1, check=False)
    assert context.rc == 1
    assert context.state() == plain.state()
    for seq in (0, 1):
        assert np.array_equal(context.decode(TOKENS[:20], seq=seq), plain.decode(TOKENS[:20], seq=seq))
    assert np.array_equal(context.decode(TOKENS[:400], seq=1), plain.decode(TOKENS[:400], seq=1))


# an eviction without memory


def failed_eviction(
    new_context: ContextFactory, nth: int, n_prompt: int, settings: dict[str, Any]
) -> tuple[Context, driver.Logits, list[str]]:
    context = new_context("g2", **settings)
    prefill_and_arm(context, TOKENS[:n_prompt])
    decode_each(context, TOKENS[n_prompt : n_prompt + 2])
    with failing_alloc(nth), driver.captured_log() as log:
        logits = context.decode(TOKENS[n_prompt + 2 :][:1])
    return context, logits, log


@pytest.mark.parametrize("park", ["off", "ram", "disk"])
@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
def test_each_allocation_of_an_eviction(
    new_context: ContextFactory, tmp_path: Path, park: str, head_budgets: str
) -> None:
    """No memory for the bias or the host copy: no eviction. None for smaller buffers: evicted in place."""
    n_prompt, n_layer = 700, 3
    dge = {**DGE, "head_budgets": head_budgets, "park": park, "park_dir": tmp_path}
    settings: dict[str, Any] = {"n_ctx": N_CTX, "elastic": True, "dge": dge}
    full, evicted = new_context("g2", n_ctx=N_CTX), new_context("g2", **settings)
    full.decode(TOKENS[:n_prompt], every=False)
    decode_each(full, TOKENS[n_prompt : n_prompt + 2])
    rest = TOKENS[n_prompt + 2 :][:20]
    if_full = decode_each(full, rest)
    if_evicted = evict_after(evicted, TOKENS[: n_prompt + 22], n_prompt, 2) if head_budgets == "uniform" else None
    if if_evicted is None:
        prefill_and_arm(evicted, TOKENS[:n_prompt])
        if_evicted = decode_each(evicted, TOKENS[n_prompt : n_prompt + 22])[2:]
    assert not np.array_equal(if_evicted, if_full) and evicted.memory_info()["n_cells"] in (256, 512)

    expected = ["bias"] * (head_budgets == "adaptive") + ["park"] * n_layer * (park != "off") + ["smaller"] * n_layer
    for nth, kind in enumerate(expected, 1):
        context, first, log = failed_eviction(new_context, nth, n_prompt, settings)
        info = context.info()
        logits = np.concatenate([first, decode_each(context, rest[1:])])
        if kind == "smaller":
            assert info["state"] == driver.STATE_EVICTED and context.memory_info()["n_cells"] == 768, nth
            assert np.array_equal(logits, if_evicted) and as_lists(context.kept()) == as_lists(evicted.kept())
            assert messages.IN_OLD_BUFFERS in "".join(log)
            if park != "off":
                assert context.restore(n_prompt) == n_prompt
        else:
            assert (info["state"], info["error"]) == (driver.STATE_FULL, driver.ERR_MEMORY), (nth, kind)
            assert np.array_equal(logits, if_full), (nth, kind)
            assert messages.KEEPS_FULL in "".join(log)
            assert context.memory_info()["parked"] == 0 and context.memory_info()["n_cells"] == 768
        # whatever failed, the next prompt is evicted
        context.clear()
        prefill_and_arm(context, TOKENS[:n_prompt])
        assert np.array_equal(decode_each(context, TOKENS[n_prompt : n_prompt + 22])[2:], if_evicted)
        context.close()
        assert len(list(tmp_path.iterdir())) == (park == "disk")
    # there are no others
    context, first, _ = failed_eviction(new_context, len(expected) + 1, n_prompt, settings)
    assert context.info()["state"] == driver.STATE_EVICTED and np.array_equal(first, if_evicted[:1])


def test_no_memory_to_enable(new_context: ContextFactory) -> None:
    context, plain = new_context("g2", n_ctx=N_CTX, elastic=True), new_context("g2", n_ctx=N_CTX)
    with failing_alloc(1):
        assert context.enable(check=False, **DGE) == driver.ERR_MEMORY
    assert context.arm(1) == driver.ERR_DISABLED
    assert np.array_equal(context.decode(TOKENS[:700]), plain.decode(TOKENS[:700]))
    with failing_alloc(2):
        assert context.enable(check=False, **{**DGE, "policy": "h2o"}) == driver.ERR_MEMORY
    context.clear()
    context.enable(**DGE)
    evict_after(context, TOKENS[:720], 700, 2)
    assert context.clear() is None and context.disable() == driver.OK
    # elastic, but without eviction
    assert dge_library().llama_dge_is_elastic(context.handle)
    context.clear()
    plain.clear()
    assert np.array_equal(context.decode(TOKENS[:1300]), plain.decode(TOKENS[:1300]))
    assert context.state() == plain.state()
