"""A conversation with a model, and what each of its turns took."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _native
from ..llama import Llama
from ._common import CLIError, Progress

_SLOW = 1.0  # seconds after which progress of a prefill is shown


class Interrupt:
    """Ctrl-C, noticed where the cache is whole: an exception in the middle of a decode would empty it."""

    def __init__(self) -> None:
        self.seen = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Note the first Ctrl-C in the block; the second one raises KeyboardInterrupt."""
        self.seen = False
        if threading.current_thread() is not threading.main_thread():
            yield  # signals arrive there only
            return

        def note(signum: int, frame: object) -> None:
            if self.seen:
                raise KeyboardInterrupt
            self.seen = True

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass
class Turn:
    """What the last prompt and its answer took. Seconds are wall-clock time."""

    n_prompt: int = 0
    n_evaluated: int = 0  # of the prompt; the others were in the cache, or were restored
    n_tokens: int = 0  # of the answer
    seconds_prompt: float = 0.0  # until the first token, restore included
    seconds_answer: float = 0.0  # from the first token on, the eviction included


class ChatLlama(Llama):
    """A `Llama` that counts what it evaluates, shows how far a prefill is and stops at Ctrl-C."""

    turn = Turn()
    interrupt = Interrupt()
    progress = Progress(False)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens, in steps of n_batch."""
        if self.turn.n_tokens > 0:
            super().eval(tokens)
            return
        start = time.perf_counter()
        for i in range(0, len(tokens), self.n_batch):
            if self.interrupt.seen:
                raise KeyboardInterrupt
            if time.perf_counter() - start > _SLOW:
                self.progress.update(f"prefill {i:,} of {len(tokens):,} tokens")
            step = tokens[i : i + self.n_batch]
            super().eval(step)
            self.turn.n_evaluated += len(step)
        self.progress.clear()  # before the answer begins

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens from a prompt."""
        self.turn = Turn(n_prompt=len(tokens))
        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        start = first = time.perf_counter()
        while True:
            try:
                token = inner.send(sent)
            except StopIteration:
                return
            now = time.perf_counter()
            if self.turn.n_tokens == 0:
                first = now
                self.turn.seconds_prompt = now - start
            self.turn.n_tokens += 1
            self.turn.seconds_answer = now - first
            sent = yield token


class Conversation:
    """Messages about a document, and the answers of a model.

    Parameters
    ----------
    llm
        The model.
    document
        Text that stands in front of the first question, or None.
    max_tokens
        Length of an answer.
    temp
        Temperature, 0 takes the likeliest token.
    seed
        Of the first answer; each further one has the next.
    """

    def __init__(self, llm: ChatLlama, document: str | None, *, max_tokens: int, temp: float, seed: int) -> None:
        self._llm = llm
        self._document = document
        self._max_tokens = max_tokens
        self._temp = temp
        self._seed = seed
        self._messages: list[dict[str, str]] = []

    def __len__(self) -> int:
        """Number of questions that were answered."""
        return len(self._messages) // 2

    def reset(self) -> None:
        """Forget all questions and answers, but not the document."""
        self._messages.clear()

    def undo(self) -> None:
        """Forget the last question and its answer; raises CLIError."""
        self._last_question()
        del self._messages[-2:]

    def regenerate(self, write: Callable[[str], object], temp: float | None = None) -> str | None:
        """Answer the last question once more; otherwise as `ask`, which see."""
        question = self._last_question()
        before = self._messages[-2:]
        del self._messages[-2:]
        n = len(self._messages)
        try:
            return self._answer(question, write, temp)
        finally:
            if len(self._messages) == n:
                self._messages += before  # there is no new answer, so the old one stands

    def ask(self, question: str, write: Callable[[str], object]) -> str | None:
        """Answer a question.

        Parameters
        ----------
        question
            What the user says.
        write
            Called with each piece of the answer. After Ctrl-C the part that was written stays in the conversation.

        Returns
        -------
        str or None
            Why the answer is not complete.

        Raises
        ------
        CLIError
            The conversation does not fit into the context, or the library failed. The question is forgotten.
        """
        if not self._messages and self._document is not None:
            question = f"{self._document}\n\n{question}"
        return self._answer({"role": "user", "content": question}, write)

    def _last_question(self) -> dict[str, str]:
        if not self._messages:
            raise CLIError("there is no question yet")
        return self._messages[-2]

    def _answer(
        self, question: dict[str, str], write: Callable[[str], object], temp: float | None = None
    ) -> str | None:
        llm = self._llm
        pieces: list[str] = []
        finish = None
        llm.turn = Turn()
        interrupt = llm.interrupt
        with interrupt.caught():
            try:
                stream = llm.create_chat_completion(
                    messages=[*self._messages, question],
                    max_tokens=self._max_tokens,
                    temperature=self._temp if temp is None else temp,
                    seed=self._seed,
                    stream=True,
                )
                for chunk in stream:
                    choice = chunk["choices"][0]
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        pieces.append(piece)
                        write(piece)
                    finish = choice["finish_reason"]
                    if interrupt.seen:
                        break
                stream.close()
            except KeyboardInterrupt:
                pass
            except (ValueError, RuntimeError, _native.DGEError) as error:
                raise self._explained(error) from error
            finally:
                llm.progress.clear()
        self._seed += 1
        if not pieces and finish is None:
            raise CLIError("interrupted before the answer began: the question is forgotten")
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        if finish is None:
            return "interrupted"
        if finish != "length":
            return None
        if llm.turn.n_tokens < self._max_tokens:
            return f"--n-ctx {llm.n_ctx()} is full"
        return f"--max-tokens {self._max_tokens}"

    def _explained(self, error: Exception) -> CLIError:
        text = str(error)
        if "exceed context window" not in text:
            return CLIError(text)
        needed = "".join(c for c in text.partition(")")[0] if c.isdigit())
        return CLIError(
            f"the conversation has {needed} tokens and does not fit into --n-ctx {self._llm.n_ctx()}; "
            "/undo or /reset makes room, or start with a larger --n-ctx"
        )
