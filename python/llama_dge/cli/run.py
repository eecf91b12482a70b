"""``llama-dge run``: answer a question about a document."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config import DGEConfig
from ._common import Answer, Progress, answer, load, mebibytes, model_path
from ._options import (
    add_answer_options,
    add_cache_options,
    add_dge_options,
    add_full,
    add_model,
    add_prompt_options,
    add_threads,
    add_verbose,
    context_settings,
    prompt_tokens,
    read_prompt,
    wanted_dge,
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "run",
        help="answer a question about a document",
        description="Answers on stdout; then prints on stderr what was kept and how long it took.",
    )
    add_model(parser)
    add_prompt_options(parser)
    add_answer_options(parser)
    add_cache_options(parser)
    add_threads(parser)
    add_full(parser)
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_run)


def _run(args: argparse.Namespace) -> int:
    config = wanted_dge(args, DGEConfig())
    prompt = read_prompt(args)
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    tokens, n_ctx = prompt_tokens(args, prompt, path)

    llm = load(path, progress, dge=config, n_ctx=n_ctx, seed=args.seed, **context_settings(args))
    n_trained = llm._model.n_ctx_train()
    if n_ctx > n_trained:
        print(f"llama-dge run: the model was trained for {n_trained} tokens, not {n_ctx}", file=sys.stderr)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    result = answer(llm, tokens, max_tokens=args.max_tokens, temp=args.temp, progress=progress, write=write)
    sys.stdout.write("\n")
    sys.stdout.flush()
    _report(result)
    return 0


def _report(result: Answer) -> None:
    def show(name: str, value: str) -> None:
        print(f"{name:<18}{value}", file=sys.stderr)

    stats = result.stats
    show("prompt", f"{result.n_prompt:,} tokens")
    if stats is not None and stats.state == "evicted":
        entries = f"{stats.rows_after:,} of {stats.rows_before:,} per KV head in {stats.n_layer} layers"
        show("entries kept", f"{entries}, {mebibytes(stats.bytes_before)} -> {mebibytes(stats.bytes_after)}")
    else:
        show("entries kept", f"all {result.n_rows:,}: {result.why_full}")
    show("entries attended", f"{result.n_kv:,} at the end")
    show("prefill", f"{result.prefill_speed:,.1f} tokens/s, {result.prefill_seconds:.2f} s")
    speed = f"{result.decode_speed:,.1f} tokens/s, {result.decode_seconds:.2f} s" if result.n_decoded else "none"
    show("decode", f"{speed} ({result.n_decoded:,} tokens)")
    if stats is not None and stats.state == "evicted":
        show(
            "eviction",
            f"score {stats.seconds_score:.4f} s, select {stats.seconds_select:.4f} s, "
            f"compact {stats.seconds_compact:.4f} s",
        )
        if stats.n_recalls or stats.n_checks:
            checks = f" in {stats.n_checks:,} checks" if stats.n_checks else ""
            moved = f"{stats.rows_moved:,} entries moved"
            show("recalls", f"{stats.n_recalls:,}{checks}, {moved}, {stats.seconds_recall:.2f} s")
        if stats.bytes_parked:
            show("host copy", f"{stats.rows_parked:,} entries, {mebibytes(stats.bytes_parked)}")
