"""From a question to the tokens of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_cpp._internals import LlamaModel
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from .._pieces import join

STYLES = ("auto", "chat", "completion")


@dataclass(frozen=True)
class Prompt:
    """One question to a model.

    Parameters
    ----------
    task
        Which evaluation it belongs to, such as "needle".
    set
        Which part of it, such as "numbers".
    id
        Differs between all prompts of a task.
    tokens
        What the model reads.
    expected
        Answers that are right.
    info
        Goes into the row of results as it is: length, depth, seed.
    shared
        The first tokens, which neighbours of this prompt have in common with it.
    """

    task: str
    set: str
    id: str
    tokens: tuple[int, ...]
    expected: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    shared: int = 0

    @property
    def sha256(self) -> str:
        """Hash of the tokens."""
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()


class Prompter:
    """Makes prompts for a model: with its chat template, or plain.

    Parameters
    ----------
    model
        The model; its vocabulary is enough.
    style
        "chat"; "completion"; "auto": chat where the model has a template.

    Raises
    ------
    ValueError
        "chat", and the model has no template.
    """

    def __init__(self, model: LlamaModel, style: str = "auto") -> None:
        template = model.metadata().get("tokenizer.chat_template")
        if style not in STYLES:
            raise ValueError(f'style="{style}": must be {" or ".join(STYLES)}')
        if style == "chat" and template is None:
            raise ValueError("the model has no chat template; take the style completion")
        self._model = model
        self.chat = style != "completion" and template is not None
        self._formatter = None
        if self.chat:
            ends = (model.token_bos(), model.token_eos())
            bos, eos = (model.token_get_text(token) if token != -1 else "" for token in ends)
            self._formatter = Jinja2ChatFormatter(str(template), eos_token=eos, bos_token=bos)

    def tokens(self, text: str, chat: bool | None = None) -> list[int]:
        """Return the tokens of a prompt; `chat` overrides the style."""
        if self._formatter is None or chat is False:
            return self.plain(text)
        formatted = self._formatter(messages=[{"role": "user", "content": text}])
        return self._tokenize(formatted.prompt, add_bos=not formatted.added_special, special=True)

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a prompt without a template."""
        return self._tokenize(text, add_bos=self._model.add_bos_token(), special=True)

    def count(self, text: str) -> int:
        """Return the number of tokens of a piece of text."""
        return len(self._tokenize(text))

    def cut_middle(self, text: str, n_tokens: int) -> str:
        """Return a text of at most about n_tokens tokens: its beginning and its end, in equal parts."""
        tokens = self._tokenize(text)
        if len(tokens) <= n_tokens:
            return text
        n_first = n_tokens // 2
        first, last = tokens[:n_first], tokens[len(tokens) - (n_tokens - n_first) :]
        return "".join(join(self._model.vocab, part).decode("utf-8", "ignore") for part in (first, last))

    def _tokenize(self, text: str, add_bos: bool = False, special: bool = False) -> list[int]:
        tokens: list[int] = self._model.tokenize(text.encode("utf-8"), add_bos, special)
        return tokens


def n_common(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of first tokens that all prompts have in common."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    n = 0
    while n < min(len(first), len(last)) and first[n] == last[n]:
        n += 1
    return n


def context_for(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Return the size of a context that holds each prompt and its answer."""
    return -(-(max(len(prompt.tokens) for prompt in prompts) + max_tokens + 1) // 256) * 256
