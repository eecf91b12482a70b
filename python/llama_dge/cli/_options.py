"""Options that several subcommands have, and the settings that they stand for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp._internals import LlamaModel
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from ..config import PRESETS, DGEConfig
from ._common import CLIError, load_vocabulary, read_text, tokenize, trained_context

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
# of settings that have a short option
_SHORT = {"draft_tokens": ("-k",)}
_FLASH_ATTN = {"on": ["--flash-attn"], "off": ["--no-flash-attn"], "auto": []}


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that every subcommand has."""
    parser.add_argument("-v", "--verbose", action="store_true", help="show on stderr what is going on")


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
    """Add the model, which may be left out where there is a default or none is needed; see `resolve_model`."""
    text = "GGUF file, or a name of `llama-dge models list`"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text if default is None else f"{text} ({default})")
    parser.add_argument("-m", "--model", dest="model_option", metavar="MODEL", help="another way to give MODEL")
    parser.set_defaults(model_default=default, model_parser=parser, model_needed=default is None and not optional)


def resolve_model(args: argparse.Namespace) -> None:
    """Make one of MODEL and -m; ends the program where there are two, or none and one is needed."""
    if not hasattr(args, "model_option"):
        return
    if args.model is not None and args.model_option is not None:
        args.model_parser.error(f"MODEL {args.model} and -m {args.model_option}: give one of them")
    args.model = args.model or args.model_option or args.model_default
    if args.model is None and args.model_needed:
        args.model_parser.error("the following arguments are required: MODEL")


def add_context(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    """Add the size of the context; `text` says what it is by default."""
    shown = f"context{f' ({text})' if text else ''}; 0: what the model was trained for"
    parser.add_argument("-c", "--n-ctx", "--ctx-size", type=at_least(0), required=required, metavar="N", help=shown)


def add_max_tokens(parser: argparse.ArgumentParser, default: int | None, text: str, least: int = 1) -> None:
    """Add the length of an answer."""
    parser.add_argument(
        "-n", "--max-tokens", "--n-predict", type=at_least(least), default=default, metavar="N", help=text
    )


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add a document, a question, and how they become a prompt."""
    parser.add_argument("-f", "--file", metavar="FILE", help="document, UTF-8; - reads stdin")
    parser.add_argument("-p", "--prompt", metavar="QUESTION", help="question, put after the document")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the model's chat template (if it has one)"
    )
    add_context(parser, "what prompt and answer need")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add what shapes an answer."""
    add_max_tokens(parser, 256, "length of the answer (256)")
    parser.add_argument("--temp", type=temperature, default=0.0, metavar="T", help="temperature (0: greedy)")
    parser.add_argument("-s", "--seed", type=at_least(1), default=1, metavar="N", help="of the sampler (1)")


def add_threads(
    parser: argparse.ArgumentParser, default: int | None = None, text: str = "CPU threads (half of the cores to decode)"
) -> None:
    """Add the option for threads."""
    parser.add_argument("-t", "--threads", type=at_least(1), default=default, metavar="N", help=text)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add what shapes the cache."""
    parser.add_argument(
        "-fa",
        "--flash-attn",
        action=argparse.BooleanOptionalAction,
        help="flash attention (if --type-v is quantised); on, off or auto may follow",
    )
    types = ", ".join(CACHE_TYPES)
    for letter in "kv":
        parser.add_argument(
            f"-ct{letter}",
            f"--type-{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default="f16",
            metavar="TYPE",
            help=f"of the cache (f16): {types}",
        )


def flash_attn_flags(argv: Sequence[str]) -> list[str]:
    """Replace llama.cpp's ``-fa on``, ``off`` and ``auto`` by flags; an option with a value might take MODEL."""
    flags: list[str] = []
    args = list(argv)
    while args:
        name, equals, value = args.pop(0).partition("=")
        if name in ("-fa", "--flash-attn"):
            if not equals and args and args[0] in _FLASH_ATTN:
                value = args.pop(0)
            flags += _FLASH_ATTN.get(value, [f"{name}{equals}{value}"])
        else:
            flags.append(f"{name}{equals}{value}")
    return flags


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


def add_dge_options(parser: argparse.ArgumentParser, default: DGEConfig) -> None:
    """Add one option per setting, and presets; the help shows the values of `default`."""
    group = parser.add_argument_group("eviction")
    group.add_argument("--preset", choices=PRESETS, help="settings by name, of which other options change some")
    for field in dataclasses.fields(DGEConfig):
        about = dict(field.metadata)
        kwargs: dict[str, Any] = {"metavar": about["metavar"], "type": _setting(field.name)}
        if isinstance(field.default, bool):
            kwargs = {"action": argparse.BooleanOptionalAction}
        elif about["choices"]:
            kwargs = {"choices": about["choices"]}
        option = f"--{field.name.replace('_', '-')}"
        shown = f"{about['help']} ({getattr(default, field.name)})".replace("%", "%%")
        group.add_argument(*_SHORT.get(field.name, ()), option, dest=f"dge_{field.name}", help=shown, **kwargs)


def _setting(name: str) -> Any:
    """Make a type for argparse: a setting of that name."""

    def parse(text: str) -> Any:
        try:
            return DGEConfig.parse(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def add_full(parser: argparse.ArgumentParser) -> None:
    """Add the option that excludes those of eviction."""
    parser.add_argument("--full", action="store_true", help="keep the full cache")


def wanted_dge(args: argparse.Namespace, default: DGEConfig) -> DGEConfig | None:
    """Return the settings that were asked for, None with --full; raises CLIError."""
    given = [*(["preset"] if args.preset else []), *_given(args)]
    if args.full and given:
        raise CLIError(f"--full excludes {', '.join('--' + name.replace('_', '-') for name in given)}")
    return None if args.full else dge_config(default, given_dge_options(args))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that have an option of their own on the command line."""
    fields = [field.name for field in dataclasses.fields(DGEConfig)]
    given = {name: getattr(args, f"dge_{name}") for name in fields}
    return {name: value for name, value in given.items() if value is not None}


def given_dge_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given by the options of `add_dge_options`, those of the preset included."""
    return {**(PRESETS[args.preset] if args.preset else {}), **_given(args)}


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


def context_size(asked: int | None, otherwise: int, vocabulary: LlamaModel) -> int:
    """Return the size of a context: what was asked for, 0 being the model's own; raises CLIError."""
    if asked is None:
        return otherwise
    size = asked or trained_context(vocabulary)
    if size is None:
        raise CLIError("--n-ctx 0: the file does not say what the model was trained for")
    return size


def prompt_tokens(args: argparse.Namespace, prompt: str, path: Path) -> tuple[list[int], int]:
    """Tokenize a prompt. Returns the tokens and the size of a context for them and the answer; raises CLIError."""
    # the size depends on the number of tokens, so the vocabulary is loaded first and alone
    vocabulary = load_vocabulary(path)
    tokens = _tokenize_prompt(vocabulary, prompt, args.chat)
    if not tokens:
        raise CLIError("the prompt is empty")
    needed = len(tokens) + args.max_tokens
    n_ctx = context_size(args.n_ctx, -(-needed // 256) * 256, vocabulary)
    if needed > n_ctx:
        raise CLIError(
            f"{len(tokens)} tokens of prompt and {args.max_tokens} of answer do not fit into --n-ctx {n_ctx}"
        )
    return tokens, n_ctx
