"""Distances between distributions, and how sure a share or a difference is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def log_softmax(logits: npt.ArrayLike) -> Array:
    """Return log probabilities, in float64."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max()
    result: Array = x - math.log(float(np.exp(x).sum()))
    return result


def kl_divergence(log_p: Array, log_q: Array) -> float:
    """Return KL(p || q) in nats, never negative; what p excludes adds nothing."""
    p = np.exp(log_p)
    where = p > 0
    return max(0.0, float(np.sum(p[where] * (log_p[where] - log_q[where]))))


def wilson(hits: int, asked: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson interval of a share, 95 % by default; (0, 1) where nothing was asked."""
    if asked == 0:
        return 0.0, 1.0
    share, z2 = hits / asked, z * z
    centre = (share + z2 / (2 * asked)) / (1 + z2 / asked)
    half = z / (1 + z2 / asked) * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked * asked))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == asked else min(1.0, centre + half)
    return low, high


def paired_bootstrap(
    groups: Sequence[Sequence[float]], n: int = 2000, level: float = 0.95, seed: int = 1
) -> tuple[float, float, float]:
    """Bootstrap the mean over groups of the mean difference within a group.

    Parameters
    ----------
    groups
        For each data set, the differences of two arms, one per prompt. Prompts are drawn again within their set.
    n
        Draws.
    level
        Of the interval.
    seed
        Of the draws.

    Returns
    -------
    mean, low, high
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not arrays:
        raise ValueError("no differences to draw from")
    random = np.random.default_rng(seed)
    draws = np.zeros(n)
    for array in arrays:
        draws += array[random.integers(0, len(array), size=(n, len(array)))].mean(axis=1)
    draws /= len(arrays)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(np.mean([array.mean() for array in arrays])), float(low), float(high)
