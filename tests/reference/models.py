"""Tiny random models of the llama architecture, written as GGUF files.

The weights are scaled so that attention is peaked (a few rows carry most of the weight) and so that a layer's attention
changes the residual stream about as much as the embedding does. With near-uniform attention a wrong kept set would
hardly move the logits, and the tests could not fail.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

N_SPECIAL = 3  # <unk>, <s>, </s>
TOKEN_BOS = 1
TOKEN_EOS = 2
TOKEN_SPACE = N_SPECIAL + 256
N_VOCAB = TOKEN_SPACE + 1


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

    @property
    def n_group(self) -> int:
        return self.n_head // self.n_head_kv


@dataclass(frozen=True)
class TinyModel:
    """Weights of a model; matrices have the shape [out, in]."""

    spec: ModelSpec
    embd: Array
    output: Array
    output_norm: Array
    layers: list[dict[str, Array]] = field(default_factory=list)


def token_of(char: str) -> int:
    """The token of one ASCII character."""
    return TOKEN_SPACE if char == " " else N_SPECIAL + ord(char)


def make_weights(spec: ModelSpec) -> TinyModel:
    """Random weights of a spec; the same spec always gives the same weights."""
    rng = np.random.default_rng(spec.seed)

    def matrix(n_out: int, n_in: int, gain: float) -> Array:
        return np.asarray(rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in), dtype=np.float32)

    def norm(n: int) -> Array:
        return (1.0 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    n_embd, n_ff = spec.n_embd, spec.n_ff
    n_q = spec.n_head * spec.head_size
    n_kv = spec.n_head_kv * spec.head_size
    # q.k/sqrt(d) of vectors with entries of deviation a has deviation a^2
    gain_qk = float(np.sqrt(spec.sharpness))
    layers = [
        {
            "attn_norm": norm(n_embd),
            "attn_q": matrix(n_q, n_embd, gain_qk),
            "attn_k": matrix(n_kv, n_embd, gain_qk),
            "attn_v": matrix(n_kv, n_embd, 1.0),
            "attn_output": matrix(n_embd, n_q, 1.5),
            "ffn_norm": norm(n_embd),
            "ffn_gate": matrix(n_ff, n_embd, 1.0),
            "ffn_up": matrix(n_ff, n_embd, 1.0),
            "ffn_down": matrix(n_embd, n_ff, 1.0),
        }
        for _ in range(spec.n_layer)
    ]
    # Printable ASCII wins the argmax, so generated text decodes cleanly and no answer ends by chance.
    loud = np.full((N_VOCAB, 1), 0.05, dtype=np.float32)
    loud[[token_of(chr(c)) for c in range(0x21, 0x7F)]] = 1.0
    return TinyModel(
        spec=spec,
        embd=rng.standard_normal((N_VOCAB, n_embd)).astype(np.float32),
        output=matrix(N_VOCAB, n_embd, 2.0) * loud,
        output_norm=norm(n_embd),
        layers=layers,
    )


def write_gguf(model: TinyModel, path: Path, metadata: Mapping[str, str | int] | None = None) -> Path:
    """Write a model with a byte-level SentencePiece vocabulary, and more metadata; returns the path."""
    spec = model.spec
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(spec.name)
    writer.add_vocab_size(N_VOCAB)
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(spec.n_head_kv)
    writer.add_key_length(spec.head_size)
    writer.add_value_length(spec.head_size)
    writer.add_rope_dimension_count(spec.head_size)
    writer.add_rope_freq_base(spec.rope_base)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    types = gguf.TokenType
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)] + ["\u2581".encode()]
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL] + [types.BYTE] * 256 + [types.NORMAL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(TOKEN_BOS)
    writer.add_eos_token_id(TOKEN_EOS)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)

    writer.add_tensor("token_embd.weight", model.embd)
    writer.add_tensor("output.weight", model.output)
    writer.add_tensor("output_norm.weight", model.output_norm)
    for i, layer in enumerate(model.layers):
        for name, weight in layer.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_lora(model: TinyModel, path: Path, rank: int = 4) -> Path:
    """Write a LoRA adapter with random weights for the output projections of attention; returns the path."""
    rng = np.random.default_rng(17)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for i, layer in enumerate(model.layers):
        n_out, n_in = layer["attn_output"].shape
        for name, shape in (("lora_a", (rank, n_in)), ("lora_b", (n_out, rank))):
            writer.add_tensor(f"blk.{i}.attn_output.weight.{name}", rng.normal(size=shape).astype(np.float32) * 0.3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: The models of the tests: group sizes 1, 2, 3 and 8, both head sizes, one of a single layer, in which the K and V
#: of a row depend on the row's own token alone, and one with layers enough for a pyramid.
ZOO = {
    spec.name: spec
    for spec in (
        ModelSpec("g1", n_layer=2, n_head=4, n_head_kv=4, head_size=32),
        ModelSpec("g2", n_layer=3, n_head=4, n_head_kv=2, head_size=64, sharpness=2.0),
        ModelSpec("g3", n_layer=2, n_head=6, n_head_kv=2, head_size=64),
        ModelSpec("g8", n_layer=2, n_head=16, n_head_kv=2, head_size=32),
        ModelSpec("one", n_layer=1, n_head=4, n_head_kv=2, head_size=64),
        ModelSpec("deep", n_layer=7, n_head=4, n_head_kv=2, head_size=32),
    )
}


if __name__ == "__main__":
    write_gguf(make_weights(ZOO[sys.argv[1]]), Path(sys.argv[2]))
