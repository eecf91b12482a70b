"""ctypes bindings of native/include/llama-dge.h, which documents the functions, with NumPy in and out."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ._library import LIBRARY
from .config import DGEConfig, Policy
from .stats import DGEMemory, DGEStats

logger = logging.getLogger(__name__)

OK = 0
NOTHING_TO_CUT = 1
ERR_UNSUPPORTED = -2
ERR_SEQ = -4
ERR_LOST = -13

_POLICIES = {"snapkv": 0, "streamingllm": 1, "pyramidkv": 2, "h2o": 3}
_POLICY_CUSTOM = 4
_SCORES = {"draft": 0, "policy": 1, "both": 2}
_POOLINGS = {"none": 0, "max": 1, "avg": 2}
_LAYER_BUDGETS = {"exact": 0, "reference": 1}
_HEAD_BUDGETS = {"uniform": 0, "adaptive": 1}
_HEAD_BUDGETS_TABLE = 2
_PARKS = {"off": 0, "ram": 1, "disk": 2}
_REFRESH_AUTO = -1
_STATES = ("full", "armed", "cut")


_INT32_P = ctypes.POINTER(ctypes.c_int32)
_FLOAT_P = ctypes.POINTER(ctypes.c_float)

_SelectCallback = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    _FLOAT_P,
    _INT32_P,
    _INT32_P,
)


class _Params(ctypes.Structure):
    _fields_ = [
        ("policy", ctypes.c_int32),
        ("scores", ctypes.c_int32),
        ("pooling", ctypes.c_int32),
        ("draft_pooling", ctypes.c_int32),
        ("kernel_size", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("budget_share", ctypes.c_float),
        ("draft_tokens", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("sinks", ctypes.c_int32),
        ("layer_budgets", ctypes.c_int32),
        ("head_budgets", ctypes.c_int32),
        ("table", _INT32_P),
        ("n_table", ctypes.c_int32),
        ("select", _SelectCallback),
        ("select_user_data", ctypes.c_void_p),
        ("park", ctypes.c_int32),
        ("park_dir", ctypes.c_char_p),
        ("park_limit", ctypes.c_int64),
        ("refresh", ctypes.c_int32),
        ("refresh_mass", ctypes.c_float),
        ("refresh_overlap", ctypes.c_bool),
    ]


class _SeqInfo(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("n_prompt", ctypes.c_int32),
        ("n_draft", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("n_rows_before", ctypes.c_int32),
        ("n_rows_after", ctypes.c_int32),
        ("n_rows", ctypes.c_int32),
        ("n_kv", ctypes.c_int32),
        ("n_layer", ctypes.c_int32),
        ("boundary", ctypes.c_int32),
        ("pos_min", ctypes.c_int32),
        ("bytes_before", ctypes.c_int64),
        ("bytes_after", ctypes.c_int64),
        ("bytes_kept", ctypes.c_int64),
        ("t_score_us", ctypes.c_int64),
        ("t_select_us", ctypes.c_int64),
        ("t_compact_us", ctypes.c_int64),
        ("n_cuts", ctypes.c_int64),
        ("n_parked", ctypes.c_int32),
        ("n_restored", ctypes.c_int32),
        ("bytes_parked", ctypes.c_int64),
        ("t_park_us", ctypes.c_int64),
        ("t_restore_us", ctypes.c_int64),
        ("n_refresh", ctypes.c_int64),
        ("n_checks", ctypes.c_int64),
        ("n_moved", ctypes.c_int64),
        ("t_refresh_us", ctypes.c_int64),
    ]


class _MemoryInfo(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_int64),
        ("kv", ctypes.c_int64),
        ("kv_max", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("compute", ctypes.c_int64),
        ("dge", ctypes.c_int64),
        ("parked", ctypes.c_int64),
        ("n_cells", ctypes.c_int32),
        ("n_cells_max", ctypes.c_int32),
    ]


def _bind(name: str, restype: Any, *argtypes: Any) -> Any:
    function = getattr(LIBRARY, name)
    function.restype = restype
    function.argtypes = list(argtypes)
    return function


class _CTX(ctypes.c_void_p):
    @classmethod
    def from_param(cls, ctx: Any) -> Any:
        if ctx is None:  # the library would follow it
            raise RuntimeError("the model is closed")
        return ctypes.c_void_p.from_param(ctx)


_SEQ = ctypes.c_int32

_default_params = _bind("llama_dge_default_params", _Params)
_status_str = _bind("llama_dge_status_str", ctypes.c_char_p, ctypes.c_int32)
_supported = _bind("llama_dge_supported", ctypes.c_int32, _CTX, ctypes.c_char_p, ctypes.c_size_t)
_enable = _bind("llama_dge_enable", ctypes.c_int32, _CTX, ctypes.POINTER(_Params))
_disable = _bind("llama_dge_disable", ctypes.c_int32, _CTX)
_seq_arm = _bind("llama_dge_seq_arm", ctypes.c_int32, _CTX, _SEQ, ctypes.c_int32)
_seq_disarm = _bind("llama_dge_seq_disarm", ctypes.c_int32, _CTX, _SEQ)
_seq_cut = _bind("llama_dge_seq_cut", ctypes.c_int32, _CTX, _SEQ)
_seq_reuse = _bind("llama_dge_seq_reuse", ctypes.c_int32, _CTX, _SEQ, ctypes.c_int32, ctypes.c_int32)
_get_seq_info = _bind("llama_dge_get_seq_info", ctypes.c_int32, _CTX, _SEQ, ctypes.POINTER(_SeqInfo))
_seq_restore = _bind("llama_dge_seq_restore", ctypes.c_int32, _CTX, _SEQ, ctypes.c_int32)
_seq_get_queries = _bind("llama_dge_seq_get_queries", ctypes.c_size_t, _CTX, _SEQ, ctypes.c_void_p, ctypes.c_size_t)
_seq_set_queries = _bind("llama_dge_seq_set_queries", ctypes.c_int32, _CTX, _SEQ, ctypes.c_void_p, ctypes.c_size_t)
_set_elastic = _bind("llama_dge_set_elastic", None, ctypes.c_bool)
_elastic_cells = _bind("llama_dge_elastic_cells", ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
_get_memory = _bind("llama_dge_get_memory", None, _CTX, ctypes.POINTER(_MemoryInfo))
_fingerprint = _bind("llama_dge_fingerprint", ctypes.c_uint64, _CTX)
_get_layers = _bind("llama_dge_get_layers", ctypes.c_int32, _CTX, _INT32_P, ctypes.c_int32)
_get_n_head_kv = _bind("llama_dge_get_n_head_kv", ctypes.c_int32, _CTX, ctypes.c_int32)
_get_kept = _bind(
    "llama_dge_get_kept", ctypes.c_int32, _CTX, _SEQ, ctypes.c_int32, ctypes.c_int32, _INT32_P, ctypes.c_int32
)


class DGEError(RuntimeError):
    """A function of the library failed.

    Parameters
    ----------
    what
        What was being done.
    status
        Return code, a negative ``enum llama_dge_status``; kept as an attribute.
    """

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"{what}: {status_text(status)} (status {status})")
        self.what = what
        self.status = status

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.status)


def _check(what: str, status: int) -> int:
    if status < 0:
        raise DGEError(what, status)
    return status


def status_text(status: int) -> str:
    """Return a short sentence for a return code."""
    text: bytes = _status_str(status)
    return text.decode("utf-8")


def supported(ctx: int) -> str | None:
    """Return None where the context's cache can be cut, else the reason why it cannot."""
    reason = ctypes.create_string_buffer(512)
    status = _supported(ctx, reason, len(reason))
    if status == OK:
        return None
    return reason.value.decode("utf-8", "replace") or status_text(status)


def _select_callback(policy: Policy) -> Any:
    def call(_: Any, layer: int, n_head: int, n_past: int, n: int, scores: Any, rows: Any, n_rows: Any) -> int:
        try:
            given = np.ctypeslib.as_array(scores, (n_head, n_past)).copy()
            chosen = policy.select(given, n, layer)
            if len(chosen) != n_head:
                raise ValueError(f"{len(chosen)} arrays of rows for {n_head} heads")
            for head, array in enumerate(chosen):
                values = np.sort(np.asarray(array))
                if values.ndim != 1 or len(values) > n_past or (len(values) and values.dtype.kind not in "iu"):
                    raise ValueError(f"head {head}: at most {n_past} ints are expected, got {array!r}")
                if len(values) and not 0 <= int(values[0]) <= int(values[-1]) < n_past:
                    raise ValueError(f"head {head}: rows must be in 0 .. {n_past - 1}, got {array!r}")
                n_rows[head] = len(values)
                np.ctypeslib.as_array(rows, (n_head, n_past))[head, : len(values)] = values
        except BaseException as error:  # an exception cannot cross the library; the cut is refused instead
            if not isinstance(error, Exception):
                callback.interrupt = error
                return 1
            logger.exception("the policy %r failed in layer %d, so the cache is not cut", policy, layer)
            return 1
        return 0

    callback: Any = _SelectCallback(call)
    callback.interrupt = None
    return callback


def raise_interrupt(callback: Any) -> None:
    """Raise the KeyboardInterrupt, or its like, that came while a policy was choosing, if there was one."""
    interrupt = getattr(callback, "interrupt", None)
    if interrupt is not None:
        callback.interrupt = None
        raise interrupt


def enable(ctx: int, config: DGEConfig) -> Any:
    """Switch eviction on for a context; raises DGEError, or ValueError where `head_budgets` does not fit the model or
    there is no `park_dir`.

    Returns
    -------
    object
        What the library refers to; keep it as long as the context.
    """
    if config.parks == "disk" and config.park_dir is not None and not os.path.isdir(config.park_dir):
        raise ValueError(f"park_dir={config.park_dir!r}: there is no such folder")
    params = _default_params()
    callback = None
    if isinstance(config.policy, str):
        params.policy = _POLICIES[config.policy]
    else:
        callback = params.select = _select_callback(config.policy)
        params.policy = _POLICY_CUSTOM
    params.scores = _SCORES[config.scores]
    params.pooling = _POOLINGS[config.pooling]
    params.draft_pooling = _POOLINGS[config.draft_pooling]
    params.kernel_size = config.kernel_size
    if isinstance(config.budget, float):
        params.budget_share = config.budget
    else:
        params.budget = config.budget
        params.budget_share = 0.0
    # queries are held for as many tokens, and no prompt is longer
    n_ctx = llama_cpp.llama_n_ctx(ctx)
    params.draft_tokens = min(config.draft_tokens, n_ctx)
    params.window = min(config.window, n_ctx)
    params.sinks = config.sinks
    params.layer_budgets = _LAYER_BUDGETS[config.layer_budgets]
    if isinstance(config.head_budgets, str):
        params.head_budgets = _HEAD_BUDGETS[config.head_budgets]
    else:
        shape = [n_head_kv(ctx, layer) for layer in layers(ctx)]
        given = [len(heads) for heads in config.head_budgets]
        if given != shape:
            raise ValueError(
                f"head_budgets: rows for {len(given)} layers with {given} KV heads were given, and of the model "
                f"{len(shape)} layers with {shape} KV heads are cut"
            )
        rows = [n for heads in config.head_budgets for n in heads]
        params.head_budgets = _HEAD_BUDGETS_TABLE
        params.table = (ctypes.c_int32 * len(rows))(*rows)
        params.n_table = len(rows)
    params.park = _PARKS[config.parks]
    params.park_dir = os.fsencode(config.park_dir if config.park_dir is not None else tempfile.gettempdir())
    params.park_limit = config.park_limit or 0
    params.refresh = _REFRESH_AUTO if isinstance(config.refresh, str) else config.refresh
    params.refresh_mass = config.refresh_mass
    params.refresh_overlap = config.refresh_overlap
    _check("enabling eviction", _enable(ctx, ctypes.byref(params)))
    return callback


def disable(ctx: int) -> None:
    """Switch eviction off; no sequence may be cut. Raises DGEError."""
    _check("switching eviction off", _disable(ctx))


def seq_arm(ctx: int, seq: int, n_prompt: int) -> int:
    """State that the prompt is complete. Returns the status, negative on an error."""
    return int(_seq_arm(ctx, seq, n_prompt))


def seq_disarm(ctx: int, seq: int) -> None:
    """Cancel a cut that has not happened yet; raises DGEError."""
    _check("disarming", _seq_disarm(ctx, seq))


def seq_cut(ctx: int, seq: int) -> bool:
    """Cut now. Returns False where nothing had to be cut; raises DGEError."""
    return _check("evicting", _seq_cut(ctx, seq)) != NOTHING_TO_CUT


def seq_reuse(ctx: int, seq: int, n_prompt: int, n_match: int) -> int:
    """Return how many of the n_match tokens in the cache a new prompt may keep, or a negative status."""
    return int(_seq_reuse(ctx, seq, n_prompt, n_match))


def seq_restore(ctx: int, seq: int, n_match: int) -> int:
    """Put parked rows back. Returns how many the sequence holds now, 0 where none fit; raises DGEError."""
    return _check("restoring the parked rows", _seq_restore(ctx, seq, n_match))


def seq_queries(ctx: int, seq: int) -> bytearray:
    """Return captured queries and sums of a sequence, which its state does not hold; empty where there are none."""
    data = bytearray(_seq_get_queries(ctx, seq, None, 0))
    if data:
        buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
        if _seq_get_queries(ctx, seq, buffer, len(data)) != len(data):
            raise RuntimeError("what was captured could not be copied")
    return data


def seq_set_queries(ctx: int, seq: int, data: bytearray) -> None:
    """Put captured queries and sums back, of the rows that the sequence holds; raises DGEError."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
    _check("putting back what was captured", _seq_set_queries(ctx, seq, buffer, len(data)))


@contextlib.contextmanager
def elastic(on: bool) -> Iterator[None]:
    """Let contexts that are created inside the block begin with a small cache."""
    _set_elastic(on)
    try:
        yield
    finally:
        _set_elastic(False)


def elastic_cells(n_rows: int, n_max: int) -> int:
    """Return the cells of an elastic cache of at most n_max that holds n_rows."""
    return int(_elastic_cells(n_rows, n_max))


def fingerprint(ctx: int) -> int:
    """Return a number that differs between models and types of cache."""
    return int(_fingerprint(ctx))


def memory(ctx: int) -> DGEMemory:
    """Return what the context uses."""
    info = _MemoryInfo()
    _get_memory(ctx, ctypes.byref(info))
    return DGEMemory(**{name: getattr(info, name) for name, *_ in info._fields_})


def is_lost(ctx: int, seq: int) -> bool:
    """Return whether the library emptied a sequence because a device failed while its rows moved."""
    info = _SeqInfo()
    _check("reading the state of the cache", _get_seq_info(ctx, seq, ctypes.byref(info)))
    return bool(info.error == ERR_LOST)


def seq_stats(ctx: int, seq: int) -> DGEStats:
    """Return what is known of a sequence; raises DGEError."""
    info = _SeqInfo()
    _check("reading the state of the cache", _get_seq_info(ctx, seq, ctypes.byref(info)))
    return DGEStats(
        state=_STATES[info.state],
        n_prompt=info.n_prompt,
        n_draft=info.n_draft,
        budget=info.budget,
        rows_before=info.n_rows_before,
        rows_after=info.n_rows_after,
        rows=info.n_rows,
        n_kv=info.n_kv,
        n_layer=info.n_layer,
        boundary=info.boundary,
        bytes_before=info.bytes_before,
        bytes_after=info.bytes_after,
        bytes_kept=info.bytes_kept,
        seconds_score=info.t_score_us * 1e-6,
        seconds_select=info.t_select_us * 1e-6,
        seconds_compact=info.t_compact_us * 1e-6,
        n_cuts=info.n_cuts,
        rows_parked=info.n_parked,
        rows_restored=info.n_restored,
        bytes_parked=info.bytes_parked,
        seconds_park=info.t_park_us * 1e-6,
        seconds_restore=info.t_restore_us * 1e-6,
        n_refresh=info.n_refresh,
        n_checks=info.n_checks,
        rows_moved=info.n_moved,
        seconds_refresh=info.t_refresh_us * 1e-6,
        error=status_text(info.error) if info.error < 0 else None,
    )


def layers(ctx: int) -> list[int]:
    """Return the model layers that a cut applies to, ascending; raises DGEError."""
    n = _check("listing the layers", _get_layers(ctx, None, 0))
    buffer = (ctypes.c_int32 * n)()
    n = _check("listing the layers", _get_layers(ctx, buffer, n))
    return list(buffer)[:n]


def n_head_kv(ctx: int, layer: int) -> int:
    """Return the number of KV heads of a layer that a cut applies to; raises DGEError."""
    return _check(f"layer {layer}", _get_n_head_kv(ctx, layer))


def n_kept(ctx: int, seq: int, layer: int, head: int) -> int:
    """Return how many positions a layer and KV head kept; raises DGEError."""
    return _check(f"kept positions of layer {layer}, head {head}", _get_kept(ctx, seq, layer, head, None, 0))


def kept(ctx: int, seq: int, layer: int, head: int) -> npt.NDArray[np.int32]:
    """Return the original positions that a layer and KV head kept, shape [n], ascending; raises DGEError."""
    n = n_kept(ctx, seq, layer, head)
    positions = np.empty(n, dtype=np.int32)
    _get_kept(ctx, seq, layer, head, positions.ctypes.data_as(_INT32_P), n)
    return positions
