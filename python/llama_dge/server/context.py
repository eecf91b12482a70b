"""A context with several sequences, each with its own eviction: the low-level calls under `batch`."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any

import llama_cpp

from .. import _native
from ..config import DGEConfig


class DecodeError(RuntimeError):
    """llama_decode() failed; `status` is what it returned."""

    def __init__(self, status: int) -> None:
        super().__init__(f"llama_decode returned {status}")
        self.status = status


class ManyContext:
    """A context of a model whose cache several sequences share.

    Parameters
    ----------
    llm
        A `Llama` of the model, whose own context is not used; settings of the new one are its.
    n_seq
        Sequences.
    n_ctx
        Tokens of each.
    n_batch, n_ubatch
        Tokens of one call, and of one graph.
    config
        Settings of eviction, or None.

    Raises
    ------
    ValueError
        The context cannot be created, or the model cannot be evicted while `DGEConfig.strict` is True.
    """

    def __init__(
        self, llm: Any, *, n_seq: int, n_ctx: int, n_batch: int, n_ubatch: int, config: DGEConfig | None
    ) -> None:
        params = llama_cpp.llama_context_params.from_buffer_copy(llm.context_params)
        params.n_ctx, params.n_seq_max, params.kv_unified = n_seq * n_ctx, n_seq, True
        params.n_batch, params.n_ubatch = n_batch, min(n_batch, n_ubatch)
        with _native.elastic(config is not None and config.elastic):
            ctx = llama_cpp.llama_init_from_model(llm.model, params)
        if not ctx:
            raise ValueError(f"parallel={n_seq}: no memory for a context of {n_seq} x {n_ctx} tokens")
        self.ctx: Any = ctx
        self.config: DGEConfig | None = None
        self._callback: Any = None
        self._batch: Any = llama_cpp.llama_batch_init(n_batch, 0, 1)
        try:
            adapter = llm._lora_adapter
            if adapter is not None:
                adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
                if llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(llm.lora_scale)):
                    raise ValueError("the LoRA adapter does not fit")
            if config is not None:
                self._enable_first(config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free it."""
        if self.ctx is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.ctx)
            self.ctx = None

    def _enable_first(self, config: DGEConfig) -> None:
        reason = _native.supported(self.ctx)
        if reason is None:
            self.enable(config)
        elif config.strict:
            raise ValueError(f"dge: this model cannot be evicted: {reason} (strict=False runs it without eviction)")
        else:
            warnings.warn(f"llama_dge: running without eviction: {reason}", RuntimeWarning, stacklevel=2)

    def enable(self, config: DGEConfig) -> None:
        """Apply settings to evictions to come; raises ValueError or DGEError."""
        self._callback = _native.enable(self.ctx, config)
        self.config = config

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Evaluate tokens, given as token, position, sequence, and whether its logits are wanted.

        Raises
        ------
        DecodeError
            Some tokens may be in the cache: remove them.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        status = int(llama_cpp.llama_decode(self.ctx, batch))
        if status != 0:
            raise DecodeError(status)

    def remove(self, seq: int, start: int) -> int:
        """Remove a sequence's tokens from a position on, or all where that cannot be. Returns how many stay."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        if start > 0 and llama_cpp.llama_memory_seq_rm(memory, seq, start, -1):
            return start
        llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
        return 0

    def arm(self, seq: int, n_prompt: int) -> str | None:
        """State that a prompt is complete. Returns why it will not be evicted, None if it will or need not be."""
        if self.state(seq) == "evicted":  # the answer goes on
            return None
        status = _native.seq_arm(self.ctx, seq, n_prompt)
        return _native.status_text(status) if status < 0 else None

    def state(self, seq: int) -> str:
        """Return the state of a sequence, see `DGEStats.state`."""
        return "full" if self.config is None else _native.seq_stats(self.ctx, seq).state

    def reuse(self, seq: int, held: Sequence[int], last: int | None, prompt: Sequence[int], same: bool) -> int:
        """Keep what a new prompt can build on, and remove the rest.

        Parameters
        ----------
        seq
            The sequence.
        held
            Its tokens.
        last
            The last token of its answer, which it does not hold.
        prompt
            The new prompt.
        same
            Whether the settings of eviction are those of the prompt before.

        Returns
        -------
        int
            Tokens of the prompt that it holds; at least the last one is left to evaluate.
        """
        match = next((i for i, (a, b) in enumerate(zip(held, prompt)) if a != b), min(len(held), len(prompt)))
        if self.config is not None and match:
            state = self.state(seq)
            if state == "armed":
                _native.seq_disarm(self.ctx, seq)
            rest = list(prompt[match:])
            goes_on = state == "evicted" and same and match == len(held) and rest in ([], [last])
            if state == "evicted" and not goes_on:
                if self.config.new_turn == "append":
                    return self.remove(seq, min(match, len(prompt) - 1))
                match = _native.seq_restore(self.ctx, seq, match) if self.config.new_turn == "restore" else 0
            if match and not goes_on:
                match = max(0, _native.seq_reuse(self.ctx, seq, len(prompt), match))
        return self.remove(seq, min(match, len(prompt) - 1))
