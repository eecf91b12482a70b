"""Answers requests one after the other, with a `Llama`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np

from .._states import FullStates
from ..llama import Llama
from .answer import Answer, Logits, Piece, Token, token_with_top
from .errors import bad_request
from .job import Job, Work
from .metrics import Metrics
from .prompts import Prompt
from .sampling import DeadEnd, Sampler
from .watch import SequenceWatch, observe_memory, usage

logger = logging.getLogger(__name__)


class ServerLlama(Llama):
    """A `Llama` that stops for who has gone away, and samples as the server does."""

    job: Job | None = None  # the one that is served
    sampler: Sampler | None = None
    n_evaluated = 0

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a list of tokens; between batches, stop if nobody waits."""
        for i in range(0, len(tokens), self.n_batch):
            if self.job is not None:
                self.job.check()
            part = tokens[i : i + self.n_batch]
            super().eval(part)
            self.n_evaluated += len(part)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens; it raises `Gone` if nobody waits."""
        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        try:
            while True:
                if self.job is not None:
                    self.job.check()
                try:
                    token = inner.send(sent)
                except StopIteration:
                    return
                sent = yield token
        finally:
            inner.close()

    def embed_tokens(self, tokens: Sequence[int]) -> list[float]:
        """Return a vector of length 1 for a text: the model's own, or the mean of its tokens' where it has none."""
        kind: Any = self.pooling_type()
        ctx: Any = self._ctx
        batch: Any = self._batch
        if kind == llama_cpp.LLAMA_POOLING_TYPE_RANK:
            raise bad_request("this model ranks texts, and makes no embeddings", "model")
        ctx.kv_cache_clear()
        batch.reset()
        batch.add_sequence(tokens, 0, True)
        ctx.decode(batch)
        batch.reset()
        n = self.n_embd()
        if kind == llama_cpp.LLAMA_POOLING_TYPE_NONE:
            vectors = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(self.ctx), (len(tokens), n))
            vector = vectors.mean(axis=0)
        else:
            vector = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(self.ctx, 0), (n,)).copy()
        ctx.kv_cache_clear()
        length = float(np.linalg.norm(vector))
        return [float(x) for x in (vector / length if length else vector)]

    def set_cache(self, cache: Any) -> None:
        """Set the cache for states of earlier prompts, which gets none that is evicted, whatever requests ask for."""
        super().set_cache(None if cache is None else FullStates(cache))

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # None: a chat format that decodes by itself
        return self.sampler if self.sampler is not None else super()._init_sampler(*args, **kwargs)


class SerialRunner:
    """Answers one request after the other.

    Parameters
    ----------
    llm
        The model.
    metrics
        Where it is counted what happens to the cache.
    waiting
        Returns whether another request waits.
    """

    def __init__(self, llm: ServerLlama, metrics: Metrics, waiting: Callable[[], bool]) -> None:
        self._llm = llm
        self._metrics = metrics
        self._waiting = waiting
        self._watch = SequenceWatch(metrics)
        self._job: Job | None = None
        self._observe()

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return self._job is not None

    def fits(self, job: Job) -> bool:
        """Whether another request can be begun now."""
        return self._job is None

    def configure(self, job: Job) -> None:
        """Apply the settings of a request: until the next one comes; raises APIError."""
        llm = self._llm
        llm.job = job
        if job.config != llm.dge_config:
            try:
                llm.set_dge(job.config)
            except ValueError as error:
                raise bad_request(str(error), "dge") from error
            finally:
                self._watch.forget(llm.ctx, llm.dge_enabled)

    def start(self, job: Job) -> None:
        """Begin a request."""
        self._job = job

    def step(self) -> None:
        """Answer it."""
        job, self._job = self._job, None
        assert job is not None
        try:
            job.begin()
            assert job.work is not None
            if job.work.driven is not None:
                self._drive(job, job.work.driven)
            for index, prompt in enumerate(job.work.prompts):
                self._answer(job, job.work, index, prompt)
            self._observe()
            job.done()
        except BaseException as error:
            self._observe()
            job.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._llm.job = None

    def close(self) -> None:
        """Free the model."""
        self._llm.close()

    def _answer(self, job: Job, work: Work, index: int, prompt: Prompt) -> None:
        llm = self._llm
        answer = Answer(
            llm,
            index=index,
            prompt=prompt.tokens,
            max_tokens=work.max_tokens,
            n_ctx=llm.n_ctx(),
            stops=(*work.stops, *prompt.stops),
            n_top=work.n_top,
            special=work.special,
        )
        if llm.cache is not None:
            self._from_cache(prompt.tokens)
        first = index == 0 or prompt is not work.prompts[index - 1]
        if first:  # several answers to a prompt count it once
            job.usage.n_prompt += len(prompt.tokens)
        if answer.max_tokens == 0:
            if work.echo_logprobs:
                llm.reset()
                llm.eval(prompt.tokens)
                self._echo(job, work, index, prompt)
            job.emit(answer.interrupt())
            return
        llm.sampler = Sampler(llm, work.sampling, work.sampling.seed_of(index, llm._seed))
        llm.n_evaluated = 0
        tokens = llm.generate(prompt.tokens)
        try:
            for token in tokens:
                if not answer.tokens and first:
                    job.usage.n_cached += max(0, len(prompt.tokens) - llm.n_evaluated)
                if not answer.tokens and work.echo_logprobs:
                    self._echo(job, work, index, prompt)
                piece = answer.accept(token, lambda: self._logits(answer))
                if answer.finish is None and job.interruptible and self._waiting():
                    job.emit(piece)
                    piece = answer.interrupt()
                job.emit(piece)
                if answer.finish is not None:
                    break
        except DeadEnd:
            job.emit(answer.interrupt("stop"))
        finally:
            job.usage.n_completion += len(answer.tokens)
            job.usage.dge = usage(llm.dge_stats if llm.dge_enabled else None, llm.n_tokens)
            tokens.close()
            llm.sampler.close()
            llm.sampler = llm._sampler = None
        if llm.cache is not None:
            llm.cache[prompt.tokens + answer.tokens] = llm.save_state()

    def _drive(self, job: Job, arguments: Mapping[str, Any]) -> None:
        """Let a chat format that decodes by itself answer."""
        llm = self._llm
        body: Any = llm.create_chat_completion(**arguments)
        choice, counts = body["choices"][0], body["usage"]
        job.usage.n_prompt, job.usage.n_completion = counts["prompt_tokens"], counts["completion_tokens"]
        job.usage.dge = usage(llm.dge_stats if llm.dge_enabled else None, llm.n_tokens)
        job.emit(Piece(0, finish=choice["finish_reason"], message=choice["message"]))

    def _logits(self, answer: Answer) -> Logits:
        """Those that the last token was chosen from."""
        llm = self._llm
        if llm.draft_model is not None:  # tokens that it proposes are evaluated before
            return np.asarray(llm.scores[len(answer.prompt) + len(answer.tokens) - 2])
        pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        return np.ctypeslib.as_array(pointer, (llm.n_vocab(),))

    def _echo(self, job: Job, work: Work, index: int, prompt: Prompt) -> None:
        """Emit the prompt's tokens with their probabilities."""
        llm, tokens = self._llm, prompt.tokens
        first = 1 if tokens[0] == llm.token_bos() else 0
        made = []
        for i in range(first, len(tokens)):
            data = llm.detokenize([tokens[i]], prev_tokens=tokens[:i], special=True)
            if i == 0:
                made.append(Token(tokens[i], data))
            else:
                made.append(token_with_top(llm, tokens[i], data, llm.scores[i - 1], work.n_top or 0))
        job.emit(Piece(index, prompt.text, made))

    def _from_cache(self, prompt: list[int]) -> None:
        """Load the state of an earlier prompt that begins as this one does, if that saves more than what is held."""
        llm = self._llm
        try:
            assert llm.cache is not None
            state = llm.cache[prompt]
        except KeyError:
            return
        held = llm.longest_token_prefix(llm._input_ids.tolist(), prompt)
        if llm.longest_token_prefix(state.input_ids[: state.n_tokens].tolist(), prompt) > held:
            llm.load_state(state)

    def _observe(self) -> None:
        llm = self._llm
        if llm.ctx is not None:
            self._watch.observe(llm.ctx, llm.dge_enabled)
            observe_memory(self._metrics, llm.ctx)
