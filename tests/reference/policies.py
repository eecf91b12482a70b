"""Which rows an eviction keeps, in NumPy, from Q and K after RoPE.

L is the length of the prompt, w the window, P = L - w the number of past rows. Scores are arrays [n_head_kv, P].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .forward import Reference
from .softmax import PLAIN, Softmax

Float = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """What an eviction is asked for; the names are those of llama_dge_params."""

    policy: str = "snapkv"
    scores: str = "draft"
    pooling: str = "max"
    kernel_size: int = 7
    budget: int = 64
    draft_tokens: int = 2
    window: int = 8
    sinks: int = 4
    layer_budgets: str = "exact"
    head_budgets: str = "uniform"
    table: tuple[tuple[int, ...], ...] = ()

    def as_params(self) -> dict[str, Any]:
        params = dict(self.__dict__)
        if not self.table:
            del params["table"]
        return params


def attention(q: Float, k: Float, first: int, stop: int, softmax: Softmax = PLAIN) -> Float:
    """Causal softmax rows of the queries [first, stop) over all keys up to each: [n_head, stop - first, stop]."""
    n_group = q.shape[1] // k.shape[1]
    keys = np.repeat(k[:stop], n_group, axis=1)
    logits = softmax.logits(np.einsum("qhd,khd->hqk", q[first:stop], keys), q.shape[2])
    future = np.arange(stop)[None, :] > np.arange(first, stop)[:, None]
    logits[:, future] = -np.inf
    return softmax.weights(logits)


def group_mean(scores: Float, n_head_kv: int) -> Float:
    """Mean over the query heads that share a KV head: [n_head, P] -> [n_head_kv, P]."""
    return np.asarray(scores.reshape(n_head_kv, -1, scores.shape[-1]).mean(axis=1))


def pool(scores: Float, kind: str, kernel: int) -> Float:
    """1-d pooling of each row with stride 1: "max" never takes padding, "avg" pads with zeros, divisor kernel."""
    if kind == "none":
        return scores
    half, n = kernel // 2, scores.shape[-1]
    padded = np.pad(scores, [(0, 0), (half, half)], constant_values=-np.inf if kind == "max" else 0.0)
    windows = np.stack([padded[:, i : i + n] for i in range(kernel)])
    return np.asarray(windows.max(axis=0) if kind == "max" else windows.sum(axis=0) / kernel)


def snapkv_score(q: Float, k: Float, n_prompt: int, window: int, softmax: Softmax = PLAIN) -> Float:
    """Attention of the window's queries to the past, summed over the window, mean over the group; not pooled."""
    rows = attention(q, k, n_prompt - window, n_prompt, softmax)
    return group_mean(rows[:, :, : n_prompt - window].sum(axis=1), k.shape[1])


def draft_score(q: Float, k: Float, n_prompt: int, window: int, n_draft: int, softmax: Softmax = PLAIN) -> Float:
    """Attention of the queries that produced the first k tokens, mean over them and over the group; not pooled."""
    rows = attention(q, k, n_prompt - 1, n_prompt + n_draft - 1, softmax)
    return group_mean(rows[:, :, : n_prompt - window].mean(axis=1), k.shape[1])


def past_scores(q: Float, k: Float, n_prompt: int, s: Settings) -> Float:
    """The scores by which SnapKV selects rows, for one layer."""
    if s.scores == "policy":
        return pool(snapkv_score(q, k, n_prompt, s.window), s.pooling, s.kernel_size)
    draft = draft_score(q, k, n_prompt, s.window, s.draft_tokens)
    if s.scores == "draft":
        return pool(draft, s.pooling, s.kernel_size)
    own = pool(snapkv_score(q, k, n_prompt, s.window), s.pooling, s.kernel_size)
    draft = pool(draft, s.pooling, s.kernel_size)
    return np.asarray(own / own.sum(axis=1, keepdims=True) + draft / draft.sum(axis=1, keepdims=True))


def top_positions(scores: npt.ArrayLike, count: int) -> Positions:
    """Positions of the best scores, ascending. Equal scores: the later position; NaN and -inf lose to any number."""
    values = np.asarray(scores, dtype=np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    order = np.lexsort((-np.arange(len(values)), -values))
    return np.sort(order[:count]).astype(np.int64)


def kept_rows(q: Float, k: Float, n_prompt: int, n_rows: int, s: Settings) -> list[Positions]:
    """Positions that each KV head of a layer keeps, ascending: rows of the prompt, then all rows after it.

    Parameters
    ----------
    q, k
        [position, head, head_size]
    n_rows
        Rows of the sequence when it is evicted.
    """
    n_head_kv = k.shape[1]
    after = np.arange(n_prompt, n_rows)
    if n_prompt <= s.budget:
        return [np.arange(n_rows)] * n_head_kv
    if s.policy == "streamingllm":
        ends = np.concatenate([np.arange(s.sinks), np.arange(n_prompt - (s.budget - s.sinks), n_prompt), after])
        return [ends] * n_head_kv
    window = np.arange(n_prompt - s.window, n_prompt)
    scores = past_scores(q, k, n_prompt, s)
    return [np.concatenate([top_positions(row, s.budget - s.window), window, after]) for row in scores]


def kept_by(reference: Reference, n_prompt: int, s: Settings) -> list[list[Positions]]:
    """kept_rows() of every layer of a sequence, [layer][head]."""
    return [kept_rows(q, k, n_prompt, reference.n_tokens, s) for q, k in zip(reference.q, reference.k)]


def disagreement(scores: npt.NDArray[np.float64], kept: npt.ArrayLike, count: int) -> float:
    """How wrong a selection of past rows is, for one head.

    Parameters
    ----------
    scores
        The reference's scores of the past rows.
    kept
        Positions that were kept; those beyond the past are ignored.

    Returns
    -------
    float
        0 for the reference's own selection. Otherwise the largest relative difference between the scores of a row that
        was evicted and one that was kept instead: small where almost equal rows are exchanged. inf for a wrong
        number of rows, and where of exactly equal scores an earlier position was kept instead of a later one.
    """
    chosen = np.asarray(kept, dtype=np.int64)
    chosen = chosen[chosen < len(scores)]
    if len(np.unique(chosen)) != count or len(chosen) != count:
        return float("inf")
    inside = np.zeros(len(scores), bool)
    inside[chosen] = True
    for value in np.unique(scores[inside]):
        equal = inside[scores == value]
        if (np.diff(equal.astype(int)) < 0).any():
            return float("inf")
    wanted = np.zeros(len(scores), bool)
    wanted[top_positions(scores, count)] = True
    missing, extra = scores[wanted & ~inside], scores[inside & ~wanted]
    return float((missing.max() - extra.min()) / missing.max()) if len(missing) else 0.0
