"""Answers several requests at once: each is a sequence of one context, and all are decoded in one batch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from .. import _native
from ..config import DGEConfig
from .answer import Answer
from .context import DecodeError, ManyContext
from .errors import APIError, bad_request
from .job import Job
from .metrics import Metrics
from .sampling import DeadEnd, Sampler
from .settings import ModelSettings
from .watch import SequenceWatch, observe_memory, usage

logger = logging.getLogger(__name__)

#: Of a batch, this part may be tokens of prompts while other conversations wait for their next token.
_SHARE = 4
#: Tokens that a prompt must share with what a sequence holds, to be worth more than an older sequence's room.
_LEAST_MATCH = 8


@dataclass
class _Slot:
    """A sequence, and who uses it."""

    seq: int
    watch: SequenceWatch
    tokens: list[int] = field(default_factory=list)  # what the cache holds
    last: int | None = None  # the last token of its answer, which the cache does not hold
    config: DGEConfig | None = None  # of the prompt that it holds
    used: int = 0
    job: Job | None = None
    index: int = 0
    answer: Answer | None = None
    sampler: Sampler | None = None
    pending: list[int] = field(default_factory=list)  # to be evaluated: the rest of the prompt, or the last token
    error: str | None = None

    @property
    def prefills(self) -> bool:
        """Whether its prompt is not complete."""
        return self.answer is not None and not self.answer.tokens

    def match(self, prompt: list[int]) -> int:
        """Tokens that a prompt shares with what the cache holds."""
        pairs = zip(self.tokens, prompt)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(prompt)))


class BatchRunner:
    """Answers several requests at once.

    Parameters
    ----------
    llm
        A `Llama` of the model, for its vocabulary.
    settings
        Of the model.
    n_ctx
        Tokens of a conversation.
    metrics
        Where it is counted what happens to the cache.

    Raises
    ------
    ValueError
        As `ManyContext`.
    """

    def __init__(self, llm: Any, settings: ModelSettings, n_ctx: int, metrics: Metrics) -> None:
        self._llm = llm
        self._n_ctx = n_ctx
        self._n_batch = max(settings.n_batch, settings.parallel)
        self._metrics = metrics
        self._many = ManyContext(
            llm,
            n_seq=settings.parallel,
            n_ctx=n_ctx,
            n_batch=self._n_batch,
            n_ubatch=settings.n_ubatch,
            config=settings.dge_config,
        )
        self._slots = [_Slot(i, SequenceWatch(metrics, i)) for i in range(settings.parallel)]
        self._clock = 0
        observe_memory(metrics, self._many.ctx)

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return any(slot.job is not None for slot in self._slots)

    def fits(self, job: Job) -> bool:
        """Whether another request can be begun now: a sequence is free, and no other settings are in use."""
        free = any(slot.job is None for slot in self._slots)
        return free and (not self.busy or job.config in (None, self._many.config))

    def configure(self, job: Job) -> None:
        """Apply the settings of a request that fits; raises APIError."""
        if job.config is None or job.config == self._many.config:
            return
        try:
            self._many.enable(job.config)
        except (ValueError, _native.DGEError) as error:
            raise bad_request(str(error), "dge") from error

    def start(self, job: Job) -> None:
        """Begin a request, in the sequence that holds most of its prompt, or else in the one that was used least."""
        assert job.work is not None
        prompt = job.work.prompts[0].tokens
        free = [slot for slot in self._slots if slot.job is None]
        best = max(free, key=lambda slot: slot.match(prompt))
        if best.match(prompt) < _LEAST_MATCH:
            best = min(free, key=lambda slot: slot.used)
        self._clock += 1
        best.used = self._clock
        best.job, best.index = job, 0
        job.begin()
        self._try(best, self._begin)

    def step(self) -> None:
        """Evaluate one batch: the next token of each conversation, and a part of each prompt."""
        for slot in self._slots:
            if slot.job is not None and slot.job.gone:
                self._try(slot, lambda slot: slot.job.check() if slot.job is not None else None)
        rows, ends, sizes = self._assemble()
        if not rows:
            return
        try:
            self._many.decode(rows)
        except DecodeError as error:
            self._recover(error, [slot for slot in self._slots if slot.seq in sizes])
            return
        for slot in self._slots:
            n = sizes.get(slot.seq, 0)
            slot.tokens += slot.pending[:n]
            del slot.pending[:n]
        for slot, row in ends:
            self._try(slot, lambda slot, row=row: self._advance(slot, row))

    def close(self) -> None:
        """Free the model."""
        for slot in self._slots:
            if slot.sampler is not None:
                slot.sampler.close()
        self._many.close()
        self._llm.close()

    def _assemble(self) -> tuple[list[tuple[int, int, int, bool]], list[tuple[_Slot, int]], dict[int, int]]:
        """Return the rows of a batch, the slots that get a token of it and where, and how many tokens each has."""
        active = [slot for slot in self._slots if slot.pending]
        decoding = [slot for slot in active if not slot.prefills]
        prompts = [slot for slot in active if slot.prefills]
        room = self._n_batch - len(decoding)
        if decoding:
            room = min(room, max(1, self._n_batch // _SHARE))
        rows: list[tuple[int, int, int, bool]] = []
        ends: list[tuple[_Slot, int]] = []
        sizes: dict[int, int] = {}
        # the shortest first: what it leaves of its share goes to the others
        for i, slot in enumerate([*decoding, *sorted(prompts, key=lambda slot: len(slot.pending))]):
            n = 1
            if slot.prefills:
                n = min(len(slot.pending), max(1, room // (len(active) - i)), room)
                room -= n
            if n <= 0:
                continue
            start = len(slot.tokens)
            complete = n == len(slot.pending)
            for j, token in enumerate(slot.pending[:n]):
                rows.append((token, start + j, slot.seq, complete and j == n - 1))
            sizes[slot.seq] = n
            if complete:
                ends.append((slot, len(rows) - 1))
        return rows, ends, sizes

    def _begin(self, slot: _Slot) -> None:
        """Begin the next answer of a request."""
        job = slot.job
        assert job is not None and job.work is not None
        work = job.work
        prompt = work.prompts[slot.index]
        slot.answer = Answer(
            self._llm,
            index=slot.index,
            prompt=prompt.tokens,
            max_tokens=work.max_tokens,
            n_ctx=self._n_ctx,
            stops=(*work.stops, *prompt.stops),
            n_top=work.n_top,
            special=work.special,
        )
        first = slot.index == 0 or prompt is not work.prompts[slot.index - 1]
        same = slot.config == job.config
        n = self._many.reuse(slot.seq, slot.tokens, slot.last, prompt.tokens, same)
        if first:  # several answers to a prompt count it once
            job.usage.n_prompt += len(prompt.tokens)
            job.usage.n_cached += n
        slot.tokens, slot.pending = prompt.tokens[:n], prompt.tokens[n:]
        slot.last, slot.config, slot.error = None, job.config, None
        if slot.answer.max_tokens == 0:
            slot.pending = []
            job.emit(slot.answer.interrupt())
            self._finished(slot)
            return
        seed = work.sampling.seed_of(slot.index, self._llm._seed)
        slot.sampler = Sampler(self._llm, work.sampling, seed)

    def _advance(self, slot: _Slot, row: int) -> None:
        """Choose the token after a row of the batch."""
        job, answer = slot.job, slot.answer
        assert job is not None and answer is not None and slot.sampler is not None
        if slot.prefills and job.config is not None and self._many.config is not None:
            slot.error = self._many.arm(slot.seq, len(slot.tokens))
        try:
            token = slot.sampler.sample(self._many.ctx, row)
        except DeadEnd:
            job.emit(answer.interrupt("stop"))
            self._finished(slot)
            return
        n_vocab = self._llm.n_vocab()
        ctx = self._many.ctx
        piece = answer.accept(
            token, lambda: np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, row), (n_vocab,))
        )
        job.emit(piece)
        if answer.finish is None:
            slot.pending = [token]
        else:
            slot.last = token
            self._finished(slot)

    def _finished(self, slot: _Slot) -> None:
        """Note what came of an answer, and begin the next one of its request, or end that."""
        job, answer = slot.job, slot.answer
        assert job is not None and job.work is not None and answer is not None
        self._note(slot)
        if slot.index + 1 < len(job.work.prompts):
            slot.index += 1
            self._begin(slot)
            return
        self._release(slot)
        job.done()

    def _note(self, slot: _Slot) -> None:
        job, answer = slot.job, slot.answer
        if job is None or answer is None:
            return
        on = self._many.config is not None
        job.usage.n_completion += len(answer.tokens)
        stats = _native.seq_stats(self._many.ctx, slot.seq) if on else None
        evicted = stats is not None and stats.state == "evicted"
        slot.watch.observe(self._many.ctx, on, int(evicted and job.config is not None))
        job.usage.dge = usage(stats if job.config is not None else None, len(slot.tokens))
        if slot.error is not None:
            job.usage.dge["error"] = slot.error
        observe_memory(self._metrics, self._many.ctx)
        if slot.sampler is not None:
            slot.sampler.close()
            slot.sampler = None
        slot.answer = None

    def _release(self, slot: _Slot) -> None:
        """Free a slot; what its sequence holds stays for a later prompt."""
        slot.job = slot.answer = None
        slot.pending = []

    def _try(self, slot: _Slot, action: Any) -> None:
        """Do something for a slot; an error ends its request and nobody else's."""
        job = slot.job
        try:
            action(slot)
        except BaseException as error:
            self._note(slot)
            self._release(slot)
            if job is not None:
                job.fail(error)
            if not isinstance(error, Exception):
                raise

    def _recover(self, error: DecodeError, slots: list[_Slot]) -> None:
        """After a batch that failed: end the requests that may be the reason, and let the others go on."""
        guilty = [slot for slot in slots if slot.prefills or self._lost(slot)] or slots
        for slot in slots:
            if slot not in guilty:
                # of a batch that fails some tokens may be in the cache
                n = self._many.remove(slot.seq, len(slot.tokens))
                if n < len(slot.tokens):
                    guilty.append(slot)
        for slot in guilty:
            job = slot.job
            self._note(slot)
            self._release(slot)
            self._many.remove(slot.seq, 0)
            slot.tokens, slot.last = [], None
            if job is not None:
                job.fail(APIError(503, f"the batch could not be evaluated ({error}); the server may be out of memory"))

    def _lost(self, slot: _Slot) -> bool:
        return self._many.config is not None and _native.is_lost(self._many.ctx, slot.seq)
