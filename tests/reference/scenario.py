"""Steps that many tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import driver
from .driver import Context
from .models import N_VOCAB

# f32 without flash attention: equal up to the order of sums
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
SAME = 1e-9

Kept = list[list[npt.NDArray[np.int32]]]


def tokens_of(n: int, seed: int) -> list[int]:
    """Random tokens without special ones."""
    tokens: list[int] = np.random.default_rng([n, seed]).integers(3, N_VOCAB, n).tolist()
    return tokens


def as_lists(kept: Any) -> list[list[list[int]]]:
    """Kept positions in a form that compares with ==."""
    return [[np.asarray(positions).tolist() for positions in heads] for heads in kept]


def prefill_and_arm(context: Context, prompt: list[int], seq: int = 0) -> None:
    """Evaluate a prompt in an empty sequence and arm it."""
    context.decode(prompt, seq=seq, every=False)
    status = context.arm(len(prompt), seq)
    assert status == driver.OK, context.status(status)


def decode_each(context: Context, tokens: list[int], seq: int = 0) -> driver.Logits:
    """Evaluate tokens one by one."""
    return np.concatenate([context.decode([token], seq=seq) for token in tokens])


def evict_after(context: Context, tokens: list[int], n_prompt: int, n_draft: int, seq: int = 0) -> driver.Logits:
    """Prompt, draft one by one, and the rest one by one; asserts that the eviction was made. Logits of the rest."""
    prefill_and_arm(context, tokens[:n_prompt], seq)
    if n_draft:
        decode_each(context, tokens[n_prompt : n_prompt + n_draft], seq)
    assert context.info(seq)["state"] == driver.STATE_ARMED
    logits = decode_each(context, tokens[n_prompt + n_draft :], seq)
    info = context.info(seq)
    assert info["state"] == driver.STATE_EVICTED, context.status(info["error"])
    assert info["n_rows_before"] == n_prompt + n_draft
    assert info["n_rows_after"] == info["budget"] + n_draft < info["n_rows_before"]
    return logits
