"""Sessions that are evicted and restored from the host copy, and the same tokens in one that was never evicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import driver
from .driver import Context
from .forward import nmse
from .scenario import as_lists, decode_each, prefill_and_arm, tokens_of

N_PROMPT, N_DRAFT = 131, 2
N_BEFORE = N_PROMPT + N_DRAFT  # entries of the host copy
FIRST = tokens_of(N_BEFORE + 9, 0)
QUESTION = tokens_of(57, 1)
ANSWER = tokens_of(14, 2)
DGE: dict[str, Any] = {"budget": 40, "draft_tokens": N_DRAFT + 1, "scores": "both", "park": "ram"}


def parked(folder: Path, park: str = "disk", **settings: Any) -> dict[str, Any]:
    """Settings with a place to park."""
    place: dict[str, Any] = {"park": park, "park_dir": folder} if park == "disk" else {"park": park}
    return {**DGE, **settings, **place}


def evicted_session(context: Context, seq: int = 0, tokens: list[int] = FIRST) -> driver.Logits:
    """A prompt, a draft, an eviction and an answer."""
    prefill_and_arm(context, tokens[:N_PROMPT], seq)
    decode_each(context, tokens[N_PROMPT:N_BEFORE], seq)
    assert context.info(seq)["state"] == driver.STATE_ARMED
    logits = decode_each(context, tokens[N_BEFORE:], seq)
    info = context.info(seq)
    assert info["state"] == driver.STATE_EVICTED, context.status(info["error"])
    assert info["n_rows_before"] == info["n_parked"] == N_BEFORE > info["n_rows_after"]
    return logits


def full_session(context: Context, n: int, seq: int = 0, tokens: list[int] = FIRST) -> None:
    """The same up to the eviction without one, and back to n rows."""
    context.decode(tokens[:N_PROMPT], seq=seq, every=False)
    decode_each(context, tokens[N_PROMPT:N_BEFORE], seq)
    if n < N_BEFORE:
        assert context.seq_rm(seq, n, -1)


def close(got: driver.Logits, want: driver.Logits) -> bool:
    """The same rows in other cells: equal up to the order of sums, of which rounding to f16 makes more."""
    return nmse(got, want) < 1e-6


def same_from_now_on(context: Context, twin: Context, tokens: list[int], evict: bool, seq: int = 0) -> None:
    """Both evaluate a prompt's rest and an answer, with an eviction in between; all of it is bit for bit the same."""
    n_prompt = context.pos_max(seq) + 1 + len(tokens)
    assert np.array_equal(context.decode(tokens, seq=seq), twin.decode(tokens, seq=seq))
    if evict:
        assert context.arm(n_prompt, seq) == twin.arm(n_prompt, seq) == driver.OK
    assert np.array_equal(decode_each(context, ANSWER, seq), decode_each(twin, ANSWER, seq))
    for each in (context, twin) if evict else ():
        assert each.info(seq)["state"] == driver.STATE_EVICTED, each.status(each.info(seq)["error"])
        assert each.info(seq)["n_rows_before"] == n_prompt + N_DRAFT
    if evict:
        assert as_lists(context.kept(seq)) == as_lists(twin.kept(seq))
        assert context.info(seq)["n_parked"] == n_prompt + N_DRAFT
