"""How closely the library follows the reference on the models of reference/models.KINDS."""

from __future__ import annotations

from .bounds import nmse_bounds
from .models import KINDS

# flash attention, type of K, type of V
Cache = tuple[bool, str, str]

F32: Cache = (False, "f32", "f32")


def logits_bounds(kind: str, cache: Cache) -> tuple[float, float]:
    """Bounds of the largest and of the median NMSE: those of llama, for an f16 cache where GELU is rounded to f16.

    In models of six layers and more, rounding is amplified 20 times as much.
    """
    flash_attn, type_k, type_v = cache
    spec = KINDS[kind]
    if spec.kind.feed_forward in ("gelu", "plain") and cache == F32:
        type_k = type_v = "f16"
    largest, median = nmse_bounds(type_k, type_v, flash_attn, spec.n_layer)
    return (20 * largest, 20 * median) if spec.n_layer > 4 else (largest, median)


def tolerance(kind: str, cache: Cache) -> float:
    """How far two scores may lie apart, relative to the larger, for the library to rank them otherwise."""
    if "q8_0" in cache:
        return 2e-2 if KINDS[kind].n_layer <= 4 else 5e-2
    return 2e-5 if cache == F32 and KINDS[kind].n_layer <= 6 else 5e-3
