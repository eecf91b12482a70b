"""One answer while it is written: tokens in, text out, until it ends."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_tokenizer import LlamaTokenizer

from .._pieces import piece as token_piece

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Token:
    """A token of an answer, with its probability where that is asked for.

    Parameters
    ----------
    id
        In the vocabulary.
    data
        Its bytes, which need not be whole characters.
    logprob
        Logarithm of its probability.
    top
        The likeliest tokens in its place, each with the same.
    """

    id: int
    data: bytes
    logprob: float | None = None
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass
class Piece:
    """What an answer has grown by.

    `finish` is set in its last piece: "stop" or "length". `message` is a whole one, of a chat format that decodes by
    itself.
    """

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    message: dict[str, Any] | None = None


class Text:
    """Turns bytes into text, and holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Return the text that is certain now; `stopped` says whether a stop string was found."""
        text = self._held + self._decoder.decode(data)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        n = self._beginning(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """Return what was held back. Half a character at the end is left out."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of a text with which a stop string begins."""
        most = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(text)), most, -1):
                if text.endswith(stop[:n]):
                    most = n
                    break
        return most


def token_bytes(llm: Any, token: int, before: Callable[[], list[int]], special: bool) -> bytes:
    """Return the bytes of a token; tokenizers of other libraries need the tokens before it."""
    if isinstance(llm.tokenizer_, LlamaTokenizer):
        return token_piece(llm._model.vocab, token, special)
    return bytes(llm.detokenize([token], prev_tokens=before(), special=special))


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Return the logarithms of the probabilities."""
    shifted = logits.astype(np.float64) - float(np.max(logits))
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def token_with_top(llm: Any, token: int, data: bytes, logits: Logits, n_top: int) -> Token:
    """Return a token with its probability and the likeliest ones in its place."""
    logprobs = log_softmax(logits)
    n_top = min(n_top, len(logprobs))
    best = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    top = tuple((token_piece(llm._model.vocab, int(i), True), _finite(logprobs[i])) for i in best)
    return Token(token, data, _finite(logprobs[token]), top)


def _finite(value: float) -> float:
    return max(float(value), -9999.0)  # JSON has no infinity


class Answer:
    """One answer while it is written.

    Parameters
    ----------
    llm
        The model: a `Llama`.
    index
        Among the answers of its request.
    prompt
        Its tokens.
    max_tokens
        Tokens at most; None: to the end of the context.
    n_ctx
        Tokens of prompt and answer together.
    stops
        Strings that end it.
    n_top
        Likeliest tokens to report in each place; None: no probabilities at all.
    special
        Whether the text of control tokens belongs to the answer, as that of a tool call does.
    """

    def __init__(
        self,
        llm: Any,
        *,
        index: int,
        prompt: Sequence[int],
        max_tokens: int | None,
        n_ctx: int,
        stops: Sequence[str],
        n_top: int | None,
        special: bool = False,
    ) -> None:
        self._llm = llm
        self._index = index
        self._text = Text(stops)
        self._n_top = n_top
        self._special = special
        self._held: list[Token] = []
        room = n_ctx - len(prompt)
        self.max_tokens = room if max_tokens is None else min(max_tokens, room)
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.logprob = 0.0
        self.finish: str | None = None

    def accept(self, token: int, logits: Callable[[], Logits]) -> Piece:
        """Take the next token, and return what it adds to the text.

        Parameters
        ----------
        token
            The token.
        logits
            Returns those that it was chosen from; called only where probabilities are asked for.
        """
        llm = self._llm
        piece = Piece(self._index)
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            return self._finished(piece, "stop")
        data = token_bytes(llm, token, lambda: self.prompt + self.tokens, self._special)
        self.tokens.append(token)
        if self._n_top is not None:
            whole = token_with_top(llm, token, data, logits(), self._n_top)
            self.logprob += whole.logprob or 0.0
            self._held.append(whole)
        piece.text = self._text.push(data)
        if self._text.stopped:
            self._held.clear()
            piece.finish = self.finish = "stop"
        elif len(self.tokens) >= self.max_tokens:
            return self._finished(piece, "length")
        if piece.text and not self._text._held:
            piece.tokens, self._held = self._held, []
        return piece

    def interrupt(self, finish: str = "length") -> Piece:
        """End it where it is."""
        return self._finished(Piece(self._index), finish)

    def _finished(self, piece: Piece, finish: str) -> Piece:
        piece.text += self._text.end()
        piece.tokens, self._held = self._held, []
        piece.finish = self.finish = finish
        return piece
