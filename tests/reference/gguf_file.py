"""Tiny models and adapters as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .kinds import GRANITE, QWEN2VL
from .spec import N_EXPERT, N_VOCAB, TOKEN_BOS, TOKEN_EOS, ModelSpec, TinyModel


def write_gguf(model: TinyModel, path: Path, metadata: Mapping[str, str | int] | None = None) -> Path:
    """Write a model with a byte-level SentencePiece vocabulary, and more metadata; returns the path."""
    spec = model.spec
    writer: Any = gguf.GGUFWriter(str(path), spec.kind.arch)
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
    writer.add_rope_dimension_count(spec.rotated)
    writer.add_rope_freq_base(spec.rope_base)
    (writer.add_layer_norm_rms_eps if spec.kind.norm == "rms" else writer.add_layer_norm_eps)(spec.eps)
    _add_kind(writer, spec)
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
    for name, weight in model.last.items():
        if name != "output" or not spec.kind.tied:
            writer.add_tensor(name if "." in name else f"{name}.weight", weight)
    for i, layer in enumerate(model.layers):
        for name, weight in layer.items():
            writer.add_tensor(f"blk.{i}.{spec.kind.name_of(name)}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_kind(writer: Any, spec: ModelSpec) -> None:
    """Keys that llama does not have."""
    kind = spec.kind
    if kind is GRANITE:
        writer.add_attention_scale(spec.query_scale)
        writer.add_embedding_scale(spec.embd_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_logit_scale(spec.logit_scale)
    if kind is QWEN2VL:
        n = spec.head_size // 8
        writer.add_rope_dimension_sections([n, n + n // 2, n + n // 2, 0])
    if spec.window:
        writer.add_sliding_window(spec.window)
        writer.add_uint32(f"{kind.arch}.attention.sliding_window_pattern", spec.full_every)
    if spec.rope_base_local:
        writer.add_float32(f"{kind.arch}.rope.freq_base_swa", spec.rope_base_local)
    if spec.cap:
        writer.add_attn_logit_softcapping(spec.cap)
        writer.add_final_logit_softcapping(spec.final_cap)
    if kind.feed_forward == "experts":
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(N_EXPERT)
        writer.add_expert_feed_forward_length(spec.n_ff)


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
