"""A model with the shape of an 8B one and random weights, for machines on which no model can be downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

N_SPECIAL = 3  # <unk>, <s>, </s>
N_VOCAB = N_SPECIAL + 256

Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the llama architecture.

    Parameters
    ----------
    n_layer, n_head, n_head_kv, head_size, n_embd, n_ff
        as in llama.cpp
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_embd: int
    n_ff: int


# Llama 3 8B, but for its vocabulary: that would add half a gigabyte and nothing to attention
LLAMA_8B = Shape(n_layer=32, n_head=32, n_head_kv=8, head_size=128, n_embd=4096, n_ff=14336)
TINY = Shape(n_layer=2, n_head=8, n_head_kv=2, head_size=64, n_embd=256, n_ff=512)


def q4_0(n_out: int, n_in: int, pool: Blocks) -> Blocks:
    """Return random q4_0 blocks of a matrix, uint8 [n_out, n_in / 32 * 18], with entries of deviation 1/sqrt(n_in)."""
    n = n_out * n_in // 32
    blocks = np.resize(pool, (n, 18))
    # nibbles minus 8 have a deviation of 4.6
    blocks[:, :2] = np.frombuffer(np.float16(1 / (4.6 * np.sqrt(n_in))).tobytes(), np.uint8)
    return blocks.reshape(n_out, n_in // 32 * 18)


def write(path: Path, shape: Shape, n_ctx: int) -> Path:
    """Write the model as GGUF; returns the path.

    Parameters
    ----------
    path
        of the file
    shape
        sizes
    n_ctx
        context that it was "trained" for
    """
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random")
    writer.add_vocab_size(N_VOCAB)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    types = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([int(t) for t in (types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    rng = np.random.default_rng(7)
    # prime, so that rows of a matrix are not alike
    pool = rng.integers(0, 256, (1_000_003, 18), dtype=np.uint8)
    n_q, n_kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    kind = gguf.GGMLQuantizationType.Q4_0

    def add(name: str, n_out: int, n_in: int) -> None:
        writer.add_tensor(f"{name}.weight", q4_0(n_out, n_in, pool), raw_dtype=kind)

    add("token_embd", N_VOCAB, shape.n_embd)
    add("output", N_VOCAB, shape.n_embd)
    writer.add_tensor("output_norm.weight", np.ones(shape.n_embd, np.float32))
    for i in range(shape.n_layer):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(shape.n_embd, np.float32))
        add(f"blk.{i}.attn_q", n_q, shape.n_embd)
        add(f"blk.{i}.attn_k", n_kv, shape.n_embd)
        add(f"blk.{i}.attn_v", n_kv, shape.n_embd)
        add(f"blk.{i}.attn_output", shape.n_embd, n_q)
        add(f"blk.{i}.ffn_gate", shape.n_ff, shape.n_embd)
        add(f"blk.{i}.ffn_up", shape.n_ff, shape.n_embd)
        add(f"blk.{i}.ffn_down", shape.n_embd, shape.n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
