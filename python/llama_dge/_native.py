"""Calls of native/include/llama-dge.h, which documents them, with settings, records and NumPy arrays in and out."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from . import _bindings, _params
from ._bindings import lib
from .config import DGEConfig
from .stats import DGEEstimate, DGEMemory, DGEStats

_STATUS = _bindings.enum("status")
OK = _STATUS["ok"]
NOTHING_TO_EVICT = _STATUS["nothing_to_evict"]
ERR_UNSUPPORTED = _STATUS["err_unsupported"]
ERR_SEQ = _STATUS["err_seq"]
ERR_PARK = _STATUS["err_park"]
ERR_LOST = _STATUS["err_lost"]

_STATES = {number: name for name, number in _bindings.enum("state").items()}
_INT32_P = ctypes.POINTER(ctypes.c_int32)


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
    text: bytes = lib.status_str(status)
    return text.decode("utf-8")


def supported(ctx: int) -> str | None:
    """Return None where the context's cache can be evicted, else the reason why it cannot."""
    reason = ctypes.create_string_buffer(512)
    status = lib.supported(ctx, reason, len(reason))
    if status == OK:
        return None
    return reason.value.decode("utf-8", "replace") or status_text(status)


def raise_interrupt(callback: Any) -> None:
    """Raise the KeyboardInterrupt, or its like, that came while a policy selected, if there was one."""
    interrupt = getattr(callback, "interrupt", None)
    if interrupt is not None:
        callback.interrupt = None
        raise interrupt


def enable(ctx: int, config: DGEConfig) -> Any:
    """Switch eviction on for a context; raises DGEError, or ValueError where `head_budgets` does not fit the model or
    nothing can be written to `park_dir`.

    Returns
    -------
    object
        What the library refers to; keep it as long as the context.
    """
    _params.check_park_dir(config)
    callback = None if isinstance(config.policy, str) else _params.select_callback(config.policy)
    params = _params.to_c(config, callback)
    if not isinstance(config.head_budgets, str):
        _check_heads(ctx, config.head_budgets)
    # queries are held for as many tokens, and no prompt is longer
    n_ctx = llama_cpp.llama_n_ctx(ctx)
    params.draft_tokens = min(config.draft_tokens, n_ctx)
    params.window = min(config.window, n_ctx)
    _check("enabling eviction", lib.enable(ctx, ctypes.byref(params)))
    return callback


def _check_heads(ctx: int, head_budgets: Sequence[Sequence[int]]) -> None:
    shape = [n_head_kv(ctx, layer) for layer in layers(ctx)]
    given = [len(heads) for heads in head_budgets]
    if given != shape:
        raise ValueError(
            f"head_budgets: {len(given)} layers with {given} KV heads were given, and eviction applies to "
            f"{len(shape)} layers of this model with {shape} KV heads"
        )


def disable(ctx: int) -> None:
    """Switch eviction off; no sequence may be evicted. Raises DGEError."""
    _check("switching eviction off", lib.disable(ctx))


def seq_arm(ctx: int, seq: int, n_prompt: int) -> int:
    """State that the prompt is complete. Returns the status, negative on an error."""
    return int(lib.seq_arm(ctx, seq, n_prompt))


def seq_disarm(ctx: int, seq: int) -> None:
    """Cancel an eviction that has not happened yet; raises DGEError."""
    _check("disarming", lib.seq_disarm(ctx, seq))


def seq_evict(ctx: int, seq: int) -> bool:
    """Evict now. Returns False where nothing had to be evicted; raises DGEError."""
    return _check("evicting", lib.seq_evict(ctx, seq)) != NOTHING_TO_EVICT


def seq_reuse(ctx: int, seq: int, n_prompt: int, n_match: int) -> int:
    """Return how many of the n_match tokens in the cache a new prompt may keep, or a negative status."""
    return int(lib.seq_reuse(ctx, seq, n_prompt, n_match))


def seq_restore(ctx: int, seq: int, n_match: int) -> int:
    """Put the host copy back. Returns how many entries the sequence holds now, 0 where none fit; raises DGEError."""
    return _check("restoring the host copy", lib.seq_restore(ctx, seq, n_match))


def seq_queries(ctx: int, seq: int) -> bytearray:
    """Return captured queries and sums of a sequence, which its state does not hold; empty where there are none."""
    data = bytearray(lib.seq_get_queries(ctx, seq, None, 0))
    if data:
        buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
        if lib.seq_get_queries(ctx, seq, buffer, len(data)) != len(data):
            raise RuntimeError("what was captured could not be copied")
    return data


def seq_set_queries(ctx: int, seq: int, data: bytearray) -> None:
    """Put captured queries and sums back, of the entries that the sequence holds; raises DGEError."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
    _check("putting back what was captured", lib.seq_set_queries(ctx, seq, buffer, len(data)))


@contextlib.contextmanager
def elastic(on: bool) -> Iterator[None]:
    """Let contexts that are created inside the block begin with a small cache."""
    lib.set_elastic(on)
    try:
        yield
    finally:
        lib.set_elastic(False)


def is_elastic(ctx: int) -> bool:
    """Return whether the cache began small and grows with use."""
    return bool(lib.is_elastic(ctx))


def fingerprint(ctx: int) -> int:
    """Return a number that differs between models and types of cache."""
    return int(lib.fingerprint(ctx))


def memory(ctx: int) -> DGEMemory:
    """Return what the context uses."""
    info = _bindings.struct("memory_info")()
    lib.get_memory(ctx, ctypes.byref(info))
    return DGEMemory(**_bindings.values(info))


def estimate(ctx: int, config: DGEConfig, n_prompt: int, elastic: bool) -> DGEEstimate:
    """Return what a prompt will need under these settings; raises DGEError.

    The context may be of a model without weights (``no_alloc``); `elastic` says how it would be created.
    """
    res = _bindings.struct("estimate")()
    params = ctypes.byref(_params.to_c(config))
    _check("estimating", lib.get_estimate(ctx, params, n_prompt, elastic, ctypes.byref(res)))
    values = _bindings.values(res)
    status = values.pop("status")
    return DGEEstimate(**values, reason=None if status == OK else status_text(status))


def is_lost(ctx: int, seq: int) -> bool:
    """Return whether the library emptied a sequence because a device failed while its entries moved."""
    info = _bindings.struct("seq_info")()
    _check("reading the state of the cache", lib.get_seq_info(ctx, seq, ctypes.byref(info)))
    return bool(info.error == ERR_LOST)


def seq_stats(ctx: int, seq: int) -> DGEStats:
    """Return what is known of a sequence; raises DGEError."""
    info = _bindings.struct("seq_info")()
    _check("reading the state of the cache", lib.get_seq_info(ctx, seq, ctypes.byref(info)))
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
        n_evictions=info.n_evictions,
        rows_parked=info.n_parked,
        rows_restored=info.n_restored,
        bytes_parked=info.bytes_parked,
        seconds_park=info.t_park_us * 1e-6,
        seconds_restore=info.t_restore_us * 1e-6,
        n_recalls=info.n_recalls,
        n_checks=info.n_checks,
        rows_moved=info.n_moved,
        seconds_recall=info.t_recall_us * 1e-6,
        error=status_text(info.error) if info.error < 0 else None,
    )


def layers(ctx: int) -> list[int]:
    """Return the model layers that eviction applies to, ascending; raises DGEError."""
    n = _check("listing the layers", lib.get_layers(ctx, None, 0))
    buffer = (ctypes.c_int32 * n)()
    n = _check("listing the layers", lib.get_layers(ctx, buffer, n))
    return list(buffer)[:n]


def n_head_kv(ctx: int, layer: int) -> int:
    """Return the number of KV heads of a layer that eviction applies to; raises DGEError."""
    return _check(f"layer {layer}", lib.get_n_head_kv(ctx, layer))


def n_kept(ctx: int, seq: int, layer: int, head: int) -> int:
    """Return how many positions a layer and KV head kept; raises DGEError."""
    return _check(f"kept positions of layer {layer}, head {head}", lib.get_kept(ctx, seq, layer, head, None, 0))


def kept(ctx: int, seq: int, layer: int, head: int) -> npt.NDArray[np.int32]:
    """Return the original positions that a layer and KV head kept, shape [n], ascending; raises DGEError."""
    n = n_kept(ctx, seq, layer, head)
    positions = np.empty(n, dtype=np.int32)
    lib.get_kept(ctx, seq, layer, head, positions.ctypes.data_as(_INT32_P), n)
    return positions
