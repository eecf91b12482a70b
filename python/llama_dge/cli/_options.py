"""Options that several subcommands have, and the settings that they stand for."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from llama_cpp._internals import LlamaModel
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

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
from ._common import CLIError, load_vocabulary, read_text, tokenize

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
UNQUANTISED = ("f32", "f16", "bf16")


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


def add_model(parser: argparse.ArgumentParser, default: str | None = None, optional: bool = False) -> None:
    """Add the model, which may be left out where there is a default or none is needed."""
    text = "GGUF file, or a name of `llama-dge models list`"
    if default is None and not optional:
        parser.add_argument("model", metavar="MODEL", help=text)
    else:
        shown = text if default is None else f"{text} ({default})"
        parser.add_argument("model", metavar="MODEL", nargs="?", default=default, help=shown)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add a document, a question, and how they become a prompt."""
    parser.add_argument("-f", "--file", metavar="FILE", help="document, UTF-8; - reads stdin")
    parser.add_argument("-p", "--prompt", metavar="QUESTION", help="question, put after the document")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the model's chat template (if it has one)"
    )
    parser.add_argument("--n-ctx", type=at_least(1), metavar="N", help="context (what prompt and answer need)")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add what shapes an answer."""
    parser.add_argument("--max-tokens", type=at_least(1), default=256, metavar="N", help="length of the answer (256)")
    parser.add_argument("--temp", type=temperature, default=0.0, metavar="T", help="temperature (0: greedy)")
    parser.add_argument("--seed", type=at_least(1), default=1, metavar="N", help="of the sampler (1)")


def add_threads(
    parser: argparse.ArgumentParser, default: int | None = None, text: str = "CPU threads (half of the cores to decode)"
) -> None:
    """Add the option for threads."""
    parser.add_argument("--threads", type=at_least(1), default=default, metavar="N", help=text)


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
        flash_attn = args.type_v not in UNQUANTISED
    return {
        "flash_attn": flash_attn,
        "type_k": CACHE_TYPES[args.type_k],
        "type_v": CACHE_TYPES[args.type_v],
    }


def context_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of `Llama` that the options of `add_cache_options` and `add_threads` stand for."""
    return {"n_threads": args.threads, "n_threads_batch": args.threads, **cache_settings(args)}


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

    def add(name: str, text: str, *short: str, **kwargs: Any) -> None:
        field = name.replace("-", "_")
        group.add_argument(
            *short, f"--{name}", dest=f"dge_{field}", help=f"{text} ({getattr(default, field)})", **kwargs
        )

    add("policy", "which rows stay", choices=POLICIES)
    add("scores", "what ranks them", choices=SCORES)
    add("draft-pooling", "pooling of the draft's scores", choices=DRAFT_POOLINGS)
    add("pooling", "pooling of the policy's own score", choices=POOLINGS)
    add("kernel-size", "rows that pooling spans", type=int, metavar="N")
    add(
        "budget", "rows that stay per layer and KV head; with a point, a share of the prompt", type=_budget, metavar="N"
    )
    add("draft-tokens", "tokens of the answer before the cut", "-k", type=int, metavar="N")
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


def add_full(parser: argparse.ArgumentParser) -> None:
    """Add the option that excludes those of eviction."""
    parser.add_argument("--full", action="store_true", help="keep the full cache")


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


def read_prompt(args: argparse.Namespace) -> str:
    """Return the document and the question that the options name; raises CLIError."""
    parts = [] if args.file is None else [read_text(args.file)]
    if args.prompt is not None:
        parts.append(args.prompt)
    if not parts:
        raise CLIError("give a document with -f, a question with -p, or both")
    return "\n\n".join(parts)


def _tokenize_prompt(vocabulary: LlamaModel, prompt: str, chat: bool | None) -> list[int]:
    """Tokenize a prompt, by the model's chat template unless `chat` is False or there is none; raises CLIError."""
    template = vocabulary.metadata().get("tokenizer.chat_template")
    if chat and template is None:
        raise CLIError("the model has no chat template; leave --chat out")
    if chat is False or template is None:
        return tokenize(vocabulary, prompt)
    ends = (vocabulary.token_bos(), vocabulary.token_eos())
    bos, eos = (vocabulary.token_get_text(token) if token != -1 else "" for token in ends)
    formatted = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)(
        messages=[{"role": "user", "content": prompt}]
    )
    return tokenize(vocabulary, formatted.prompt, add_bos=not formatted.added_special)


def prompt_tokens(args: argparse.Namespace, prompt: str, path: Path) -> tuple[list[int], int]:
    """Tokenize a prompt. Returns the tokens and the size of a context for them and the answer; raises CLIError."""
    # the size depends on the number of tokens, so the vocabulary is loaded first and alone
    tokens = _tokenize_prompt(load_vocabulary(path), prompt, args.chat)
    if not tokens:
        raise CLIError("the prompt is empty")
    needed = len(tokens) + args.max_tokens
    n_ctx = args.n_ctx or -(-needed // 256) * 256
    if needed > n_ctx:
        raise CLIError(
            f"{len(tokens)} tokens of prompt and {args.max_tokens} of answer do not fit into --n-ctx {n_ctx}"
        )
    return tokens, n_ctx
