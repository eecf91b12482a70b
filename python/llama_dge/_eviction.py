"""When a prompt is evicted, what a later one may build on, and what is put back."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from . import _frames, _native, _troubles
from .config import DGEConfig
from .stats import DGEStats

logger = logging.getLogger(__name__)

SEQ = 0  # the one sequence that llama_cpp.Llama generates in


class Eviction:
    """Eviction in the one context of a ``llama_cpp.Llama``.

    The methods are given the instance: a reference to it would make a cycle and keep the model's memory until the next
    garbage collection.
    """

    def __init__(self, config: DGEConfig | None) -> None:
        self.config = config  # as given; eviction may be off all the same
        self.on = False
        self.last_token: int | None = None  # last token that generate() yielded
        self.text_end = 0  # positions below were filled by eval(), that is by tokens and not by images
        self.evicted_by: DGEConfig | None = None  # settings of the latest eviction; None where a state brought it
        self._callback: Any = None  # the library calls it as long as the context lives
        self._arm_error: str | None = None
        self._n_prompt = 0  # of the latest prompt that was armed
        self._warned: set[str] = set()

    # on and off

    def enable(self, llm: llama_cpp.Llama, config: DGEConfig) -> None:
        """Switch eviction on, or change its settings; raises ValueError and DGEError."""
        reason = _native.supported(llm.ctx)
        if reason is None:
            try:
                self._callback = _native.enable(llm.ctx, config)
            except _native.DGEError as error:
                if config.strict:
                    raise
                reason = str(error)
        elif config.strict:
            raise ValueError(f"dge: this model is not supported: {reason} (strict=False runs it without eviction)")
        if reason is not None:
            self.disable(llm)
            self.config = config
            self.warn("supported", f"running without eviction: {reason}")
            return
        self.on, self.config = True, config
        if llm.verbose:
            logger.info("eviction after %d tokens, ranked by %s: %s", config.draft_tokens, config.ranks_by, config)

    def disable(self, llm: llama_cpp.Llama) -> None:
        """Switch eviction off, which empties an evicted cache."""
        self.config = None
        if not self.on:
            return
        if llm.n_tokens > 0 and self.state(llm) == "evicted":
            self.clear(llm)
        _native.disable(llm.ctx)
        self.on = False
        self._callback = None

    def warn_budget(self, llm: llama_cpp.Llama) -> None:
        """Warn where no prompt can be longer than the budget."""
        if not self.on or self.config is None or self.config.recall or not isinstance(self.config.head_budgets, str):
            return
        budget, n_ctx = self.config.budget, llm.n_ctx()
        if isinstance(budget, int) and budget >= n_ctx:
            self.warn("budget", f"budget={budget} is not less than n_ctx={n_ctx}: nothing will be evicted")

    def warn(self, kind: str, text: str) -> None:
        """Warn once per instance and kind, whatever the warning filters say."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"llama_dge: {text}", RuntimeWarning, stacklevel=_frames.caller()[1])

    # what is known

    @property
    def _settings(self) -> DGEConfig:
        if self.config is None:
            raise RuntimeError("eviction is off")
        return self.config

    def state(self, llm: llama_cpp.Llama) -> str:
        """Return the state of the sequence."""
        return _native.seq_stats(llm.ctx, SEQ).state

    def stats(self, llm: llama_cpp.Llama) -> DGEStats:
        """Return what is known of the sequence."""
        stats = _native.seq_stats(llm.ctx, SEQ)
        if stats.error is None and self._arm_error is not None:
            stats = dataclasses.replace(stats, error=self._arm_error)
        if stats.state == "evicted":
            rows = tuple(
                tuple(_native.n_kept(llm.ctx, SEQ, layer, head) for head in range(_native.n_head_kv(llm.ctx, layer)))
                for layer in _native.layers(llm.ctx)
            )
            stats = dataclasses.replace(stats, rows_by_head=rows)
        return stats

    # before and after an eval

    def eval(self, llm: llama_cpp.Llama, tokens: Sequence[int], stock_eval: Callable[[Sequence[int]], None]) -> None:
        """Evaluate tokens; where that fails, empty the sequence."""
        start = llm.n_tokens
        # n_tokens was moved back, by the caller or for a prefix: the stock method does not know what was evicted
        if 0 < start < self.text_end and start <= _native.seq_stats(llm.ctx, SEQ).boundary:
            before = llm._input_ids.tolist()
            start = self.restore(llm, start)
            tokens = before[start:] + list(tokens)
        try:
            stock_eval(tokens)
            _native.raise_interrupt(self._callback)
        except BaseException as error:
            lost = _native.is_lost(llm.ctx, SEQ)
            self.clear(llm)  # some of the batch may be in the cache, and an eviction may have been due in it
            if lost and isinstance(error, RuntimeError):  # "llama_decode returned -2" explains nothing
                raise _native.DGEError("llama_decode failed", _native.ERR_LOST) from error
            raise
        self.note_eval(llm, start)

    def note_eval(self, llm: llama_cpp.Llama, start: int) -> None:
        """Note that tokens were evaluated from a position on."""
        if start <= self.text_end:
            self.text_end = llm.n_tokens

    def clear(self, llm: llama_cpp.Llama) -> None:
        """Empty the sequence, so that neither an eviction nor half a batch is left of it."""
        if llm._ctx.memory is not None:
            llama_cpp.llama_memory_clear(llm._ctx.memory, False)
        llm.n_tokens = 0
        llm._requires_eval = True
        self.text_end = 0
        self._arm_error = None

    # a prompt

    def prepare(self, llm: llama_cpp.Llama, tokens: list[int], reset: bool) -> None:
        """Decide, before a prompt is evaluated, how much of the cache it may build on."""
        self._arm_error = None
        if llm.n_tokens == 0:
            return
        state = self.state(llm)
        if state == "armed":
            _native.seq_disarm(llm.ctx, SEQ)
        if not reset:
            return

        n = min(llm.n_tokens, len(tokens))
        same = llm._input_ids[:n] == np.asarray(tokens[:n], dtype=np.intc)
        match = n if same.all() else int(np.argmin(same))
        if self.text_end < match == llm.n_tokens == len(tokens):
            return  # a chat handler put images into the cache and hands over the whole prompt

        if state == "evicted":
            if self._settings.new_turn == "append":
                # the stock class reuses the prefix where the library can remove what follows it, and starts over
                # through reset() where it cannot
                return
            # The prompt is what the cache holds, or that and the last token of the answer, which is not in the cache
            # yet: nothing new is asked, the answer goes on. Not where set_dge asks for another eviction since.
            rest = tokens[match:]
            same_settings = self.evicted_by in (None, self.config)
            if same_settings and match == llm.n_tokens and rest in ([], [self.last_token]):
                return
            match = self.restore(llm, match)

        # The scores need the queries of the prompt's last tokens, which were not kept if those came in an older prompt.
        reuse = max(0, _native.seq_reuse(llm.ctx, SEQ, len(tokens), min(match, self.text_end)))
        if reuse < match:
            llm.n_tokens = reuse
            llm._requires_eval = True

    def restore(self, llm: llama_cpp.Llama, n_match: int) -> int:
        """Put the host copy back. Returns how many of the first n_match tokens the cache holds now."""
        n = 0
        if self._settings.new_turn == "restore" and n_match > 0:
            try:
                n = _native.seq_restore(llm.ctx, SEQ, n_match)
            except _native.DGEError as error:
                self.warn("restore", f"the prompt is evaluated from its start: {error}")
        if n == 0:
            self.clear(llm)
            return 0
        logger.debug("%d entries are restored", n)
        llm.n_tokens = n
        llm._requires_eval = True
        self.text_end = min(self.text_end, n)
        return n

    def arm(self, llm: llama_cpp.Llama) -> int | None:
        """State that the prompt is complete. Returns the number of tokens at which it will have been evicted."""
        if self.state(llm) == "evicted":
            return None
        if self.text_end < llm.n_tokens:
            self._arm_error = "the prompt has images or audio"
            self.warn("images", "a prompt with images or audio is not evicted")
            return None
        status = _native.seq_arm(llm.ctx, SEQ, llm.n_tokens)
        if status < 0:
            self._arm_error = _native.status_text(status)
            self.warn("arm", f"this prompt is not evicted: {self._arm_error} (status {status})")
        if status != _native.OK:
            return None
        self.evicted_by = self.config
        self._n_prompt = llm.n_tokens
        return llm.n_tokens + self._settings.draft_tokens

    def report(self, llm: llama_cpp.Llama) -> None:
        """Log what an eviction did that was due; warn once where it failed."""
        stats = _native.seq_stats(llm.ctx, SEQ)
        if stats.error is not None:
            why = _troubles.of_host_copy(llm.ctx, self._settings, stats.error, self._n_prompt) or stats.error
            self.warn("evict", f"the eviction failed and the answer goes on with the full cache: {why}")
        logger.debug("%s", stats)

    def evict(self, llm: llama_cpp.Llama) -> bool:
        """Evict now. Returns False where nothing had to be evicted."""
        if self.text_end < llm.n_tokens:
            raise RuntimeError("evict: a prompt with images or audio cannot be evicted")
        try:
            evicted = _native.seq_evict(llm.ctx, SEQ)
        except _native.DGEError as error:
            if error.status == _native.ERR_LOST:
                self.clear(llm)
            _native.raise_interrupt(self._callback)
            why = _troubles.of_host_copy(llm.ctx, self._settings, _native.status_text(error.status), llm.n_tokens)
            if why is not None:
                raise _native.DGEError(f"evicting: {why}", error.status) from error
            raise
        self.evicted_by = self.config
        return evicted

    # states

    def to_note(self, llm: llama_cpp.Llama) -> dict[str, Any]:
        """Return what a saved state has to hold beside the library's part."""
        return {
            "evicted": llm.n_tokens > 0 and self.state(llm) == "evicted",
            "text_end": self.text_end,
            "last_token": self.last_token,
            "model": _native.fingerprint(llm.ctx),
        }

    def take_over(self, llm: llama_cpp.Llama, noted: dict[str, Any]) -> None:
        """Go on from a state that was loaded."""
        self.text_end = noted.get("text_end", llm.n_tokens)
        self.last_token = noted.get("last_token")
        self.evicted_by = None
        if self.on and self._settings.recall and noted.get("evicted"):
            self.warn(
                "recall",
                f"recall={self._settings.recall!r}: a saved state has no host copy, so that no entries are selected "
                "again until the next prompt is evicted",
            )
