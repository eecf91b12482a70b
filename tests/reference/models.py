"""Tiny random models of several architectures; :mod:`reference.gguf_file` writes them as GGUF files.

The weights are scaled so that attention is peaked (a few rows carry most of the weight) and so that a layer's attention
changes the residual stream about as much as the embedding does. With near-uniform attention a wrong kept set would
hardly move the logits, and the tests could not fail.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from .gguf_file import write_gguf, write_lora
from .kinds import GEMMA2, GEMMA3, GPT_OSS, GRANITE, PHI2, QWEN2VL, QWEN3, STABLELM
from .spec import (
    N_EXPERT,
    N_SPECIAL,
    N_VOCAB,
    TOKEN_BOS,
    TOKEN_EOS,
    TOKEN_SPACE,
    Array,
    ModelSpec,
    TinyModel,
    token_of,
)

__all__ = [
    "KINDS",
    "N_SPECIAL",
    "N_VOCAB",
    "TOKEN_BOS",
    "TOKEN_EOS",
    "TOKEN_SPACE",
    "ZOO",
    "ModelSpec",
    "TinyModel",
    "make_weights",
    "token_of",
    "write_gguf",
    "write_lora",
]


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
    if spec.scale is not None:
        gain_qk /= float(np.sqrt(spec.scale * np.sqrt(spec.head_size)))
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
    embd = rng.standard_normal((N_VOCAB, n_embd)).astype(np.float32)
    output = matrix(N_VOCAB, n_embd, 2.0) * loud
    output_norm = norm(n_embd)
    if spec.kind.tied:
        embd /= np.float32(spec.embd_scale)
        output = embd
    biases = _as_kind(spec, layers)
    return TinyModel(spec, embd, output, output_norm, layers, biases)


def _as_kind(spec: ModelSpec, layers: list[dict[str, Array]]) -> dict[str, Array]:
    """Give layers of llama what the kind adds, and take what it lacks; returns the biases after the layers.

    Norms of heads and attention sinks vary so much that one in another's place shows.
    """
    kind, rng = spec.kind, np.random.default_rng([spec.seed, 1])

    def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> Array:
        return rng.normal(mean, deviation, shape).astype(np.float32)

    for w in layers:
        if kind.head_norm:
            # the norm removes the gain of the matrices
            gain = np.sqrt(spec.sharpness / (spec.query_scale * np.sqrt(spec.head_size)))
            for name, n_head in (("attn_q", spec.n_head), ("attn_k", spec.n_head_kv)):
                shape = (spec.head_size,) if kind.head_norm == "rms" else (n_head, spec.head_size)
                w[f"{name}_norm"] = (gain * np.exp(normal(*shape, deviation=0.4))).astype(np.float32)
        if kind.sinks:
            w["attn_sinks"] = normal(spec.n_head, mean=6.0, deviation=1.5)
        if kind.post_norms:
            for name in ("post_attention_norm", "post_ffw_norm"):
                w[name] = normal(spec.n_embd, mean=1.0, deviation=0.1)
        if kind.parallel:
            del w["ffn_norm"]
        if kind.feed_forward in ("plain", "experts"):
            del w["ffn_gate"]
        if kind.feed_forward == "experts":
            del w["ffn_up"], w["ffn_down"]
            w["ffn_gate_inp"], w["ffn_gate_inp.bias"] = normal(N_EXPERT, spec.n_embd, deviation=0.1), normal(N_EXPERT)
            sizes = {"ffn_gate": (spec.n_ff, spec.n_embd), "ffn_up": (spec.n_ff, spec.n_embd)}
            for name, (n_out, n_in) in {**sizes, "ffn_down": (spec.n_embd, spec.n_ff)}.items():
                w[f"{name}_exps"] = normal(N_EXPERT, n_out, n_in, deviation=n_in**-0.5)
                w[f"{name}_exps.bias"] = normal(N_EXPERT, n_out, deviation=0.3)
        norms = ("attn_norm", "ffn_norm") if kind.norm == "layer" else ()
        for name in (*kind.biases, *(name for name in norms if name in w)):
            w[f"{name}.bias"] = normal(w[name].shape[0], deviation=0.3)
    last = {"output_norm.bias": spec.n_embd} if kind.norm == "layer" else {}
    if kind.output_bias:
        last["output.bias"] = N_VOCAB
    return {name: normal(n, deviation=0.3) for name, n in last.items()}


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

# Models of other kinds of attention. Caps are of the size of the logits, windows shorter than the prompts of the tests,
# and the heads are such that a quantised cache is rotated in blocks of 64, 128 and 256, and not at all (96).
KINDS = {
    spec.name: spec
    for spec in (
        ModelSpec("qwen3", kind=QWEN3, head_size=128),
        # of this architecture llama.cpp does not read eps
        ModelSpec("qwen2vl", kind=QWEN2VL, n_embd=256, eps=1e-12),
        ModelSpec(
            "granite",
            kind=GRANITE,
            n_head=2,
            n_head_kv=1,
            head_size=192,
            scale=0.02,
            embd_scale=1.5,
            residual_scale=0.7,
            logit_scale=3.0,
        ),
        ModelSpec("gemma2", kind=GEMMA2, n_layer=4, cap=4.0, final_cap=1.5, window=40, full_every=2, embd_scale=8.0),
        # as many layers as the 27B model, which alone has this scale
        ModelSpec(
            "gemma2_27b",
            kind=GEMMA2,
            n_layer=46,
            n_head=2,
            scale=32**-0.5,
            cap=4.0,
            final_cap=1.5,
            window=40,
            full_every=2,
            embd_scale=8.0,
        ),
        ModelSpec(
            "gemma3",
            kind=GEMMA3,
            n_layer=6,
            n_head_kv=1,
            head_size=256,
            sharpness=1.5,
            window=40,
            full_every=3,
            embd_scale=8.0,
            rope_base=1e6,
            rope_base_local=1e4,
        ),
        ModelSpec("gpt_oss", kind=GPT_OSS, n_layer=4, window=40, full_every=2),
        ModelSpec("stablelm", kind=STABLELM, n_embd=256, n_rot=16),
        ModelSpec("phi2", kind=PHI2, n_embd=192, n_head=2, n_head_kv=2, head_size=96, n_rot=32),
    )
}
ZOO.update(KINDS)


if __name__ == "__main__":
    write_gguf(make_weights(ZOO[sys.argv[1]]), Path(sys.argv[2]))
