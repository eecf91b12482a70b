"""How products of Q and K become weights of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]


def softmax(logits: Float, sinks: npt.ArrayLike | None = None) -> Float:
    """Softmax over the last axis; rows may hold -inf, but not nothing else.

    Parameters
    ----------
    sinks
        One more logit for each row, which takes its share and is not returned; broadcast to the rows.
    """
    top = logits.max(axis=-1)
    more = None if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64), top.shape)
    if more is not None:
        top = np.maximum(top, more)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(axis=-1)
    if more is not None:
        total = total + np.exp(more - top)
    return np.asarray(weights / total[..., None])


@dataclass(frozen=True)
class Softmax:
    """The softmax of one layer.

    Parameters
    ----------
    scale
        Factor of the products; None: 1/sqrt(head_size).
    cap
        Soft cap of the scaled products, cap * tanh(x / cap); 0: none.
    sinks
        A logit per head that takes its share of the weights, or None.
    """

    scale: float | None = None
    cap: float = 0.0
    sinks: Float | None = None

    def logits(self, products: Float, head_size: int) -> Float:
        """Scaled and capped; products may hold -inf where `cap` is 0 only."""
        scaled = products * (1 / np.sqrt(head_size) if self.scale is None else self.scale)
        return np.asarray(self.cap * np.tanh(scaled / self.cap)) if self.cap else scaled

    def weights(self, logits: Float) -> Float:
        """Weights of logits [..., head, query, row]."""
        return softmax(logits, None if self.sinks is None else self.sinks[:, None])


PLAIN = Softmax()
