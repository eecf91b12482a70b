"""What storing a row in a KV cache of a given type does to it, and the rotation that comes before."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# ids of enum ggml_type
GGML_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}

# what a row of Q is converted to before its dot product with a row of K of that type (ggml-cpu, vec_dot_type);
# q8_1 differs from q8_0 only by a stored sum
QUERY_TYPES = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q8_0",
    "q4_0": "q8_0",
    "q5_0": "q8_0",
    "iq4_nl": "q8_0",
    "q4_1": "q8_0",
    "q5_1": "q8_0",
}

IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float64)


def is_quantized(type_name: str) -> bool:
    return type_name not in ("f32", "f16", "bf16")


def round_to(rows: Float, type_name: str) -> Float:
    """Round an array [..., head_size] to a cache type and back."""
    if type_name == "f32":
        return rows.astype(np.float32).astype(np.float64)
    if type_name == "f16":
        # by way of f32, as the library computes in f32
        return rows.astype(np.float32).astype(np.float16).astype(np.float64)
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]), dtype=np.float32)
    if type_name == "iq4_nl":
        return _round_iq4_nl(flat).reshape(rows.shape)
    kind = getattr(gguf.GGMLQuantizationType, type_name.upper())
    back = gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind)
    return back.astype(np.float64).reshape(rows.shape)


def _round_iq4_nl(rows: npt.NDArray[np.float32]) -> Float:
    # 4-bit codes of a fixed table: the entry of largest magnitude gets the table's first value, then the scale is
    # fitted to the codes by least squares with weights x^2
    blocks = rows.reshape(-1, 32).astype(np.float64)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    safe = np.where(largest == 0, 1.0, largest)
    middles = (IQ4_NL_VALUES[1:] + IQ4_NL_VALUES[:-1]) / 2
    codes = IQ4_NL_VALUES[np.searchsorted(middles, blocks * (IQ4_NL_VALUES[0] / safe), side="right")]
    weight = blocks * blocks
    scale = (weight * codes * blocks).sum(1, keepdims=True) / (weight * codes * codes).sum(1, keepdims=True).clip(1e-30)
    stored = scale.astype(np.float32).astype(np.float16).astype(np.float64)
    return np.where(largest == 0, 0.0, stored * codes).reshape(rows.shape)


def sums_error(queries: Float) -> Float:
    """What a q8_1 row loses by storing the sum of a block as f16: stored sum minus true sum, per block of 32.

    The types with a minimum (q4_1, q5_1) multiply that sum with the minimum of the block of K.
    """
    blocks = np.ascontiguousarray(queries.reshape(-1, 32), dtype=np.float32)
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    codes = np.rint(blocks / np.where(scale == 0, np.float32(1), scale)[:, None])
    stored = (scale * codes.sum(axis=1)).astype(np.float16).astype(np.float64)
    error = stored - scale.astype(np.float16).astype(np.float64) * codes.sum(axis=1)
    return np.asarray(error.reshape(*queries.shape[:-1], -1))


def block_minima(rows: Float) -> Float:
    """The minimum that q4_1 and q5_1 store per block of 32, as f16."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32).astype(np.float32)
    return np.asarray(blocks.min(axis=-1).astype(np.float16).astype(np.float64))


@cache
def hadamard(n: int) -> Float:
    """Orthonormal Hadamard matrix in Sylvester's order; its own inverse."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(n))


def rotation_size_k(head_size: int, type_k: str) -> int:
    """Block of K (and Q) that is rotated: the largest 64 * 2^m that divides the head; 0 where nothing is."""
    if not is_quantized(type_k) or head_size % 64 != 0:
        return 0
    size = 64
    while head_size % (2 * size) == 0:
        size *= 2
    return size


def rotation_size_v(head_size: int, type_v: str) -> int:
    """Block of V that is rotated: 64, or 0 where nothing is."""
    return 64 if is_quantized(type_v) and head_size % 64 == 0 else 0


def rotate(rows: Float, size: int) -> Float:
    """Rotate blocks of `size` entries along the last axis."""
    if size == 0:
        return rows
    return (rows.reshape(*rows.shape[:-1], -1, size) @ hadamard(size)).reshape(rows.shape)
