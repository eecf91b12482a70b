"""What the subcommands share: progress, reading a file, loading a model, timing an answer."""

from __future__ import annotations

import codecs
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._internals import LlamaModel

from .. import _native, models
from .._pieces import piece
from ..llama import Llama
from ..stats import DGEStats


class CLIError(Exception):
    """What went wrong, for the user; no traceback is shown."""


class Progress:
    """Lines on stderr about what takes long: on a terminal, or where the user asked for them."""

    def __init__(self, verbose: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._on = self._terminal or verbose
        self._shown = False

    def line(self, text: str) -> None:
        """Show a line that stays."""
        if self._on:
            self.clear()
            print(text, file=sys.stderr, flush=True)

    def update(self, text: str) -> None:
        """Show a line that the next one replaces."""
        if self._terminal:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        """Remove the line that `update` showed, and never one of an answer."""
        if self._shown:
            self.update("")
            self._shown = False


def read_text(path: str) -> str:
    """Read a file, or stdin where it is "-"; raises CLIError, also where there is nothing in it."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CLIError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise CLIError(f"{'stdin' if path == '-' else path} is empty: a document is expected")
    return text


def model_path(name_or_path: str, progress: Progress, manifest: Path | None = None) -> Path:
    """Return the path of a GGUF file, downloaded first where a model's name is given; raises ModelError."""
    found = models.find(name_or_path, models.read_manifest(manifest))
    return found if isinstance(found, Path) else models.fetch(found, report=progress.line)


def load(path: Path, progress: Progress, make: Callable[..., Llama] | None = None, **kwargs: Any) -> Llama:
    """Load a model, quietly; raises CLIError. `make` takes the place of `Llama`."""
    progress.update(f"loading {path.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # contexts are as large as they have to be here, and the commands say why nothing was evicted
            warnings.filterwarnings("ignore", message="llama_dge: budget=.* is not less than n_ctx")
            return (make or Llama)(str(path), verbose=False, **kwargs)
    except (ValueError, _native.DGEError) as error:
        raise CLIError(_why_not(path, error)) from error
    finally:
        progress.clear()


def _why_not(path: Path, error: Exception) -> str:
    """What keeps a model from being loaded; the library only says that it failed."""
    if "Failed to load model" not in str(error):
        return str(error)
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as problem:
        return f"cannot read {path}: {problem}"
    if not start:
        return f"{path} is empty: a GGUF file is expected"
    is_gguf = start == b"GGUF"
    return f"{path}: llama.cpp cannot load it; is the file complete?" if is_gguf else f"{path} is not a GGUF file"


def load_vocabulary(path: Path) -> LlamaModel:
    """Load a model without its weights, to count tokens; raises CLIError."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        return LlamaModel(path_model=str(path), params=params, verbose=False)
    except ValueError as error:
        raise CLIError(_why_not(path, error)) from error


def trained_context(vocabulary: LlamaModel) -> int | None:
    """Return the tokens that a model was trained for, None where its file does not say."""
    metadata = vocabulary.metadata()
    found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return None if found is None else int(found)


def tokenize(vocabulary: LlamaModel, text: str, add_bos: bool | None = None) -> list[int]:
    """Tokenize a prompt as `llama_cpp.Llama` does: special tokens count, and the model says whether it wants a BOS."""
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CLIError(f"the prompt is not UTF-8: {error}") from error
    tokens: list[int] = vocabulary.tokenize(raw, vocabulary.add_bos_token() if add_bos is None else add_bos, True)
    return tokens


@dataclass(frozen=True)
class Answer:
    """An answer, in one piece per token, and what it took.

    Seconds are wall-clock time, `decode_seconds` without the eviction. `n_decoded` does not count the first token,
    which the prefill gives. `n_rows` are entries per layer and KV head, `n_kv` those that attention reads; both at the
    end.
    """

    pieces: tuple[str, ...]
    n_prompt: int
    n_decoded: int
    prefill_seconds: float
    decode_seconds: float
    n_rows: int
    n_kv: int
    stats: DGEStats | None

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)

    @property
    def prefill_speed(self) -> float:
        """Tokens per second."""
        return self.n_prompt / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens per second, 0 where nothing was decoded after the first token."""
        return self.n_decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def why_full(self) -> str:
        """Why nothing was evicted."""
        return why_full(self.stats)


def why_full(stats: DGEStats | None) -> str:
    """Return why nothing was evicted."""
    if stats is None:
        return "eviction is off"
    if stats.error is not None:
        return stats.error
    if stats.state == "armed":
        return "the answer ended before the eviction"
    return "the prompt is not longer than the budget"


def answer(
    llm: Llama,
    tokens: list[int],
    *,
    max_tokens: int,
    progress: Progress,
    temp: float = 0.0,
    write: Callable[[str], object] = lambda text: None,
) -> Answer:
    """Answer a prompt and measure it.

    Parameters
    ----------
    llm
        Model, with or without eviction.
    tokens
        The prompt; with `max_tokens` it must fit the context.
    max_tokens
        Stop after that many tokens, or at the end of the answer.
    progress
        Where to show how far the prefill is.
    temp
        Temperature; 0 takes the likeliest token.
    write
        Called with each piece of the answer.

    Raises
    ------
    CLIError
        The library failed.
    """
    pieces: list[str] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end in the middle of a character

    def emit(raw: bytes, final: bool = False) -> None:
        pieces.append(decoder.decode(raw, final))
        write(pieces[-1])

    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    n_yielded = 0
    start = first = last = time.perf_counter()
    try:
        llm.reset()
        for i in range(0, len(tokens), llm.n_batch):
            progress.update(f"prefill {i:,} of {len(tokens):,} tokens")
            llm.eval(tokens[i : i + llm.n_batch])
        progress.clear()
        # the prompt is in the cache, so this samples at once
        for token in llm.generate(tokens, temp=temp):
            last = time.perf_counter()
            first = last if n_yielded == 0 else first
            n_yielded += 1
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                break
            emit(piece(vocab, token))
            if n_yielded >= max_tokens:
                break
        emit(b"", final=True)
    except RuntimeError as error:
        raise CLIError(str(error)) from error
    finally:
        progress.clear()

    stats = llm.dge_stats
    # without eviction: every entry, and llama.cpp lets attention read whole multiples of 256 cells
    n_kv = min(-(-llm.n_tokens // 256) * 256, llm.n_ctx())
    eviction_seconds = stats.seconds if stats is not None else 0.0
    return Answer(
        pieces=tuple(pieces),
        n_prompt=len(tokens),
        n_decoded=n_yielded - 1,
        prefill_seconds=first - start,
        decode_seconds=last - first - eviction_seconds,
        n_rows=stats.rows if stats is not None else llm.n_tokens,
        n_kv=stats.n_kv if stats is not None else n_kv,
        stats=stats,
    )


def mebibytes(n: float) -> str:
    """Format a number of bytes."""
    return f"{n / 2**20:,.1f} MiB"
