"""What the subcommands share: settings, progress, loading a model, timing an answer."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
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
from ..config import (
    DRAFT_POOLINGS,
    HEAD_BUDGETS,
    LAYER_BUDGETS,
    NEW_TURNS,
    PARKS,
    POLICIES,
    POOLINGS,
    SCORES,
    DGEConfig,
)
from ..llama import Llama
from ..stats import DGEStats

# of a KV cache; numbers of enum ggml_type
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}


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


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that every subcommand has."""
    parser.add_argument("-v", "--verbose", action="store_true", help="tell on stderr what is going on")


def at_least(least: int) -> Any:
    """Make a type for argparse: an int that is not smaller."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    parse.__name__ = "int"  # what argparse calls a text that int() refuses
    return parse


def temperature(text: str) -> float:
    """Parse the temperature of a sampler, for argparse."""
    value = float(text)
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 .. 100")
    return value


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add what shapes an answer."""
    parser.add_argument("--max-tokens", type=at_least(1), default=256, metavar="N", help="length of the answer (256)")
    parser.add_argument("--temp", type=temperature, default=0.0, metavar="T", help="temperature (0: greedy)")
    parser.add_argument("--seed", type=at_least(1), default=1, metavar="N", help="of the sampler (1)")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add what shapes the cache."""
    parser.add_argument(
        "--flash-attn", action=argparse.BooleanOptionalAction, help="flash attention (if --type-v is quantised)"
    )
    types = ", ".join(CACHE_TYPES)
    for letter in "kv":
        parser.add_argument(
            f"--type-{letter}", choices=CACHE_TYPES, default="f16", metavar="TYPE", help=f"of the cache (f16): {types}"
        )


def cache_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of `Llama` that the options of `add_cache_options` stand for."""
    flash_attn = args.flash_attn
    if flash_attn is None:
        flash_attn = args.type_v not in ("f32", "f16", "bf16")
    return {
        "flash_attn": flash_attn,
        "type_k": CACHE_TYPES[args.type_k],
        "type_v": CACHE_TYPES[args.type_v],
    }


def read_text(path: str) -> str:
    """Read a file, or stdin where it is "-"; raises CLIError."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CLIError(f"cannot read {path}: {error}") from error


def _budget(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither rows (512) nor a share of the prompt (0.25)") from None


def add_dge_options(parser: argparse.ArgumentParser, default: DGEConfig) -> None:
    """Add one option per setting that shapes the cut; the help shows the values of `default`."""
    group = parser.add_argument_group("eviction")

    def add(name: str, text: str, **kwargs: Any) -> None:
        field = name.replace("-", "_")
        group.add_argument(f"--{name}", dest=f"dge_{field}", help=f"{text} ({getattr(default, field)})", **kwargs)

    add("policy", "which rows stay", choices=POLICIES)
    add("scores", "what ranks them", choices=SCORES)
    add("draft-pooling", "pooling of the draft's scores", choices=DRAFT_POOLINGS)
    add("pooling", "pooling of the policy's own score", choices=POOLINGS)
    add("kernel-size", "rows that pooling spans", type=int, metavar="N")
    add(
        "budget", "rows that stay per layer and KV head; with a point, a share of the prompt", type=_budget, metavar="N"
    )
    add("draft-tokens", "tokens of the answer before the cut", type=int, metavar="N")
    add("window", "last rows that always stay", type=int, metavar="N")
    add("sinks", "first rows that always stay, with streamingllm", type=int, metavar="N")
    add("layer-budgets", "how pyramidkv's numbers are rounded", choices=LAYER_BUDGETS)
    add("head-budgets", "how the heads of a layer share its rows", choices=HEAD_BUDGETS)
    add("new-turn", "what a prompt that builds on a cut one does", choices=NEW_TURNS)
    add("park", "where the rows of before the cut wait for it", choices=PARKS)
    add("park-dir", "folder for --park disk", metavar="DIR")
    add("park-limit", "bytes that may be parked", type=int, metavar="N")
    add("refresh", 'tokens after which rows are chosen again, or "auto"; 0: never', type=_refresh, metavar="N")
    add("refresh-mass", "share of attention below which auto chooses again", type=float, metavar="X")
    add("elastic", "a cache that grows with use and shrinks after a cut", action=argparse.BooleanOptionalAction)


def _refresh(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor auto") from None


def wanted_dge(args: argparse.Namespace, default: DGEConfig) -> DGEConfig | None:
    """Return the settings that were asked for, None with --full; raises CLIError."""
    given = given_dge_options(args)
    if args.full and given:
        raise CLIError(f"--full excludes {', '.join('--' + name.replace('_', '-') for name in given)}")
    return None if args.full else dge_config(default, given)


def given_dge_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given by the options of `add_dge_options`."""
    fields = [field.name for field in dataclasses.fields(DGEConfig)]
    given = {name: getattr(args, f"dge_{name}", None) for name in fields}
    return {name: value for name, value in given.items() if value is not None}


def dge_config(default: DGEConfig, given: dict[str, Any]) -> DGEConfig:
    """Change settings; raises CLIError."""
    try:
        return dataclasses.replace(default, **given)
    except ValueError as error:
        raise CLIError(str(error)) from error


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
            return (make or Llama)(str(path), verbose=False, **kwargs)
    except (ValueError, _native.DGEError) as error:
        raise CLIError(str(error)) from error
    finally:
        progress.clear()


def load_vocabulary(path: Path) -> LlamaModel:
    """Load a model without its weights, to count tokens; raises CLIError."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        return LlamaModel(path_model=str(path), params=params, verbose=False)
    except ValueError as error:
        raise CLIError(str(error)) from error


def tokenize(vocabulary: LlamaModel, text: str, add_bos: bool | None = None) -> list[int]:
    """Tokenize a prompt as `llama_cpp.Llama` does: special tokens count, and the model says whether it wants a BOS."""
    raw = text.encode("utf-8")
    tokens: list[int] = vocabulary.tokenize(raw, vocabulary.add_bos_token() if add_bos is None else add_bos, True)
    return tokens


@dataclass(frozen=True)
class Answer:
    """An answer, in one piece per token, and what it took.

    Seconds are wall-clock time, `decode_seconds` without the cut. `n_decoded` does not count the first token, which
    the prefill gives. `n_rows` are per layer and KV head, `n_kv` those that attention reads; both at the end.
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
        """Why nothing was cut."""
        return why_full(self.stats)


def why_full(stats: DGEStats | None) -> str:
    """Why nothing was cut."""
    if stats is None:
        return "eviction is off"
    if stats.error is not None:
        return stats.error
    if stats.state == "armed":
        return "the answer ended before the cut"
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
            emit(llm.detokenize([token]))
            if n_yielded >= max_tokens:
                break
        emit(b"", final=True)
    except RuntimeError as error:
        raise CLIError(str(error)) from error
    finally:
        progress.clear()

    stats = llm.dge_stats
    # without eviction: every row, and llama.cpp lets attention read whole multiples of 256 cells
    n_kv = min(-(-llm.n_tokens // 256) * 256, llm.n_ctx())
    cut_seconds = stats.seconds if stats is not None else 0.0
    return Answer(
        pieces=tuple(pieces),
        n_prompt=len(tokens),
        n_decoded=n_yielded - 1,
        prefill_seconds=first - start,
        decode_seconds=last - first - cut_seconds,
        n_rows=stats.rows if stats is not None else llm.n_tokens,
        n_kv=stats.n_kv if stats is not None else n_kv,
        stats=stats,
    )


def mebibytes(n: float) -> str:
    """Format a number of bytes."""
    return f"{n / 2**20:,.1f} MiB"
