"""Forward pass of a tiny model in NumPy, with a KV cache from which rows can be masked per layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .layers import feed_forward, layer_norm, linear, norm, rms_norm, rope
from .rounding import (
    QUERY_TYPES,
    block_minima,
    rotate,
    rotation_size_k,
    rotation_size_v,
    round_to,
    sums_error,
)
from .softmax import Softmax, softmax
from .spec import TinyModel

Float = npt.NDArray[np.float64]
Kept = Sequence[Sequence[npt.ArrayLike]]  # [layer that can be evicted][n_head_kv] -> positions

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
    softmaxes
        How the products of q and k become weights, per layer.
    evictable
        Layers that an eviction evicts: those that attend to all positions, not a window of them.
    """

    model: TinyModel
    type_k: str = "f32"
    type_v: str = "f32"
    flash_attn: bool = False
    q: list[Float] = field(init=False)
    k: list[Float] = field(init=False)
    v: list[Float] = field(init=False)
    softmaxes: list[Softmax] = field(init=False)
    evictable: list[int] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.spec
        self.evictable = [il for il in range(spec.n_layer) if not spec.slides(il)]
        self.q = [np.zeros((0, spec.n_head, spec.head_size)) for _ in range(spec.n_layer)]
        self.k = [np.zeros((0, spec.n_head_kv, spec.head_size)) for _ in range(spec.n_layer)]
        self.v = [np.zeros((0, spec.n_head_kv, spec.head_size)) for _ in range(spec.n_layer)]
        self._hidden: list[npt.NDArray[np.bool_]] = [np.zeros((spec.n_head_kv, 0), bool) for _ in range(spec.n_layer)]
        self._minima = [np.zeros((0, spec.n_head_kv, spec.head_size // 32)) for _ in range(spec.n_layer)]
        self._weights = [
            {name: weight.astype(np.float64) for name, weight in layer.items()} for layer in self.model.layers
        ]
        scale = 1.0 if spec.kind.scale_query else spec.scale
        self.softmaxes = [Softmax(scale, spec.cap, w.get("attn_sinks")) for w in self._weights]

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
        """Hide every row that exists now, but for those given, from all later steps of the layers that are evicted."""
        n = self.n_tokens
        if len(kept) != len(self.evictable):
            raise ValueError(f"kept sets of {len(kept)} layers, expected {len(self.evictable)}")
        for il, heads in zip(self.evictable, kept):
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
        model, spec, kind = self.model, self.model.spec, self.model.spec.kind
        positions = np.arange(self.n_tokens, self.n_tokens + len(tokens))
        x = model.embd[np.asarray(tokens)].astype(np.float64) * spec.embd_scale
        for il, w in enumerate(self._weights):
            h = norm(x, w, "attn_norm", kind.norm, spec.eps)
            added = linear(self._attention(il, h, positions), w, "attn_output")
            if kind.post_norms:
                added = norm(added, w, "post_attention_norm", kind.norm, spec.eps)
            if kind.parallel:
                x = x + added + feed_forward(h, w, kind.feed_forward)
                continue
            x = x + added * spec.residual_scale
            added = feed_forward(norm(x, w, "ffn_norm", kind.norm, spec.eps), w, kind.feed_forward)
            if kind.post_norms:
                added = norm(added, w, "post_ffw_norm", kind.norm, spec.eps)
            x = x + added * spec.residual_scale
        last = {name: weight.astype(np.float64) for name, weight in model.last.items()}
        logits = linear(norm(x, last, "output_norm", kind.norm, spec.eps), last, "output") / spec.logit_scale
        return np.asarray(spec.final_cap * np.tanh(logits / spec.final_cap) if spec.final_cap else logits)

    def _queries_and_keys(self, il: int, h: Float, positions: npt.NDArray[np.int64]) -> tuple[Float, Float]:
        """Q and K of one layer, [position, head, head_size], after norms and RoPE."""
        spec, w = self.model.spec, self._weights[il]
        made = []
        for name, n_head in (("attn_q", spec.n_head), ("attn_k", spec.n_head_kv)):
            heads = linear(h, w, name).reshape(len(positions), n_head, spec.head_size)
            if spec.kind.head_norm:
                of_head = rms_norm if spec.kind.head_norm == "rms" else layer_norm
                heads = of_head(heads, w[f"{name}_norm"], spec.eps)
            made.append(rope(heads, positions, spec.rope_base_of(il), spec.rotated, spec.kind.halves))
        if spec.kind.scale_query:
            made[0] = made[0] * spec.query_scale
        return made[0], made[1]

    def _attention(self, il: int, h: Float, positions: npt.NDArray[np.int64]) -> Float:
        spec, w = self.model.spec, self._weights[il]
        n, d, n_group = len(positions), spec.head_size, spec.n_group
        size_k, size_v = rotation_size_k(d, self.type_k), rotation_size_v(d, self.type_v)

        q, k = self._queries_and_keys(il, h, positions)
        v = linear(h, w, "attn_v").reshape(n, spec.n_head_kv, d)
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
        hidden, weighing = self._hidden[il], self.softmaxes[il]
        distance = positions[:, None] - np.arange(total)[None, :]
        unseen = distance < 0
        if spec.slides(il):
            unseen |= distance >= spec.window
        for head in range(spec.n_head):
            kv = head // n_group
            of_head = rounded[:, head] @ keys[:, kv].T
            if has_minimum:
                of_head += sums_error(q[:, head]) @ self._minima[il][:, kv].T
            of_head = weighing.logits(of_head, d)
            of_head[unseen] = -np.inf
            of_head[:, : hidden.shape[1]][:, hidden[kv]] = -np.inf
            logits[:, head] = of_head

        if self.flash_attn and not tiled and self.type_v in ("f16", "f32"):
            out = _weighted_sum_f16(logits, np.repeat(values, n_group, axis=1), weighing.sinks)
        else:
            probs = softmax(logits, weighing.sinks)
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


def _weighted_sum_f16(logits: Float, values: Float, sinks: Float | None) -> Float:
    """Softmax-weighted sum of f16 rows with an f16 accumulator, row by row in cache order.

    Parameters
    ----------
    logits
        [query, head, row], with -inf for rows that are not attended.
    values
        [row, head, head_size].
    sinks
        [head], logits without a value, or None.
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
    if sinks is not None:
        norm = norm + np.exp(sinks - top)
    return np.asarray(out / norm[..., None])


def nmse(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Largest normalised mean squared error of any row: |got - want|^2 / |want|^2."""
    a, b = np.atleast_2d(np.asarray(got, np.float64)), np.atleast_2d(np.asarray(want, np.float64))
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
    if not np.isfinite(a).all():
        return float("inf")
    return float((((a - b) ** 2).sum(axis=1) / (b**2).sum(axis=1)).max())
