"""Free cells and the padding behind them may hold anything: attention and scores must never see it.

With flash attention (and fewer than 64 rows in a batch, or a quantised cache) the CPU skips masked cells, so a NaN in
one of them must not show. Everywhere else stock llama.cpp multiplies masked cells by zero, and a NaN there spoils the
result without any eviction (the last test pins that down). There a large finite pattern takes the NaN's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver
from reference.policies import Settings
from reference.scenario import as_lists, decode_each, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

NAN, ALL_ONES = 0x7E00, 0xFFFF  # the second is also a NaN, and -1 as a quantised value
LARGE, LARGE_NEGATIVE = 0x6BCD, 0xEBCD  # +-3994 in f16, +-4.9e26 in bf16 and f32

FLASH = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("bf16", "bf16"), ("iq4_nl", "iq4_nl")]
PLAIN = [("f16", "f16"), ("f32", "f32"), ("bf16", "bf16"), ("q8_0", "f16")]
RUNS = [(True, types, pattern) for types in FLASH for pattern in (NAN, ALL_ONES, LARGE)] + [
    (False, types, pattern) for types in PLAIN for pattern in (LARGE, LARGE_NEGATIVE)
]
MOMENTS = ["before the prompt", "before the draft", "before the eviction", "after the eviction", "later"]
LENGTHS = [97, 131, 255, 256, 257]


def run(
    new_context: ContextFactory, settings: dict[str, Any], n_prompt: int, moment: str | None, pattern: int
) -> tuple[driver.Logits, list[list[list[int]]]]:
    """A prompt, an eviction and 30 tokens, with free cells poisoned at a moment (None: never)."""
    s = Settings(budget=40, draft_tokens=3, scores="both")
    # micro-batches of 50 rows: below the 64 from which on flash attention takes the routine that reads masked cells
    context = new_context("g2", n_ctx=512, n_ubatch=50, **settings, dge=s.as_params())
    tokens = tokens_of(n_prompt + 32, 0)

    def poison(now: str) -> None:
        if now == moment:
            n_free = 512 - context.info()["n_rows"]
            assert context.poison(pattern) == n_free > 0

    poison("before the prompt")
    prefill_and_arm(context, tokens[:n_prompt])
    poison("before the draft")
    logits = [decode_each(context, tokens[n_prompt : n_prompt + 2])]
    poison("before the eviction")
    logits += [context.decode([tokens[n_prompt + 2]])]
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_rows"] == 43
    poison("after the eviction")
    logits += [decode_each(context, tokens[n_prompt + 3 : n_prompt + 14]), context.decode(tokens[n_prompt + 14 :][:5])]
    poison("later")
    logits += [decode_each(context, tokens[n_prompt + 19 :])]
    return np.concatenate(logits), as_lists(context.kept())


@pytest.mark.parametrize("flash_attn, types, pattern", RUNS, ids=str)
def test_poison_is_never_seen(
    new_context: ContextFactory, flash_attn: bool, types: tuple[str, str], pattern: int
) -> None:
    settings = {"flash_attn": flash_attn, "type_k": types[0], "type_v": types[1]}
    n_prompt = LENGTHS[RUNS.index((flash_attn, types, pattern)) % len(LENGTHS)]
    want, kept_want = run(new_context, settings, n_prompt, None, pattern)
    assert np.isfinite(want).all()
    for moment in MOMENTS:
        got, kept = run(new_context, settings, n_prompt, moment, pattern)
        assert np.isfinite(got).all(), moment
        assert np.array_equal(got, want), moment
        assert kept == kept_want, moment


@pytest.mark.parametrize("n_prompt", LENGTHS)
def test_odd_lengths(new_context: ContextFactory, n_prompt: int) -> None:
    settings = {"flash_attn": True, "type_k": "f16", "type_v": "f16"}
    want, kept_want = run(new_context, settings, n_prompt, None, NAN)
    for moment in MOMENTS:
        got, kept = run(new_context, settings, n_prompt, moment, NAN)
        assert np.array_equal(got, want) and kept == kept_want, moment


def test_poison_needs_eviction(new_context: ContextFactory) -> None:
    context = new_context("one")
    assert context.poison(NAN) == driver.ERR_DISABLED


def test_poison_would_be_seen(new_context: ContextFactory) -> None:
    """The pattern does reach the cells: where stock llama.cpp reads masked cells, NaN spoils a full sequence."""
    tokens = tokens_of(50, 1)
    context = new_context("one", flash_attn=False, dge=Settings().as_params())
    context.decode(tokens[:40])
    assert np.isfinite(context.decode(tokens[40:])).all()
    context.poison(NAN)
    assert not np.isfinite(context.decode([10])).all()
