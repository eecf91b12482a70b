"""How closely the library's logits follow the reference, per type of cache.

Without rounding the two agree to f32 noise. With rounding, that noise puts an entry of K or V on the other side of a
rounding border now and then, and the layers above amplify it: a few rows of logits move a little and the median row
hardly at all, whereas a wrong kept row moves all that follow by far more (see test_mask_equivalence.py). In a model of
one layer nothing is amplified, and the bounds are tight for every type.
"""

from __future__ import annotations

# (largest NMSE of a row of logits, NMSE of the median row)
_EXACT = (1e-10, 1e-11)
_ONE_LAYER = (1e-5, 1e-8)
_BOUNDS = {
    "f32": (1e-5, 1e-6),
    "f16": (1e-5, 1e-6),
    "bf16": (5e-5, 1e-5),  # AVX-512 has a product of its own for it, which rounds otherwise
    "q8_0": (5e-4, 2e-5),
    "q5_0": (5e-3, 2e-4),
    "q5_1": (5e-3, 2e-4),
    "q4_0": (5e-3, 2e-4),
    "q4_1": (5e-3, 2e-4),
    "iq4_nl": (5e-3, 2e-4),
}


def nmse_bounds(type_k: str, type_v: str, flash_attn: bool, n_layer: int) -> tuple[float, float]:
    """Bounds of the largest and of the median NMSE of logits."""
    if type_k == type_v == "f32" and not flash_attn:
        return _EXACT
    if n_layer == 1:
        return _ONE_LAYER
    return max(_BOUNDS[type_k], _BOUNDS[type_v])
