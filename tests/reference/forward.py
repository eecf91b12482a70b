"""Forward pass of a tiny model in NumPy, with a KV cache from which rows can be masked per layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .models import TinyModel
from .rounding import (
    QUERY_TYPES,
    block_minima,
    rotate,
    rotation_size_k,
    rotation_size_v,
    round_to,
    sums_error,
)

Float = npt.NDArray[np.float64]
Kept = Sequence[Sequence[npt.ArrayLike]]  # [n_layer][n_head_kv] -> positions

# batches of so many rows go through another flash-attention routine on the CPU, which keeps f32 throughout
FLASH_TILE = 64


@dataclass
class Reference:
    """A sequence that is evaluated step by step.

    Parameters
    ----------
    model
        The weights.
    type_k, type_v
        Cache types, as keys of :data:`reference.rounding.GGML_TYPES`.
    flash_attn
        Whether the library runs with flash attention, which reads an f32 cache as f16.

    Attributes
    ----------
    q, k, v
        Per layer, arrays [position, head, head_size] after RoPE (and after the rotation of a quantised cache); K and V
        rounded to the cache's type, Q as computed.
    """

    model: TinyModel
    type_k: str = "f32"
    type_v: str = "f32"
    flash_attn: bool = False
    q: list[Float] = field(init=False)
    k: list[Float] = field(init=False)
    v: list[Float] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.spec
        self.q = [np.zeros((0, spec.n_head, spec.head_size)) for _ in range(spec.n_layer)]
        self.k = [np.zeros((0, spec.n_head_kv, spec.head_size)) for _ in range(spec.n_layer)]
        self.v = [np.zeros((0, spec.n_head_kv, spec.head_size)) for _ in range(spec.n_layer)]
        self._hidden: list[npt.NDArray[np.bool_]] = [np.zeros((spec.n_head_kv, 0), bool) for _ in range(spec.n_layer)]
        self._minima = [np.zeros((0, spec.n_head_kv, spec.head_size // 32)) for _ in range(spec.n_layer)]
        self._weights = [
            {name: weight.astype(np.float64) for name, weight in layer.items()} for layer in self.model.layers
        ]

    @property
    def n_tokens(self) -> int:
        return int(self.k[0].shape[0])

    def fork(self) -> Reference:
        """An independent copy."""
        twin = Reference(self.model, self.type_k, self.type_v, self.flash_attn)
        twin.q, twin.k, twin.v = list(self.q), list(self.k), list(self.v)
        twin._hidden = list(self._hidden)
        twin._minima = list(self._minima)
        return twin

    def mask_all_but(self, kept: Kept) -> None:
        """Hide every row that exists now, but for those given, from all later steps."""
        n = self.n_tokens
        for il, heads in enumerate(kept):
            hidden = np.ones((len(heads), n), bool)
            for ih, positions in enumerate(heads):
                hidden[ih, np.asarray(positions, dtype=np.int64)] = False
            self._hidden[il] = hidden

    def truncate(self, n: int) -> None:
        """Forget every row from position n on."""
        self.q = [rows[:n] for rows in self.q]
        self.k = [rows[:n] for rows in self.k]
        self.v = [rows[:n] for rows in self.v]
        self._hidden = [hidden[:, :n] for hidden in self._hidden]
        self._minima = [rows[:n] for rows in self._minima]

    def run(self, tokens: Sequence[int], n_ubatch: int = 512, n_batch: int = 512) -> Float:
        """Evaluate tokens in the pieces in which the library does; returns the logits of all of them."""
        pieces = []
        for start in range(0, len(tokens), n_batch):
            batch = tokens[start : start + n_batch]
            pieces += [self.step(batch[i : i + n_ubatch]) for i in range(0, len(batch), n_ubatch)]
        return np.concatenate(pieces)

    def step(self, tokens: Sequence[int]) -> Float:
        """Evaluate tokens at the next positions; returns logits [len(tokens), n_vocab]."""
        spec = self.model.spec
        positions = np.arange(self.n_tokens, self.n_tokens + len(tokens))
        x = self.model.embd[np.asarray(tokens)].astype(np.float64)
        for il, w in enumerate(self._weights):
            h = _rms_norm(x, w["attn_norm"], spec.eps)
            x = x + self._attention(il, h, positions) @ w["attn_output"].T
            h = _rms_norm(x, w["ffn_norm"], spec.eps)
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1.0 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        h = _rms_norm(x, self.model.output_norm.astype(np.float64), spec.eps)
        return np.asarray(h @ self.model.output.astype(np.float64).T)

    def _attention(self, il: int, h: Float, positions: npt.NDArray[np.int64]) -> Float:
        spec, w = self.model.spec, self._weights[il]
        n, d, n_group = len(positions), spec.head_size, spec.n_group
        size_k, size_v = rotation_size_k(d, self.type_k), rotation_size_v(d, self.type_v)

        q = _rope((h @ w["attn_q"].T).reshape(n, spec.n_head, d), positions, spec.rope_base)
        k = _rope((h @ w["attn_k"].T).reshape(n, spec.n_head_kv, d), positions, spec.rope_base)
        v = (h @ w["attn_v"].T).reshape(n, spec.n_head_kv, d)
        q, k, v = rotate(q, size_k), rotate(k, size_k), rotate(v, size_v)
        self.q[il] = np.concatenate([self.q[il], q])
        self.k[il] = np.concatenate([self.k[il], round_to(k, self.type_k)])
        self.v[il] = np.concatenate([self.v[il], round_to(v, self.type_v)])

        keys, values, type_k = self.k[il], self.v[il], self.type_k
        if self.flash_attn and type_k == "f32":
            type_k, keys = "f16", round_to(keys, "f16")
        if self.flash_attn and self.type_v == "f32":
            values = round_to(values, "f16")
        has_minimum = type_k in ("q4_1", "q5_1")
        if has_minimum:
            self._minima[il] = np.concatenate([self._minima[il], block_minima(k)])
        tiled = self.flash_attn and n >= FLASH_TILE and type_k == self.type_v.replace("f32", "f16") == "f16"
        rounded = q if tiled else round_to(q, QUERY_TYPES[type_k])

        total = keys.shape[0]
        logits = np.empty((n, spec.n_head, total))
        hidden = self._hidden[il]
        future = np.arange(total)[None, :] > positions[:, None]
        for head in range(spec.n_head):
            kv = head // n_group
            of_head = rounded[:, head] @ keys[:, kv].T
            if has_minimum:
                of_head += sums_error(q[:, head]) @ self._minima[il][:, kv].T
            of_head[future] = -np.inf
            of_head[:, : hidden.shape[1]][:, hidden[kv]] = -np.inf
            logits[:, head] = of_head / np.sqrt(d)

        if self.flash_attn and not tiled and self.type_v in ("f16", "f32"):
            out = _weighted_sum_f16(logits, np.repeat(values, n_group, axis=1))
        else:
            probs = softmax(logits)
            if not self.flash_attn:
                # the weights are the other operand of the product with V and take the type that goes with V's
                probs = round_to(probs, QUERY_TYPES[self.type_v])
            out = np.stack([probs[:, i] @ values[:, i // n_group] for i in range(spec.n_head)], axis=1)
        return rotate(out, size_v).reshape(n, -1)


def evaluated(
    model: TinyModel,
    tokens: Sequence[int],
    n_prompt: int,
    types: tuple[str, str] = ("f32", "f32"),
    flash_attn: bool = False,
) -> Reference:
    """A sequence with a prompt that was evaluated at once, and the rest of the tokens one by one."""
    reference = Reference(model, *types, flash_attn)
    reference.run(tokens[:n_prompt])
    for token in tokens[n_prompt:]:
        reference.step([token])
    return reference


def _weighted_sum_f16(logits: Float, values: Float) -> Float:
    """Softmax-weighted sum of f16 rows with an f16 accumulator, row by row in cache order.

    Parameters
    ----------
    logits
        [query, head, row], with -inf for rows that are not attended.
    values
        [row, head, head_size].
    """
    n, n_head, _ = logits.shape
    out = np.zeros((n, n_head, values.shape[-1]))
    norm, top = np.zeros((n, n_head)), np.full((n, n_head), -np.inf)
    attended = np.isfinite(logits)
    for j in np.flatnonzero(attended.any(axis=(0, 1))):
        s, seen = logits[:, :, j], attended[:, :, j]
        new_top = np.maximum(top, s)
        with np.errstate(invalid="ignore"):
            shrink = np.where(s > top, np.exp(top - new_top), 1.0)
            weight = np.where(seen, np.exp(s - new_top), 0.0)
        if (shrink != 1.0).any():
            out = (out * shrink[..., None]).astype(np.float16).astype(np.float64)
        out = (out + weight[..., None] * values[j]).astype(np.float16).astype(np.float64)
        norm, top = norm * shrink + weight, new_top
    return np.asarray(out / norm[..., None])


def softmax(logits: Float) -> Float:
    """Softmax over the last axis; rows may hold -inf, but not nothing else."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def nmse(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Largest normalised mean squared error of any row: |got - want|^2 / |want|^2."""
    a, b = np.atleast_2d(np.asarray(got, np.float64)), np.atleast_2d(np.asarray(want, np.float64))
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
    if not np.isfinite(a).all():
        return float("inf")
    return float((((a - b) ** 2).sum(axis=1) / (b**2).sum(axis=1)).max())


def _rms_norm(x: Float, weight: Float, eps: float) -> Float:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def _rope(x: Float, positions: npt.NDArray[np.int64], base: float) -> Float:
    """Rotate the pairs (2i, 2i + 1) of each head; the angles are products in f32, as in the library.

    Functions are taken in f64 and rounded: NumPy's own for f32 are off by several units in the last place on processors
    with AVX-512, and a factor that is off by one turns the angles of late positions by far more.
    """
    d = x.shape[-1]
    factor = np.float32(np.power(np.float64(np.float32(base)), np.float64(np.float32(-2.0 / d))))
    factors = np.full((len(positions), d // 2), factor, dtype=np.float32)
    factors[:, 0] = positions
    angles = np.multiply.accumulate(factors, axis=1)[:, None].astype(np.float64)
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out
