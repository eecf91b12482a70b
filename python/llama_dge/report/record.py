"""Watches an answer being made, and notes which entries each selection kept."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .. import __version__, _native
from .._pieces import piece
from ..config import DGEConfig
from ..llama import Llama
from ..stats import DGEMemory, DGEStats

_SEQ = 0
VERSION = 1
#: Selections in a record; of more, every second one is left out until they are few enough. The last one always stays.
MAX_CHOICES = 64

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Choice:
    """Entries that the eviction, or a later selection of ``recall``, kept.

    Parameters
    ----------
    number
        0 for the eviction, n for the n-th selection after it.
    n_rows
        Tokens that could be kept: the prompt's, and those of the answer so far.
    window
        First position that always stays, and the one behind the last.
    kept
        Positions, ascending, for each evicted layer and each of its KV heads.
    """

    number: int
    n_rows: int
    window: tuple[int, int]
    kept: tuple[tuple[Positions, ...], ...]

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how many (layer, KV head) pairs kept each token, shape [n_rows]."""
        positions = [p for layer in self.kept for p in layer]
        return np.bincount(np.concatenate(positions), minlength=self.n_rows)


@dataclass(frozen=True)
class Record:
    """A prompt, its answer, and what was kept of it.

    Parameters
    ----------
    model, source, question
        Names of files without their folders, and what was asked; None where there was none.
    config
        Settings.
    versions
        Of what made this.
    tokens
        Text of each token of the prompt and the answer; where a character has several tokens, its last one has it.
    n_prompt, n_sinks
        Tokens of the prompt, and how many at its beginning always stay.
    answer
        The answer's text.
    layers
        Layers that are evicted.
    choices
        The eviction and the selections after it, in order; empty where nothing was evicted.
    why_full
        Why nothing was evicted, or None.
    stats, memory_before, memory_after
        At the end; before the eviction and at the end.
    """

    model: str
    source: str | None
    question: str | None
    config: DGEConfig
    versions: dict[str, str]
    tokens: tuple[str, ...]
    n_prompt: int
    n_sinks: int
    answer: str
    layers: tuple[int, ...]
    choices: tuple[Choice, ...]
    why_full: str | None
    stats: DGEStats | None
    memory_before: DGEMemory
    memory_after: DGEMemory

    @property
    def heads(self) -> list[int]:
        """KV heads of each evicted layer."""
        return [len(layer) for layer in self.choices[-1].kept] if self.choices else []

    def head(self) -> dict[str, Any]:
        """Return everything but tokens and positions, as JSON can hold it."""
        settings = dataclasses.asdict(dataclasses.replace(self.config, policy="snapkv"))
        return {
            "version": VERSION,
            "model": self.model,
            "source": self.source,
            "question": self.question,
            "settings": {**settings, "policy": policy_name(self.config)},
            "versions": self.versions,
            "n_prompt": self.n_prompt,
            "n_sinks": self.n_sinks,
            "answer": self.answer,
            "why_full": self.why_full,
            "layers": list(self.layers),
            "heads": self.heads,
            "memory": {
                "before": dataclasses.asdict(self.memory_before),
                "after": dataclasses.asdict(self.memory_after),
            },
            "stats": None if self.stats is None else dataclasses.asdict(self.stats),
        }

    def as_json(self) -> dict[str, Any]:
        """Return all of it, as JSON can hold it: positions as lists, and the counts of each token."""
        choices = [
            {
                "number": choice.number,
                "n_rows": choice.n_rows,
                "window": list(choice.window),
                "counts": choice.counts().tolist(),
                "kept": [[head.tolist() for head in layer] for layer in choice.kept],
            }
            for choice in self.choices
        ]
        return {**self.head(), "tokens": list(self.tokens), "choices": choices}


def policy_name(config: DGEConfig) -> str:
    """Return the name of the policy, that of its class where it is an object."""
    return config.policy if isinstance(config.policy, str) else type(config.policy).__name__


def versions() -> dict[str, str]:
    """Return the versions of what makes a record."""
    return {"llama_dge": __version__, "llama_cpp_python": llama_cpp.__version__}


class Recorder:
    """Looks at a model between the tokens of an answer.

    Parameters
    ----------
    llm
        A model with eviction on.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._window = llm.dge_config.window if llm.dge_config is not None else 0
        self._seen = -1
        self._stride = 1
        self.choices: list[Choice] = []
        self.memory_before: DGEMemory | None = None

    def look(self, last: bool = False) -> None:
        """Note a selection that is new. Call it after each token, and at the end."""
        if self.memory_before is None:
            self.memory_before = self._llm.dge_memory
        if not self._llm.dge_enabled or self._llm.n_tokens == 0:
            return
        stats = _native.seq_stats(self._llm.ctx, _SEQ)
        known = self.choices[-1].number if self.choices else -1
        if stats.state != "evicted" or stats.n_recalls == (known if last else self._seen):
            return
        self._seen = stats.n_recalls
        if stats.n_recalls % self._stride and not last:
            return
        n_rows = stats.n_prompt + stats.n_draft
        self.choices.append(
            Choice(
                number=stats.n_recalls,
                n_rows=n_rows,
                window=(max(0, stats.boundary + 1 - self._window), stats.boundary + 1),
                kept=tuple(
                    tuple(
                        _native.kept(self._llm.ctx, _SEQ, layer, head)
                        for head in range(_native.n_head_kv(self._llm.ctx, layer))
                    )
                    for layer in self._llm.dge_layers
                ),
            )
        )
        if len(self.choices) > MAX_CHOICES and not last:
            self._stride *= 2
            self.choices = [choice for choice in self.choices if choice.number % self._stride == 0]


def token_texts(llm: Llama, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token; where a character has several tokens, its last one has it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    texts = [decoder.decode(piece(vocab, token, special=True)) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts
