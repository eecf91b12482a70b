"""The parts of a layer besides attention: norms, RoPE and feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .rounding import round_to

Float = npt.NDArray[np.float64]
Weights = Mapping[str, Float]

# gpt-oss: slope of the gate's sigmoid, and where gate and values are clipped
GATE_SLOPE, GATE_LIMIT = 1.702, 7.0


def linear(x: Float, w: Weights, name: str) -> Float:
    """Product with a matrix [out, in], and its bias where there is one."""
    out = x @ w[name].T
    return np.asarray(out + w[f"{name}.bias"] if f"{name}.bias" in w else out)


def rms_norm(x: Float, weight: Float, eps: float) -> Float:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def layer_norm(x: Float, weight: Float, eps: float) -> Float:
    x = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def norm(x: Float, w: Weights, name: str, kind: str, eps: float) -> Float:
    """A norm and its bias where there is one."""
    out = (rms_norm if kind == "rms" else layer_norm)(x, w[name], eps)
    return np.asarray(out + w[f"{name}.bias"] if f"{name}.bias" in w else out)


def rope(x: Float, positions: npt.NDArray[np.int64], base: float, n_rot: int, halves: bool) -> Float:
    """Rotate pairs of the first n_rot entries of each head; the angles are products in f32, as in the library.

    Functions are taken in f64 and rounded: NumPy's own for f32 are off by several units in the last place on processors
    with AVX-512, and a factor that is off by one turns the angles of late positions by far more.
    """
    factor = np.float32(np.power(np.float64(np.float32(base)), np.float64(np.float32(-2.0 / n_rot))))
    factors = np.full((len(positions), n_rot // 2), factor, dtype=np.float32)
    factors[:, 0] = positions
    angles = np.multiply.accumulate(factors, axis=1)[:, None].astype(np.float64)
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    out = x.copy()
    if halves:
        one, two = slice(0, n_rot // 2), slice(n_rot // 2, n_rot)
    else:
        one, two = slice(0, n_rot, 2), slice(1, n_rot, 2)
    out[..., one] = x[..., one] * cos - x[..., two] * sin
    out[..., two] = x[..., one] * sin + x[..., two] * cos
    return out


def sigmoid(x: Float) -> Float:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def gelu(x: Float) -> Float:
    """GELU by tanh; the library on the CPU looks it up by x as f16, between -10 and 10."""
    half = round_to(np.clip(x, -10.0, 10.0), "f16")
    found = round_to(0.5 * half * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * half * (1.0 + 0.044715 * half * half))), "f16")
    return np.where(x <= -10.0, 0.0, np.where(x >= 10.0, x, found))


def feed_forward(h: Float, w: Weights, kind: str) -> Float:
    """One of the networks of :class:`reference.kinds.Kind`."""
    if kind == "experts":
        return _experts(h, w)
    up = linear(h, w, "ffn_up")
    if kind == "plain":
        return linear(gelu(up), w, "ffn_down")
    gate = linear(h, w, "ffn_gate")
    return linear((gate * sigmoid(gate) if kind == "silu" else gelu(gate)) * up, w, "ffn_down")


def _experts(h: Float, w: Weights) -> Float:
    """Every expert takes part, by the softmax of the router; a choice among experts could flip by rounding."""
    router = linear(h, w, "ffn_gate_inp")
    share = np.exp(router - router.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    out = np.zeros_like(h)
    for i in range(share.shape[-1]):
        gate, up = (h @ w[f"{name}_exps"][i].T + w[f"{name}_exps.bias"][i] for name in ("ffn_gate", "ffn_up"))
        gate, up = np.minimum(gate, GATE_LIMIT), np.clip(up, -GATE_LIMIT, GATE_LIMIT)
        hidden = (up + 1.0) * gate * sigmoid(GATE_SLOPE * gate)
        out += share[:, i : i + 1] * (hidden @ w["ffn_down_exps"][i].T + w["ffn_down_exps.bias"][i])
    return out
