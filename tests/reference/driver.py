"""Thin access to llama.cpp and to llama-dge.h for tests.

Forced token sequences need the low-level API. What the header declares is in declarations.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .declarations import *  # noqa: F403, a part of this module for its users
from .declarations import ENUMS, OK, Estimate, MemoryInfo, Params, SeqInfo, dge_library, llama, raw_select
from .rounding import GGML_TYPES

Logits = npt.NDArray[np.float32]

# where the tests begin: a default of the library that changes must not change what they prove
SETTINGS: dict[str, Any] = {"scores": "draft", "draft_tokens": 2, "park": "off"}


def raw_params(**settings: Any) -> Params:
    """struct llama_dge_params with names for the enums; fields that are not given are those of SETTINGS.

    A `table` is given as [layer][head] and sets n_table; `select` as a `Select`, which leaves no policy.
    """
    params = dge_library().llama_dge_default_params()
    if "select" in settings:
        settings = {"policy": None, **settings}
    for name, value in {**SETTINGS, **settings}.items():
        if not hasattr(params, name):
            raise TypeError(f"llama_dge_params has no field {name}")
        if name == "table":
            flat = [n for heads in value for n in heads]
            params.table, params.n_table = (ctypes.c_int32 * len(flat))(*flat), len(flat)
        elif name == "select":
            # the library calls it as long as it is enabled
            params.callback = raw_select(value)
            params.select = ctypes.cast(params.callback, ctypes.c_void_p)
        elif name in ("policy", "park_dir"):
            setattr(params, name, None if value is None else str(value).encode())
        else:
            setattr(params, name, ENUMS[name][value] if isinstance(value, str) else value)
    return params


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect what the library logs."""
    import llama_cpp._logger as logger

    api, lines = llama(), []

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, _user: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    api.llama_log_set(collect, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        api.llama_log_set(logger.llama_log_callback, ctypes.c_void_p(0))


def _operations_to(names: list[str]) -> Callable[[int, bool, object], bool]:
    describe = dge_library().ggml_op_desc  # of libggml-base, on which libllama depends
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def on_node(tensor: int, ask: bool, _data: object) -> bool:
        if ask:
            names.append(describe(tensor).decode())
        return not ask

    return on_node


class NativeModel:
    """A loaded GGUF file."""

    def __init__(self, path: Path, n_gpu_layers: int = 0) -> None:
        api = llama()
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_mmap = False
        self.handle = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise RuntimeError(f"cannot load {path}")
        self.n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle)))

    def close(self) -> None:
        if self.handle:
            llama().llama_model_free(self.handle)
            self.handle = None


class Context:
    """A llama_context with the calls that the tests need. Raises RuntimeError where llama_decode() fails."""

    def __init__(
        self,
        model: NativeModel,
        *,
        n_ctx: int = 1024,
        n_batch: int = 512,
        n_ubatch: int = 512,
        flash_attn: bool = False,
        type_k: str = "f16",
        type_v: str = "f16",
        n_seq_max: int = 1,
        kv_unified: bool = True,
        n_threads: int = 1,
        elastic: bool = False,
        swa_full: bool = False,
        dge: dict[str, Any] | None = None,
        operations: list[str] | None = None,
    ) -> None:
        self.api = llama()
        self.n_vocab = model.n_vocab
        self.n_batch = n_batch
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_ubatch, n_batch)
        params.n_seq_max, params.kv_unified = n_seq_max, kv_unified
        # one thread by default: bitwise comparisons must not depend on how work is split
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = 1 if flash_attn else 0
        params.type_k, params.type_v = GGML_TYPES[type_k], GGML_TYPES[type_v]
        params.swa_full = swa_full
        if operations is not None:
            # collects the names of those that the context's own scheduler runs, the scores of an eviction included
            self._on_node = self.api.ggml_backend_sched_eval_callback(_operations_to(operations))
            params.cb_eval = self._on_node
        dge_library().llama_dge_set_elastic(elastic)
        try:
            self.handle = self.api.llama_init_from_model(model.handle, params)
        finally:
            dge_library().llama_dge_set_elastic(False)
        if not self.handle:
            raise RuntimeError("cannot create the context")
        self._batch = self.api.llama_batch_init(max(n_batch, 64), 0, 1)
        self._abort: Any = None
        self._params: Any = None
        self.rc = 0
        if dge is not None:
            self.enable(**dge)

    def close(self) -> None:
        if self.handle:
            self.api.llama_batch_free(self._batch)
            self.api.llama_free(self.handle)
            self.handle = None

    @property
    def memory(self) -> Any:
        return self.api.llama_get_memory(self.handle)

    # evaluation

    def decode_batch(self, rows: Sequence[tuple[int, int, int, bool]], check: bool = True) -> Logits:
        """One llama_decode() of rows (token, position, sequence, wants logits); returns the logits asked for."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, int(wanted)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        self.rc = int(self.api.llama_decode(self.handle, batch))
        if self.rc != 0:
            if check:
                raise RuntimeError(f"llama_decode returned {self.rc}")
            return np.zeros((0, self.n_vocab), np.float32)
        wanted_rows = [i for i, row in enumerate(rows) if row[3]]
        return np.array(
            [np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.handle, i), (self.n_vocab,)) for i in wanted_rows]
        ).reshape(len(wanted_rows), self.n_vocab)

    def decode(
        self, tokens: Sequence[int], seq: int = 0, pos: int | None = None, every: bool = True, check: bool = True
    ) -> Logits:
        """Evaluate tokens at the next positions in pieces of n_batch; logits of all of them, or of the last."""
        if pos is None:
            pos = self.pos_max(seq) + 1
        pieces = []
        for start in range(0, len(tokens), self.n_batch):
            piece = tokens[start : start + self.n_batch]
            rows = [
                (int(token), pos + start + i, seq, every or start + i == len(tokens) - 1)
                for i, token in enumerate(piece)
            ]
            pieces.append(self.decode_batch(rows, check))
        return np.concatenate(pieces)

    def set_abort(self, function: Any) -> None:
        """Install an abort callback (a callable without arguments), or remove it with None."""
        if function is None:
            self._abort = self.api.ggml_abort_callback(0)
        else:
            self._abort = self.api.ggml_abort_callback(lambda _data: bool(function()))
        self.api.llama_set_abort_callback(self.handle, self._abort, None)

    # memory

    def pos_max(self, seq: int = 0) -> int:
        return int(self.api.llama_memory_seq_pos_max(self.memory, seq))

    def pos_min(self, seq: int = 0) -> int:
        return int(self.api.llama_memory_seq_pos_min(self.memory, seq))

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return bool(self.api.llama_memory_seq_rm(self.memory, seq, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.api.llama_memory_seq_cp(self.memory, src, dst, p0, p1)

    def seq_keep(self, seq: int) -> None:
        self.api.llama_memory_seq_keep(self.memory, seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.api.llama_memory_seq_add(self.memory, seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.api.llama_memory_seq_div(self.memory, seq, p0, p1, divisor)

    def can_shift(self) -> bool:
        return bool(self.api.llama_memory_can_shift(self.memory))

    def clear(self, data: bool = True) -> None:
        self.api.llama_memory_clear(self.memory, data)

    # states

    def state(self) -> bytes:
        size = self.api.llama_state_get_size(self.handle)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: self.api.llama_state_get_data(self.handle, buffer, size)])

    def state_load(self, data: bytes) -> int:
        """Returns the bytes read, 0 on failure."""
        buffer = (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(data or b"\0")
        return int(self.api.llama_state_set_data(self.handle, buffer, len(data)))

    def seq_state(self, seq: int = 0) -> bytes:
        size = self.api.llama_state_seq_get_size(self.handle, seq)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: self.api.llama_state_seq_get_data(self.handle, buffer, size, seq)])

    def seq_state_load(self, data: bytes, seq: int = 0) -> int:
        buffer = (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(data or b"\0")
        return int(self.api.llama_state_seq_set_data(self.handle, buffer, len(data), seq))

    # eviction

    def enable(self, check: bool = True, **settings: Any) -> int:
        """llama_dge_enable() with the settings of raw_params()."""
        params = raw_params(**settings)
        rc = int(dge_library().llama_dge_enable(self.handle, ctypes.byref(params)))
        if rc == OK:
            self._params = params  # and the callback in it
        if check and rc != OK:
            raise RuntimeError(f"llama_dge_enable: {self.status(rc)}")
        return rc

    def disable(self) -> int:
        return int(dge_library().llama_dge_disable(self.handle))

    def status(self, rc: int) -> str:
        return f"{rc} ({dge_library().llama_dge_status_str(rc).decode()})"

    def supported(self) -> tuple[int, str]:
        reason = ctypes.create_string_buffer(256)
        rc = int(dge_library().llama_dge_supported(self.handle, reason, len(reason)))
        return rc, reason.value.decode()

    def arm(self, n_prompt: int, seq: int = 0) -> int:
        return int(dge_library().llama_dge_seq_arm(self.handle, seq, n_prompt))

    def disarm(self, seq: int = 0) -> int:
        return int(dge_library().llama_dge_seq_disarm(self.handle, seq))

    def evict(self, seq: int = 0) -> int:
        return int(dge_library().llama_dge_seq_evict(self.handle, seq))

    def reuse(self, n_prompt: int, n_match: int, seq: int = 0) -> int:
        return int(dge_library().llama_dge_seq_reuse(self.handle, seq, n_prompt, n_match))

    def info(self, seq: int = 0) -> dict[str, int]:
        info = SeqInfo()
        rc = int(dge_library().llama_dge_get_seq_info(self.handle, seq, ctypes.byref(info)))
        if rc != OK:
            raise RuntimeError(f"llama_dge_get_seq_info: {self.status(rc)}")
        return info.as_dict()

    def estimate(self, n_prompt: int, elastic: bool = False, **settings: Any) -> dict[str, int]:
        """llama_dge_get_estimate() with the settings of raw_params()."""
        found, params = Estimate(), raw_params(**settings)
        rc = int(
            dge_library().llama_dge_get_estimate(
                self.handle, ctypes.byref(params), n_prompt, elastic, ctypes.byref(found)
            )
        )
        if rc != OK:
            raise RuntimeError(f"llama_dge_get_estimate: {self.status(rc)}")
        return found.as_dict()

    def layers(self) -> list[int]:
        lib = dge_library()
        n = int(lib.llama_dge_get_layers(self.handle, None, 0))
        found = (ctypes.c_int32 * n)()
        if lib.llama_dge_get_layers(self.handle, found, n) != n:
            raise RuntimeError("llama_dge_get_layers is not consistent")
        return list(found)

    def kept_of(self, il: int, ih: int, seq: int = 0) -> npt.NDArray[np.int32]:
        lib = dge_library()
        n = int(lib.llama_dge_get_kept(self.handle, seq, il, ih, None, 0))
        if n < 0:
            raise RuntimeError(f"llama_dge_get_kept: {self.status(n)}")
        found = (ctypes.c_int32 * n)()
        if lib.llama_dge_get_kept(self.handle, seq, il, ih, found, n) != n:
            raise RuntimeError("llama_dge_get_kept is not consistent")
        return np.array(found, dtype=np.int32)

    def kept(self, seq: int = 0) -> list[list[npt.NDArray[np.int32]]]:
        """Kept positions [layer][head] of all layers that were evicted."""
        lib = dge_library()
        return [
            [self.kept_of(il, ih, seq) for ih in range(lib.llama_dge_get_n_head_kv(self.handle, il))]
            for il in self.layers()
        ]

    def poison(self, pattern: int) -> int:
        return int(dge_library().llama_dge_debug_poison(self.handle, pattern))

    def debug_seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return bool(dge_library().llama_dge_debug_seq_rm(self.handle, seq, p0, p1))

    def restore(self, n_match: int, seq: int = 0) -> int:
        return int(dge_library().llama_dge_seq_restore(self.handle, seq, n_match))

    def queries(self, seq: int = 0) -> bytes:
        lib = dge_library()
        size = lib.llama_dge_seq_get_queries(self.handle, seq, None, 0)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        assert size == 0 or lib.llama_dge_seq_get_queries(self.handle, seq, buffer, size - 1) == 0
        assert lib.llama_dge_seq_get_queries(self.handle, seq, buffer, size) == size
        return bytes(buffer[:size])

    def set_queries(self, data: bytes, seq: int = 0) -> int:
        buffer = (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(data or b"\0")
        return int(dge_library().llama_dge_seq_set_queries(self.handle, seq, buffer, len(data)))

    def memory_info(self) -> dict[str, int]:
        info = MemoryInfo()
        dge_library().llama_dge_get_memory(self.handle, ctypes.byref(info))
        return info.as_dict()


def fail_alloc(n: int) -> None:
    """Let the n-th allocation of the library from now on fail; 0: none."""
    dge_library().llama_dge_debug_fail_alloc(n)


@contextmanager
def failing_alloc(n: int) -> Iterator[None]:
    fail_alloc(n)
    try:
        yield
    finally:
        fail_alloc(0)
