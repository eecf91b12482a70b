"""``llama-dge inspect``: which entries an eviction keeps, as a page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..config import DGEConfig
from ..report.page import render
from ..report.picture import require_pillow, write_png
from ..report.record import Record, Recorder, token_texts, versions
from ._common import Answer, CLIError, Progress, answer, load, model_path
from ._options import (
    add_answer_options,
    add_cache_options,
    add_dge_options,
    add_model,
    add_prompt_options,
    add_threads,
    add_verbose,
    context_settings,
    dge_config,
    given_dge_options,
    prompt_tokens,
    read_prompt,
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "inspect",
        help="which entries of a document are kept, as a page",
        description="Answers a question about a document and shows what was kept of it: a page that needs no network, "
        "a picture, or JSON on stdout.",
    )
    add_model(parser)
    add_prompt_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the page, HTML")
    parser.add_argument("--png", metavar="FILE", type=Path, help="a map of layers and places; needs Pillow")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_answer_options(parser)
    add_cache_options(parser)
    add_threads(parser)
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    if args.output is None and args.png is None and not args.json:
        raise CLIError("say what to make: a page with -o, a picture with --png, or --json")
    config = dge_config(DGEConfig(), given_dge_options(args))
    _check_outputs(args)
    prompt = read_prompt(args)
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    tokens, n_ctx = prompt_tokens(args, prompt, path)

    record = _record(args, path, config, tokens, n_ctx, progress)
    try:
        if args.output is not None:
            args.output.write_text(render(record), encoding="utf-8")
        if args.png is not None and record.choices:
            write_png(record, args.png)
    except OSError as error:
        raise CLIError(f"cannot write: {error}") from error
    if args.json:
        json.dump(record.as_json(), sys.stdout)
        print()
    _report(args, record)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Find out before the answer is made, which takes long, whether it can be shown."""
    if args.png is not None:
        try:
            require_pillow()
        except ModuleNotFoundError as error:
            raise CLIError(str(error)) from error
    for path in (args.output, args.png):
        if path is not None and not path.absolute().parent.is_dir():
            raise CLIError(f"cannot write {path}: there is no such folder")


def _record(
    args: argparse.Namespace, path: Path, config: DGEConfig, tokens: list[int], n_ctx: int, progress: Progress
) -> Record:
    llm = load(path, progress, dge=config, n_ctx=n_ctx, seed=args.seed, **context_settings(args))
    try:
        recorder = Recorder(llm)
        result: Answer = answer(
            llm,
            tokens,
            max_tokens=args.max_tokens,
            temp=args.temp,
            progress=progress,
            write=lambda text: recorder.look(),
        )
        recorder.look(last=True)
        memory = llm.dge_memory
        return Record(
            model=path.name,
            source=None if args.file in (None, "-") else Path(args.file).name,
            question=args.prompt,
            config=config,
            versions=versions(),
            # the last token of an answer is sampled but not evaluated, so it has no entry
            tokens=tuple(token_texts(llm, llm._input_ids[: llm.n_tokens].tolist())),
            n_prompt=len(tokens),
            n_sinks=config.sinks if config.policy == "streamingllm" else 0,
            answer=result.text,
            layers=tuple(llm.dge_layers) if recorder.choices else (),
            choices=tuple(recorder.choices),
            why_full=None if recorder.choices else result.why_full,
            stats=result.stats,
            memory_before=recorder.memory_before or memory,
            memory_after=memory,
        )
    finally:
        llm.close()


def _report(args: argparse.Namespace, record: Record) -> None:
    def show(name: str, value: str) -> None:
        print(f"{name:<18}{value}", file=sys.stderr)

    show("prompt", f"{record.n_prompt:,} tokens")
    stats = record.stats
    if stats is None or not record.choices:
        show("entries kept", f"all: {record.why_full}")
    else:
        show("entries kept", f"{stats.rows_after:,} of {stats.rows_before:,} per KV head in {stats.n_layer} layers")
        if len(record.choices) > 1:
            show("selections", f"{len(record.choices):,} of {stats.n_recalls + 1:,} recorded")
        counts = record.choices[-1].counts()
        show("tokens", f"{int((counts > 0).sum()):,} of {len(counts):,} are kept by at least one head")
    for name, path in (("page", args.output), ("picture", args.png)):
        if path is not None:
            made = name == "page" or bool(record.choices)
            show(name, f"{path}" if made else "none, as nothing was evicted")
