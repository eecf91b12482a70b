"""The cache of a model as arms use it: prompts are read into it, states and what was captured go out and back."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .. import _native
from ..config import DGEConfig
from ..llama import Llama

SEQ = 0

Logits = npt.NDArray[np.float32]


class EvalError(RuntimeError):
    """A figure would not mean what it says."""


@dataclass
class Saved:
    """What a sequence holds, and the queries and sums that were captured of it."""

    state: Any
    captured: bytearray


class Cache:
    """One sequence of a model, of which nobody else may make use meanwhile.

    Parameters
    ----------
    llm
        A model, loaded without eviction.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        # the first tokens of the latest prompts, without sums and with them
        self._documents: dict[bool, tuple[list[int], Saved]] = {}
        llm.reset()

    @property
    def ctx(self) -> Any:
        """The context of the library."""
        return self._llm.ctx

    def begin(self, config: DGEConfig | None) -> None:
        """Empty the cache and change the settings; raises EvalError where the model is not supported."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), False)
        with warnings.catch_warnings():
            # a context is as large as prompts and answers need, and results say where nothing was evicted
            warnings.filterwarnings("ignore", message="llama_dge: budget=.* is not less than n_ctx")
            self._llm.set_dge(config)
        if config is not None and not self._llm.dge_enabled:
            raise EvalError("nothing can be evicted of this model")

    def arm(self, n_prompt: int) -> bool:
        """State that the prompt is complete. Returns whether an eviction follows; raises EvalError."""
        status = _native.seq_arm(self.ctx, SEQ, n_prompt)
        if status < 0:
            raise EvalError(f"a prompt cannot be armed: {_native.status_text(status)}")
        return status == _native.OK

    def read(self, prompt: list[int], n_head: int, shared: int, sums: bool) -> None:
        """Evaluate a prompt in an empty cache.

        Parameters
        ----------
        prompt
            Tokens.
        n_head
            Those that are not of its tail, which is a batch of its own.
        shared
            The first tokens, at most `n_head`, which are kept for the next prompt that begins with them.
        sums
            Whether the settings in force sum attention.

        Raises
        ------
        EvalError
            The library failed.
        """
        n = 0
        document = self._documents.get(sums)
        if document is not None and document[0] == prompt[: min(len(document[0]), n_head)]:
            n = len(document[0])
            self.load(document[1])
        elif shared:
            self._documents.pop(sums, None)
            self.decode(prompt[:shared])
            self._documents[sums] = prompt[:shared], self.save()
            n = shared
        self.decode(prompt[n:n_head])
        self.decode(prompt[n_head:])

    def decode(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens, in batches; raises EvalError."""
        for i in range(0, len(tokens), self._llm.n_batch):
            part = tokens[i : i + self._llm.n_batch]
            array = (llama_cpp.llama_token * len(part))(*part)
            status = llama_cpp.llama_decode(self.ctx, llama_cpp.llama_batch_get_one(array, len(part)))
            if status != 0:
                raise EvalError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self.ctx)  # steps are timed, and a device may still be at it

    def logits(self) -> Logits:
        """Return those of the last token, shape [n_vocab]."""
        pointer = llama_cpp.llama_get_logits_ith(self.ctx, -1)
        copy: Logits = np.ctypeslib.as_array(pointer, (self._llm.n_vocab(),)).copy()
        return copy

    def save(self) -> Saved:
        """Return what the cache holds; raises EvalError."""
        size = llama_cpp.llama_state_seq_get_size(self.ctx, SEQ)
        buffer = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.ctx, buffer, size, SEQ) != size:
            raise EvalError("the state of the prompt could not be copied")
        return Saved(buffer, _native.seq_queries(self.ctx, SEQ))

    def load(self, saved: Saved) -> None:
        """Put back what `save` returned, with whatever settings are in force; raises EvalError."""
        state = saved.state
        if llama_cpp.llama_state_seq_set_data(self.ctx, state, len(state), SEQ) != len(state):
            raise EvalError("the state of the prompt could not be put back")
        # the full cache alone captures nothing and has no place for it
        if saved.captured and self._llm.dge_enabled:
            _native.seq_set_queries(self.ctx, SEQ, saved.captured)

    def truncate(self, n: int) -> bool:
        """Remove the entries from position n on. Returns False, with nothing changed, where that cannot be done."""
        return bool(llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), SEQ, n, -1))

    def n_rows(self) -> int:
        """Return how many positions there are."""
        return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.ctx), SEQ)) + 1

    def close(self) -> None:
        """Empty the cache and switch eviction off, so that the model can be used again."""
        self._documents.clear()
        with contextlib.suppress(RuntimeError):
            self.begin(None)
