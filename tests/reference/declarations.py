"""The declarations of llama-dge.h once more, and the library that holds its functions.

Repeated on purpose: the tests must not depend on the package's own bindings, and a difference between the two shows up
as a failure.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

ABI_VERSION = 7

OK, NOTHING_TO_EVICT = 0, 1
ERR_PARAMS, ERR_UNSUPPORTED, ERR_DISABLED, ERR_SEQ, ERR_QUERIES = -1, -2, -3, -4, -5
ERR_SHARED, ERR_EVICTED, ERR_MEMORY, ERR_COMPUTE, ERR_ABORTED = -6, -7, -8, -9, -10
STATE_EMPTY, STATE_FULL, STATE_ARMED, STATE_EVICTED, STATE_LOST = 0, 1, 2, 3, 4
ERR_CALLBACK, ERR_PARK, ERR_LOST = -11, -12, -13
SCORES = {"auto": 0, "draft": 1, "policy": 2, "both": 3}
POOLINGS = {"none": 0, "max": 1, "avg": 2}
LAYER_BUDGETS = {"exact": 0, "reference": 1}
HEAD_BUDGETS = {"uniform": 0, "adaptive": 1, "table": 2}
PARKS = {"off": 0, "ram": 1, "disk": 2}
ENUMS = {
    "park": PARKS,
    "scores": SCORES,
    "pooling": POOLINGS,
    "layer_budgets": LAYER_BUDGETS,
    "head_budgets": HEAD_BUDGETS,
}
RECALL_AUTO = -1

NAN_F16 = 0x7E00
LARGE_F16 = 0x6BCD  # 3994 in f16, 4.9e26 in bf16: finite, and far from every value of the models

# selection of one layer: select(layer, n, scores [n_head_kv, n_past], rows [n_head_kv, n_past], n_rows [n_head_kv])
Select = Callable[[int, int, npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int32]], int]
_I32_P, _F32_P = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_float)
_SELECT = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int32] * 4, _F32_P, _I32_P, _I32_P
)  # llama_dge_select_callback


def raw_select(function: Select) -> Any:
    def call(_: Any, il: int, n_head: int, n_past: int, n: int, scores: Any, rows: Any, n_rows: Any) -> int:
        as_array = np.ctypeslib.as_array
        shape = (n_head, n_past)
        return function(il, n, as_array(scores, shape), as_array(rows, shape), as_array(n_rows, (n_head,)))

    return _SELECT(call)


class Params(ctypes.Structure):
    """struct llama_dge_params"""

    _fields_ = [
        ("policy", ctypes.c_char_p),
        ("scores", ctypes.c_int32),
        ("pooling", ctypes.c_int32),
        ("kernel_size", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("budget_share", ctypes.c_float),
        ("draft_tokens", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("sinks", ctypes.c_int32),
        ("layer_budgets", ctypes.c_int32),
        ("head_budgets", ctypes.c_int32),
        ("table", ctypes.POINTER(ctypes.c_int32)),
        ("n_table", ctypes.c_int32),
        ("select", ctypes.c_void_p),
        ("select_user_data", ctypes.c_void_p),
        ("park", ctypes.c_int32),
        ("park_dir", ctypes.c_char_p),
        ("park_limit", ctypes.c_int64),
        ("recall", ctypes.c_int32),
        ("recall_mass", ctypes.c_float),
        ("recall_async", ctypes.c_bool),
    ]


class SeqInfo(ctypes.Structure):
    """struct llama_dge_seq_info"""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("state", "error", "n_prompt", "n_draft", "budget")),
        *((name, ctypes.c_int32) for name in ("n_rows_before", "n_rows_after", "n_rows", "n_kv", "n_layer")),
        *((name, ctypes.c_int32) for name in ("boundary", "pos_min")),
        *((name, ctypes.c_int64) for name in ("bytes_before", "bytes_after", "bytes_kept")),
        *((name, ctypes.c_int64) for name in ("t_score_us", "t_select_us", "t_compact_us", "n_evictions")),
        *((name, ctypes.c_int32) for name in ("n_parked", "n_restored")),
        *((name, ctypes.c_int64) for name in ("bytes_parked", "t_park_us", "t_restore_us")),
        *((name, ctypes.c_int64) for name in ("n_recalls", "n_checks", "n_moved", "t_recall_us")),
    ]

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name, _ in self._fields_}


class PolicyInfo(ctypes.Structure):
    """struct llama_dge_policy_info"""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("name", "summary", "paper")),
        *((name, ctypes.c_int32) for name in ("scorer", "auto_scores")),
    ]


class FieldInfo(ctypes.Structure):
    """struct llama_dge_field_info"""

    _fields_ = [("name", ctypes.c_char_p), ("least", ctypes.c_double), ("most", ctypes.c_double)]


class Estimate(ctypes.Structure):
    """struct llama_dge_estimate"""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("status", "n_rows", "n_rows_after")),
        ("at_most", ctypes.c_bool),
        *((name, ctypes.c_int32) for name in ("n_cells", "n_cells_after")),
        *((name, ctypes.c_int64) for name in ("kv", "kv_after", "kv_max", "compute", "dge", "parked")),
    ]

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name, _ in self._fields_}


class MemoryInfo(ctypes.Structure):
    """struct llama_dge_memory_info"""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("weights", "kv", "kv_max", "other", "compute", "dge", "parked")),
        *((name, ctypes.c_int32) for name in ("n_cells", "n_cells_max")),
    ]

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name, _ in self._fields_}


def llama() -> Any:
    """The module llama_cpp.llama_cpp, quiet."""
    import llama_cpp.llama_cpp as module

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    return module


@cache
def dge_library() -> Any:
    """The loaded libllama with the functions of llama-dge.h declared; AttributeError where it has none."""
    # a handle of our own: the package declares the same functions, with its own types, on llama_cpp's
    lib: Any = ctypes.CDLL(llama()._lib._name)
    ctx, i32 = ctypes.c_void_p, ctypes.c_int32
    pos_p, params_p, info_p = ctypes.POINTER(i32), ctypes.POINTER(Params), ctypes.POINTER(SeqInfo)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_dge_abi_version": (i32, []),
        "llama_dge_default_params": (Params, []),
        "llama_dge_check_params": (i32, [params_p, ctypes.c_char_p, ctypes.c_size_t]),
        "llama_dge_least_budget": (i32, [params_p]),
        "llama_dge_get_policy": (ctypes.c_bool, [i32, ctypes.POINTER(PolicyInfo)]),
        "llama_dge_get_field": (ctypes.c_bool, [i32, ctypes.POINTER(FieldInfo)]),
        "llama_dge_status_str": (ctypes.c_char_p, [i32]),
        "llama_dge_supported": (i32, [ctx, ctypes.c_char_p, ctypes.c_size_t]),
        "llama_dge_enable": (i32, [ctx, params_p]),
        "llama_dge_disable": (i32, [ctx]),
        "llama_dge_seq_arm": (i32, [ctx, i32, i32]),
        "llama_dge_seq_disarm": (i32, [ctx, i32]),
        "llama_dge_seq_evict": (i32, [ctx, i32]),
        "llama_dge_seq_reuse": (i32, [ctx, i32, i32, i32]),
        "llama_dge_get_seq_info": (i32, [ctx, i32, info_p]),
        "llama_dge_get_layers": (i32, [ctx, pos_p, i32]),
        "llama_dge_get_n_head_kv": (i32, [ctx, i32]),
        "llama_dge_get_kept": (i32, [ctx, i32, i32, i32, pos_p, i32]),
        "llama_dge_seq_restore": (i32, [ctx, i32, i32]),
        "llama_dge_seq_get_queries": (ctypes.c_size_t, [ctx, i32, ctypes.c_void_p, ctypes.c_size_t]),
        "llama_dge_seq_set_queries": (i32, [ctx, i32, ctypes.c_void_p, ctypes.c_size_t]),
        "llama_dge_set_elastic": (None, [ctypes.c_bool]),
        "llama_dge_is_elastic": (ctypes.c_bool, [ctx]),
        "llama_dge_get_estimate": (i32, [ctx, params_p, i32, ctypes.c_bool, ctypes.POINTER(Estimate)]),
        "llama_dge_fingerprint": (ctypes.c_uint64, [ctx]),
        "llama_dge_get_memory": (None, [ctx, ctypes.POINTER(MemoryInfo)]),
        "llama_dge_debug_poison": (i32, [ctx, ctypes.c_uint16]),
        "llama_dge_debug_seq_rm": (ctypes.c_bool, [ctx, i32, i32, i32]),
        "llama_dge_debug_fail_alloc": (None, [i32]),
        "llama_dge_debug_fail_move": (None, [i32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.llama_dge_abi_version() != ABI_VERSION:
        raise RuntimeError(f"the tests are written for ABI {ABI_VERSION}, not {lib.llama_dge_abi_version()}")
    return lib
