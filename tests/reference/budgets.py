"""How many rows each layer and head keeps, H2O's sums, and the kept sets that follow, in NumPy.

Written from the papers and the rules of the documentation, not from the library. `cap` is the number of past rows that
a head keeps; window and draft come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .forward import Reference
from .policies import (
    Float,
    Positions,
    Settings,
    attention,
    disagreement,
    draft_score,
    group_mean,
    pool,
    snapkv_score,
    top_positions,
)
from .softmax import PLAIN, Softmax

Caps = list[list[int]]  # [layer][head]
Kept = Sequence[Sequence[npt.ArrayLike]]


def pyramid_caps(n_layer: int, n_prompt: int, n_past: int, n_cap: int, kind: str) -> list[int]:
    """PyramidKV: a line that falls over the layers, from about 2 n_cap to n_cap / 20."""
    if n_layer == 1 or n_prompt < 2 * n_cap:
        return [n_cap] * n_layer
    if kind == "reference":
        low = n_cap // 20
        high = 2 * n_cap - low
        if high >= n_past:
            high, low = n_past, 2 * n_cap - n_past
        step = (high - low) // (n_layer - 1)
        return [high - step * i for i in range(n_layer)]
    # the line without its floors; whole parts first, then one each to the largest remainders, the first layer of equals
    last = Fraction(n_cap, 20)
    first = 2 * n_cap - last
    if first >= n_past:
        first, last = Fraction(n_past), Fraction(2 * n_cap - n_past)
    line = [first + (last - first) * Fraction(i, n_layer - 1) for i in range(n_layer)]
    caps = [int(x) for x in line]
    by_remainder = sorted(range(n_layer), key=lambda i: (-(line[i] - caps[i]), i))
    for i in by_remainder[: n_cap * n_layer - sum(caps)]:
        caps[i] += 1
    return caps


def adaptive_caps(scores: npt.NDArray[np.float64], n_cap: int) -> list[int]:
    """Ada-KV with alpha = 0.2: four fifths by where the layer's best scores are, a fifth for everyone.

    Rounding is half up. The total is repaired to n_cap * n_head by giving, or taking, one row from head after head, the
    one with the most of the best scores first and of equal ones the first, as long as it has room.

    Parameters
    ----------
    scores
        [n_head_kv, n_past]
    """
    n_head, n_past = scores.shape
    # a later head wins a tie, as does a later row
    best = top_positions(scores.reshape(-1), n_cap * n_head)
    count = np.bincount(best // n_past, minlength=n_head) if n_past else np.zeros(n_head, int)
    caps = [min(int(np.floor(Fraction(4, 5) * int(c) + Fraction(1, 2))) + n_cap // 5, n_past) for c in count]
    turn = sorted(range(n_head), key=lambda ih: (-count[ih], ih))
    missing = n_cap * n_head - sum(caps)
    while missing:
        step = 1 if missing > 0 else -1
        for ih in turn:
            if missing and 0 <= caps[ih] + step <= n_past:
                caps[ih] += step
                missing -= step
    return caps


def h2o_sums(q: Float, k: Float, n_rows: int, softmax: Softmax = PLAIN) -> Float:
    """Attention that each row gets from all rows [0, n_rows), mean over the group: [n_head_kv, n_rows]."""
    return group_mean(attention(q, k, 0, n_rows, softmax).sum(axis=1), k.shape[1])


def snapkv_own(q: Float, k: Float, n_prompt: int, s: Settings, softmax: Softmax = PLAIN) -> Float:
    """SnapKV's and PyramidKV's own score, pooled."""
    return pool(snapkv_score(q, k, n_prompt, s.window, softmax), s.pooling, s.kernel_size)


def h2o_own(q: Float, k: Float, n_prompt: int, s: Settings, softmax: Softmax = PLAIN) -> Float:
    """H2O's own score, never pooled."""
    return h2o_sums(q, k, n_prompt + s.draft_tokens - 1, softmax)[:, : n_prompt - s.window]


def tova_own(q: Float, k: Float, n_prompt: int, s: Settings, softmax: Softmax = PLAIN) -> Float:
    """Attention of the last prompt token, mean over all heads of the layer, the same for each KV head."""
    last = attention(q, k, n_prompt - 1, n_prompt, softmax)[:, 0, : n_prompt - s.window]
    return np.tile(last.mean(axis=0), (k.shape[1], 1))


# the own score of every policy, [n_head_kv, n_past]; StreamingLLM has none, see choose()
OWN: dict[str, Callable[[Float, Float, int, Settings, Softmax], Float]] = {
    "snapkv": snapkv_own,
    "pyramidkv": snapkv_own,
    "streamingllm": snapkv_own,
    "h2o": h2o_own,
    "tova": tova_own,
}


def rank_scores(q: Float, k: Float, n_prompt: int, s: Settings, softmax: Softmax = PLAIN) -> Float:
    """The scores by which the past rows of one layer are ranked, [n_head_kv, n_past], for every policy."""
    own = OWN[s.policy](q, k, n_prompt, s, softmax)
    draft = pool(draft_score(q, k, n_prompt, s.window, s.draft_tokens, softmax), s.pooling, s.kernel_size)
    if s.scores != "both":
        return own if s.scores == "policy" else draft
    return np.asarray(own / own.sum(axis=1, keepdims=True) + draft / draft.sum(axis=1, keepdims=True))


def all_scores(reference: Reference, n_prompt: int, s: Settings) -> list[Float]:
    """rank_scores() of every layer that is evicted."""
    return [
        rank_scores(reference.q[il], reference.k[il], n_prompt, s, reference.softmaxes[il])
        for il in reference.evictable
    ]


def layer_caps(n_layer: int, n_prompt: int, s: Settings) -> list[int]:
    """Past rows per head of each layer, on average over its heads."""
    n_past, n_cap = n_prompt - s.window, s.budget - s.window
    if s.policy == "pyramidkv":
        return pyramid_caps(n_layer, n_prompt, n_past, n_cap, s.layer_budgets)
    return [n_cap] * n_layer


def head_caps(scores: Sequence[Float], n_prompt: int, s: Settings) -> Caps:
    """Past rows that each layer and head keeps."""
    n_past = n_prompt - s.window
    if s.head_budgets == "table":
        return [[min(n - s.window, n_past) for n in heads] for heads in s.table]
    caps = layer_caps(len(scores), n_prompt, s)
    if s.head_budgets == "adaptive":
        return [adaptive_caps(of_layer, cap) for of_layer, cap in zip(scores, caps)]
    return [[cap] * len(of_layer) for of_layer, cap in zip(scores, caps)]


def choose(scores: Float, caps: Sequence[int], s: Settings) -> list[Positions]:
    """Past rows that the heads of one layer keep."""
    if s.policy != "streamingllm":
        return [top_positions(row, cap) for row, cap in zip(scores, caps)]
    n_past = scores.shape[1]
    ends = []
    for cap in caps:
        sinks = min(s.sinks, cap)
        ends.append(np.concatenate([np.arange(sinks), np.arange(n_past - (cap - sinks), n_past)]))
    return ends


def kept_uneven(reference: Reference, n_prompt: int, s: Settings) -> list[list[Positions]]:
    """Positions that each layer and head keeps of a sequence evicted now: past, window, rows after the prompt."""
    scores = all_scores(reference, n_prompt, s)
    rest = np.arange(n_prompt - s.window, reference.n_tokens)
    return [
        [np.concatenate([past, rest]) for past in choose(of_layer, caps, s)]
        for of_layer, caps in zip(scores, head_caps(scores, n_prompt, s))
    ]


def kept_gaps(reference: Reference, kept: Kept, n_prompt: int, s: Settings) -> npt.NDArray[np.float64]:
    """disagreement() of every layer and head, given as many rows as it kept: whether these are the best ones.

    Also inf where window or rows after the prompt are not complete.
    """
    gaps = []
    rest = list(range(n_prompt - s.window, reference.n_tokens))
    for scores, heads in zip(all_scores(reference, n_prompt, s), kept):
        if len(scores) != len(heads):
            raise ValueError(f"{len(heads)} heads, expected {len(scores)}")
        for row, positions in zip(scores, heads):
            rows = np.asarray(positions)
            past = rows[rows < rest[0]]
            complete = rows[rows >= rest[0]].tolist() == rest
            gaps.append(disagreement(row, past, len(past)) if complete and len(past) else 0.0 if complete else np.inf)
    return np.asarray(gaps)


def caps_of(kept: Kept, n_after_past: int) -> Caps:
    """Past rows of each layer and head in kept sets that end with n_after_past others."""
    return [[len(np.asarray(positions)) - n_after_past for positions in heads] for heads in kept]
