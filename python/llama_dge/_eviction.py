"""When a prompt is cut, what a later one may build on, and what comes back: the private half of `Llama`."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from . import _native
from ._turns import Turns
from .config import DGEConfig

logger = logging.getLogger(__name__)

SEQ = 0  # the one sequence that llama_cpp.Llama generates in


class EvictingLlama(llama_cpp.Llama):
    """The steps of an eviction around those of llama_cpp.Llama; `Llama` puts them in their places."""

    dge_config: DGEConfig | None
    _dge_on: bool
    _dge_callback: Any
    _dge_warned: set[str]
    _dge_arm_error: str | None
    _dge_last_token: int | None
    _dge_text_end: int
    _dge_turns: Turns
    _dge_cut_by: DGEConfig | None

    def _dge_enable(self, config: DGEConfig) -> None:
        reason = _native.supported(self.ctx)
        if reason is None:
            try:
                self._dge_callback = _native.enable(self.ctx, config)
            except _native.DGEError as error:
                if config.strict:
                    raise
                reason = str(error)
        elif config.strict:
            raise ValueError(f"dge: this model cannot be cut: {reason} (strict=False runs it without eviction)")
        if reason is not None:
            self._dge_switch_off()
            self._dge_warn("supported", f"running without eviction: {reason}")
            return
        self._dge_on = True
        line = f"eviction after {config.draft_tokens} tokens, {config}"
        logger.info(line)
        if self.verbose:
            print(f"llama_dge: {line}", file=sys.stderr)  # noqa: T201  # as the stock class does

    def _dge_warn_budget(self, config: DGEConfig) -> None:
        never = isinstance(config.budget, int) and config.budget >= self.n_ctx() and not config.recall
        if self._dge_on and never and isinstance(config.head_budgets, str):
            n_ctx = self.n_ctx()
            self._dge_warn("budget", f"budget={config.budget} is not less than n_ctx={n_ctx}: nothing will be cut")

    def _dge_switch_off(self) -> None:
        if not self._dge_on:
            return
        if self.n_tokens > 0 and _native.seq_stats(self.ctx, SEQ).state == "evicted":
            self._dge_clear()
        _native.disable(self.ctx)
        self._dge_on = False
        self._dge_callback = None

    def _dge_warn(self, kind: str, text: str) -> None:
        # once per instance and kind, whatever the warning filters say
        if kind not in self._dge_warned:
            self._dge_warned.add(kind)
            warnings.warn(f"llama_dge: {text}", RuntimeWarning, stacklevel=3)

    def _dge_eval(self, tokens: Sequence[int]) -> None:
        start = self.n_tokens
        # n_tokens was moved back, by the caller or for a prefix: the stock method ignores that rows were missing there
        if 0 < start < self._dge_text_end and start <= _native.seq_stats(self.ctx, SEQ).boundary:
            before = self._input_ids.tolist()
            start = self._dge_restore(start)
            tokens = before[start:] + list(tokens)
        try:
            super().eval(tokens)
            _native.raise_interrupt(self._dge_callback)
        except BaseException as error:
            lost = _native.is_lost(self.ctx, SEQ)
            self._dge_clear()  # some of the batch may be in the cache, and a cut may have been due in it
            if lost and isinstance(error, RuntimeError):  # "llama_decode returned -2" explains nothing
                raise _native.DGEError("llama_decode failed", _native.ERR_LOST) from error
            raise
        if start <= self._dge_text_end:
            self._dge_text_end = self.n_tokens

    @contextlib.contextmanager
    def _dge_without_proposals(self, on: bool) -> Iterator[None]:
        """Leave the draft model out: its tokens would take the place of queries that the cut needs."""
        draft_model = self.draft_model
        if on:
            self.draft_model = None
        try:
            yield
        finally:
            self.draft_model = draft_model

    def _dge_prepare(self, tokens: list[int], reset: bool) -> None:
        """Decide, before a prompt is evaluated, how much of the cache it may build on."""
        self._dge_arm_error = None
        if self.n_tokens == 0:
            return
        state = _native.seq_stats(self.ctx, SEQ).state
        if state == "armed":
            _native.seq_disarm(self.ctx, SEQ)
        if not reset:
            return

        n = min(self.n_tokens, len(tokens))
        same = self._input_ids[:n] == np.asarray(tokens[:n], dtype=np.intc)
        match = n if same.all() else int(np.argmin(same))
        if self._dge_text_end < match == self.n_tokens == len(tokens):
            return  # a chat handler put images into the cache and hands over the whole prompt

        if state == "evicted":
            config = self._dge_config_in_force
            if config.new_turn == "append":
                # the stock class reuses the prefix where the library can remove what follows it, and starts over
                # through reset() where it cannot
                return
            # The prompt is what the cache holds, or that and the last token of the answer, which is not in the cache
            # yet: nothing new is asked, the answer goes on. Not where set_dge asks for another cut since.
            rest = tokens[match:]
            same_cut = self._dge_cut_by in (None, config)
            if same_cut and match == self.n_tokens and rest in ([], [self._dge_last_token]):
                return
            match = self._dge_restore(match)

        # The scores need the queries of the prompt's last tokens, which were not kept if those came in an older prompt.
        reuse = max(0, _native.seq_reuse(self.ctx, SEQ, len(tokens), min(match, self._dge_text_end)))
        if reuse < match:
            self.n_tokens = reuse
            self._requires_eval = True

    def _dge_restore(self, n_match: int) -> int:
        """Make a cut sequence whole again. Returns how many of the first n_match tokens it holds now."""
        n = 0
        if self._dge_config_in_force.new_turn == "restore" and n_match > 0:
            try:
                n = _native.seq_restore(self.ctx, SEQ, n_match)
            except _native.DGEError as error:
                self._dge_warn("restore", f"the prompt is evaluated from its start: {error}")
        if n == 0:
            self._dge_clear()
            return 0
        logger.debug("%d parked rows are back", n)
        self.n_tokens = n
        self._requires_eval = True
        self._dge_text_end = min(self._dge_text_end, n)
        return n

    def _dge_arm(self) -> int | None:
        """State that the prompt is complete. Returns the number of tokens at which a cut will have been made."""
        if _native.seq_stats(self.ctx, SEQ).state == "evicted":
            return None
        if self._dge_text_end < self.n_tokens:
            self._dge_arm_error = "the prompt has images or audio"
            self._dge_warn("images", "a prompt with images or audio is not cut")
            return None
        status = _native.seq_arm(self.ctx, SEQ, self.n_tokens)
        if status < 0:
            self._dge_arm_error = _native.status_text(status)
            self._dge_warn("arm", f"this prompt is not cut: {self._dge_arm_error} (status {status})")
        if status != _native.OK:
            return None
        self._dge_cut_by = self._dge_config_in_force
        return self.n_tokens + self._dge_config_in_force.draft_tokens

    def _dge_report(self) -> None:
        stats = _native.seq_stats(self.ctx, SEQ)
        if stats.error is not None:
            self._dge_warn("evicted", f"the cut failed and the answer goes on with the full cache: {stats.error}")
        logger.debug("%s", stats)

    @property
    def _dge_config_in_force(self) -> DGEConfig:
        if self.dge_config is None:
            raise RuntimeError("eviction is off")
        return self.dge_config

    def _dge_clear(self) -> None:
        """Empty the sequence, so that neither a cut nor half a batch is left of it."""
        if self._ctx.memory is not None:
            llama_cpp.llama_memory_clear(self._ctx.memory, False)
        self.n_tokens = 0
        self._requires_eval = True
        self._dge_text_end = 0
        self._dge_arm_error = None
