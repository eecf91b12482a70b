"""Evictions by H2O's sums, and what their kept sets must be."""

from __future__ import annotations

from . import driver
from .budgets import kept_gaps
from .driver import Context
from .forward import Reference
from .policies import Settings
from .scenario import Kept, decode_each, prefill_and_arm

S = Settings(policy="h2o", scores="policy", budget=24, draft_tokens=1)
# relative error of a sum, as two rows that the library ranks otherwise than the reference show it
EXACT = 1e-4
# flash attention goes on with f16, so that Q and K of all but the first layer differ
FLASH = 1e-2


def check(reference: Reference, kept: Kept, n_prompt: int, s: Settings, flash_attn: bool = False) -> None:
    """The rows kept are those with the largest sums."""
    gaps = kept_gaps(reference, kept, n_prompt, s)
    assert gaps.max() <= (FLASH if flash_attn else EXACT)
    n_first = len(kept[0])
    assert gaps[:n_first].max() <= EXACT
    assert (gaps == 0).mean() >= 0.5


def evict(context: Context, tokens: list[int], n_prompt: int, seq: int = 0) -> Kept:
    """Prompt, draft one by one, and one more token; asserts the eviction."""
    prefill_and_arm(context, tokens[:n_prompt], seq)
    return finish(context, tokens[n_prompt:], seq)


def finish(context: Context, tokens: list[int], seq: int = 0) -> Kept:
    decode_each(context, tokens, seq)
    info = context.info(seq)
    assert info["state"] == driver.STATE_EVICTED, context.status(info["error"])
    assert info["n_rows_after"] < info["n_rows_before"]
    return context.kept(seq)
