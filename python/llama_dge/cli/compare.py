"""``llama-dge compare``: one question, answered with the full cache and with eviction, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..eval.arms import Arm, parse_arm
from ..eval.cache import EvalError
from ..eval.engine import ArmResult, Engine, not_longer
from ..eval.prompts import STYLES, Prompter
from ._common import CLIError, Progress, load, load_vocabulary, mebibytes, model_path, read_text
from ._options import (
    add_cache_options,
    add_max_tokens,
    add_model,
    add_threads,
    add_verbose,
    at_least,
    context_settings,
)

DEFAULT_BUDGET = 256
DEFAULT_RECALL = "4"
_WIDTH = 60


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "compare",
        help="one question: full cache, bare policy, DGE and recall side by side",
        description="The document is read once; each row of the table goes on from the same cache.",
    )
    add_model(parser)
    parser.add_argument("-f", "--file", metavar="FILE", required=True, help="document, UTF-8; - reads stdin")
    parser.add_argument("-p", "--prompt", metavar="QUESTION", help="question, put after the document")
    parser.add_argument(
        "--budget",
        type=at_least(1),
        default=DEFAULT_BUDGET,
        metavar="N",
        help=f"entries kept per layer and KV head ({DEFAULT_BUDGET})",
    )
    parser.add_argument(
        "--recall",
        default=DEFAULT_RECALL,
        metavar="N",
        help=f"tokens after which entries are selected again, or auto ({DEFAULT_RECALL})",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="instead of these, as in `llama-dge eval`; the full cache is always there",
    )
    add_max_tokens(parser, 32, "length of an answer (32)", least=2)
    parser.add_argument("--style", choices=STYLES, default="auto", help="of the prompt (auto: chat where possible)")
    add_cache_options(parser)
    add_threads(parser)
    add_verbose(parser)
    parser.set_defaults(command_function=_compare)


def _arms(args: argparse.Namespace) -> list[tuple[str, Arm]]:
    """Return labels and arms, the full cache first."""
    if args.arms is None:
        texts = {
            "full cache": "full",
            "bare policy": "snapkv",
            "DGE": "default",
            f"recall {args.recall}": f"recall:recall={args.recall}",
        }
    else:
        texts = {"full cache": "full", **{text: text for text in map(str.strip, args.arms) if text != "full"}}
    try:
        return [(label, parse_arm(text, args.budget)) for label, text in texts.items()]
    except ValueError as error:
        raise CLIError(str(error)) from error


def _compare(args: argparse.Namespace) -> int:
    arms = _arms(args)
    text = read_text(args.file) if args.prompt is None else f"{read_text(args.file)}\n\n{args.prompt}"
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    try:
        prompt = Prompter(load_vocabulary(path), args.style).tokens(text)
    except ValueError as error:
        raise CLIError(str(error)) from error
    if not prompt:
        raise CLIError("the prompt is empty")
    n_ctx = -(-(len(prompt) + args.max_tokens) // 256) * 256
    llm = load(path, progress, n_ctx=n_ctx, **context_settings(args))
    results = []
    try:
        progress.line(f"reading {len(prompt):,} tokens")
        run = Engine(llm).run(prompt, [arm for _, arm in arms], max_tokens=args.max_tokens, kl_tokens=args.max_tokens)
        for (label, _), result in zip(arms, run):
            progress.line(f"{label}: {_first_line(result.text)}")
            results.append((label, result))
    except EvalError as error:
        raise CLIError(str(error)) from error
    finally:
        progress.clear()
        llm.close()
    print(f"Prompt    {len(prompt):,} tokens; {path.name}, {args.max_tokens} tokens of answer at most, greedy")
    for label, result in results[1:]:
        note = "" if result.evicted else f"    NOTHING EVICTED: {_why(result, len(prompt))}"
        print(f"{label:<14} {result.arm.name}{note}")
    print()
    _print_table(results)
    return 0


def _why(result: ArmResult, n_prompt: int) -> str:
    config = result.arm.config
    if config is not None and not_longer(n_prompt, config):
        return "the prompt is not longer than the budget"
    return "the answer ended before the eviction"


def _first_line(text: str) -> str:
    """Return the first line that is not empty, shortened to what a table holds."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _print_table(results: Sequence[tuple[str, ArmResult]]) -> None:
    # bytes of an entry, by whatever eviction there was
    stats = next((result.stats for _, result in results if result.stats and result.stats.rows_before), None)
    row_bytes = stats.bytes_before / stats.rows_before if stats is not None else None
    lines = [("", "KL to full", "entries", "attended", "K and V", "host copy", "tokens/s", "answer")]
    for label, result in results:
        after = result.kl[result.n_before_eviction :]
        speed = result.n_decoded / result.decode_seconds if result.n_decoded and result.decode_seconds > 0 else None
        lines.append(
            (
                label,
                f"{np.mean(after):.3f}" if result.evicted and after else "-",
                f"{result.rows_end:,}",
                f"{result.n_kv_end:,}",
                "-" if row_bytes is None else mebibytes(row_bytes * result.rows_end),
                mebibytes(result.stats.bytes_parked) if result.stats is not None and result.stats.bytes_parked else "-",
                "-" if speed is None else f"{speed:,.1f}",
                _first_line(result.text),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(7)]
    for line in lines:
        numbers = "".join(f"{cell:>{width + 2}}" for cell, width in zip(line[1:7], widths[1:]))
        print(f"{line[0]:<{widths[0]}}{numbers}  {line[7]}".rstrip())
