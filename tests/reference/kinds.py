"""In what ways the architectures that the reference knows differ from llama.

Written from the papers and the definitions that were published with the weights. Numbers such as a scale or a window
belong to the model, see :class:`reference.models.ModelSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """An architecture; the defaults are llama's.

    Parameters
    ----------
    arch
        Its name in a GGUF file.
    norm
        "rms", or "layer" with a bias.
    head_norm
        Norm of each head of Q and K before RoPE: "rms" with one weight for all heads, "layer" with one per head.
    halves
        RoPE turns the pairs (i, i + n/2), not (2i, 2i + 1).
    biases
        Matrices of a layer that have a bias.
    output_bias
        The last matrix has a bias.
    sinks
        A learned logit per head takes part in the softmax and has no value: the weights add up to less than 1.
    scale_query
        The scale multiplies the queries, as in the published code, and not the logits.
    post_norms
        Attention and feed-forward end with a norm, before their residual is added.
    parallel
        Attention and feed-forward read the same norm and are added together.
    feed_forward
        "silu" and "gelu" are gated, "plain" is GELU without a gate, "experts" are those of gpt-oss.
    tied
        The last matrix is that of the embeddings.
    names
        Tensors whose names in the file are not those used here.
    """

    arch: str = "llama"
    norm: str = "rms"
    head_norm: str = ""
    halves: bool = False
    biases: tuple[str, ...] = ()
    output_bias: bool = False
    sinks: bool = False
    scale_query: bool = False
    post_norms: bool = False
    parallel: bool = False
    feed_forward: str = "silu"
    tied: bool = False
    names: tuple[tuple[str, str], ...] = ()

    def name_of(self, tensor: str) -> str:
        """Name in the file of a tensor of a layer."""
        base, dot, part = tensor.partition(".")
        return f"{dict(self.names).get(base, base)}.{part if dot else 'weight'}"


_QKV = ("attn_q", "attn_k", "attn_v")

LLAMA = Kind()
# llama with four factors; scaled in place of 1/sqrt(head_size)
GRANITE = Kind("granite")
QWEN3 = Kind("qwen3", head_norm="rms", halves=True)
# positions in three dimensions, which are the same for text
QWEN2VL = Kind("qwen2vl", halves=True, biases=_QKV)
# windows in layers 0, 2, ...; soft caps of the logits of attention and of the last ones
GEMMA2 = Kind("gemma2", halves=True, scale_query=True, post_norms=True, feed_forward="gelu", tied=True)
# windows in all layers but each sixth, or as the file says, with a base of RoPE of their own
GEMMA3 = Kind("gemma3", head_norm="rms", halves=True, scale_query=True, post_norms=True, feed_forward="gelu", tied=True)
GPT_OSS = Kind(
    "gpt-oss",
    halves=True,
    biases=(*_QKV, "attn_output"),
    sinks=True,
    feed_forward="experts",
    names=(("ffn_norm", "post_attention_norm"),),
)
# the 12B model's norms of heads; a quarter of each head is rotated
STABLELM = Kind("stablelm", norm="layer", head_norm="layer", halves=True)
PHI2 = Kind(
    "phi2",
    norm="layer",
    halves=True,
    biases=(*_QKV, "attn_output", "ffn_up", "ffn_down"),
    output_bias=True,
    scale_query=True,
    parallel=True,
    feed_forward="plain",
)
