"""Shapes and weights of a tiny model, and its vocabulary of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .kinds import LLAMA, Kind

Array = npt.NDArray[np.float32]

N_SPECIAL = 3  # <unk>, <s>, </s>
TOKEN_BOS = 1
TOKEN_EOS = 2
TOKEN_SPACE = N_SPECIAL + 256
N_VOCAB = TOKEN_SPACE + 1
# of gpt-oss, and as many are used
N_EXPERT = 2


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a tiny model.

    Parameters
    ----------
    n_head, n_head_kv
        Query and KV heads per layer; their ratio is the group size.
    head_size
        Length of a head. 64 matters: a quantised cache is rotated by a Hadamard matrix only for multiples of 64.
    sharpness
        Standard deviation of the attention logits.
    kind
        The architecture. What follows it applies to those that know it.
    n_rot
        Entries of a head that RoPE rotates; 0: all.
    scale
        Of the products of Q and K; None: 1/sqrt(head_size).
    cap, final_cap
        Soft caps of the logits of attention and of the last ones; 0: none.
    window, full_every
        Each full_every-th layer attends to all positions, the others to a window that ends with the query's own.
    rope_base_local
        Base of RoPE in layers with a window; 0: that of all.
    """

    name: str
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_size: int = 64
    n_embd: int = 64
    n_ff: int = 96
    seed: int = 7
    sharpness: float = 2.5
    n_ctx_train: int = 2048
    rope_base: float = 10000.0
    eps: float = 1e-5
    kind: Kind = LLAMA
    n_rot: int = 0
    scale: float | None = None
    cap: float = 0.0
    final_cap: float = 0.0
    window: int = 0
    full_every: int = 1
    rope_base_local: float = 0.0
    embd_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def n_group(self) -> int:
        return self.n_head // self.n_head_kv

    @property
    def rotated(self) -> int:
        return self.n_rot or self.head_size

    @property
    def query_scale(self) -> float:
        return 1 / float(np.sqrt(self.head_size)) if self.scale is None else self.scale

    def slides(self, il: int) -> bool:
        """Whether a layer attends to a window only."""
        return self.window > 0 and (il + 1) % self.full_every != 0

    def rope_base_of(self, il: int) -> float:
        return self.rope_base_local if self.rope_base_local and self.slides(il) else self.rope_base


@dataclass(frozen=True)
class TinyModel:
    """Weights of a model; matrices have the shape [out, in]. A bias has the name of what it belongs to, and ".bias"."""

    spec: ModelSpec
    embd: Array
    output: Array
    output_norm: Array
    layers: list[dict[str, Array]] = field(default_factory=list)
    biases: dict[str, Array] = field(default_factory=dict)

    @property
    def last(self) -> dict[str, Array]:
        """What comes after the layers."""
        return {"output": self.output, "output_norm": self.output_norm, **self.biases}


def token_of(char: str) -> int:
    """The token of one ASCII character."""
    return TOKEN_SPACE if char == " " else N_SPECIAL + ord(char)
