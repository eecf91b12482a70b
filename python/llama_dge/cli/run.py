"""``llama-dge run``: answer a question about a document."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from llama_cpp._internals import LlamaModel
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from ..config import DGEConfig
from ._common import (
    Answer,
    CLIError,
    Progress,
    add_answer_options,
    add_cache_options,
    add_dge_options,
    add_verbose,
    answer,
    at_least,
    cache_settings,
    load,
    load_vocabulary,
    mebibytes,
    model_path,
    read_text,
    tokenize,
    wanted_dge,
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "run",
        help="answer a question about a document",
        description="Answers on stdout; then prints on stderr what was kept and how long it took.",
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF file, or a name of `llama-dge models list`")
    parser.add_argument("-f", "--file", metavar="FILE", help="document, UTF-8; - reads stdin")
    parser.add_argument("-p", "--prompt", metavar="QUESTION", help="question, put after the document")
    add_answer_options(parser)
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the model's chat template (if it has one)"
    )
    parser.add_argument("--n-ctx", type=at_least(1), metavar="N", help="context (what prompt and answer need)")
    add_cache_options(parser)
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (half of the cores to decode)")
    parser.add_argument("--full", action="store_true", help="keep the full cache")
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_run)


def _run(args: argparse.Namespace) -> int:
    config = wanted_dge(args, DGEConfig())
    prompt = read_prompt(args)
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)

    # The size of the context depends on the number of tokens, so the vocabulary is loaded first and alone.
    tokens = tokenize_prompt(load_vocabulary(path), prompt, args.chat)
    if not tokens:
        raise CLIError("the prompt is empty")
    needed = len(tokens) + args.max_tokens
    n_ctx = args.n_ctx or -(-needed // 256) * 256
    if needed > n_ctx:
        raise CLIError(
            f"{len(tokens)} tokens of prompt and {args.max_tokens} of answer do not fit into --n-ctx {n_ctx}"
        )

    llm = load(
        path,
        progress,
        dge=config,
        n_ctx=n_ctx,
        seed=args.seed,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        **cache_settings(args),
    )
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


def read_prompt(args: argparse.Namespace) -> str:
    """Return the document and the question that the options name; raises CLIError."""
    parts = [] if args.file is None else [read_text(args.file)]
    if args.prompt is not None:
        parts.append(args.prompt)
    if not parts:
        raise CLIError("give a document with -f, a question with -p, or both")
    return "\n\n".join(parts)


def tokenize_prompt(vocabulary: LlamaModel, prompt: str, chat: bool | None) -> list[int]:
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


def _report(result: Answer) -> None:
    def show(name: str, value: str) -> None:
        print(f"{name:<18}{value}", file=sys.stderr)

    stats = result.stats
    show("prompt", f"{result.n_prompt:,} tokens")
    if stats is not None and stats.state == "cut":
        rows = f"{stats.rows_after:,} of {stats.rows_before:,} per KV head in {stats.n_layer} layers"
        show("rows kept", f"{rows}, {mebibytes(stats.bytes_before)} -> {mebibytes(stats.bytes_after)}")
    else:
        show("rows kept", f"all {result.n_rows:,}: {result.why_full}")
    show("KV rows attended", f"{result.n_kv:,} at the end")
    show("prefill", f"{result.prefill_speed:,.1f} tokens/s, {result.prefill_seconds:.2f} s")
    speed = f"{result.decode_speed:,.1f} tokens/s, {result.decode_seconds:.2f} s" if result.n_decoded else "none"
    show("decode", f"{speed} ({result.n_decoded:,} tokens)")
    if stats is not None and stats.state == "cut":
        show(
            "cut",
            f"score {stats.seconds_score:.4f} s, select {stats.seconds_select:.4f} s, "
            f"compact {stats.seconds_compact:.4f} s",
        )
        if stats.n_refresh or stats.n_checks:
            looks = f" after {stats.n_checks:,} looks" if stats.n_checks else ""
            rows = f"{stats.rows_moved:,} rows brought back"
            show("chosen again", f"{stats.n_refresh:,} times{looks}, {rows}, {stats.seconds_refresh:.2f} s")
        if stats.bytes_parked:
            show("parked", f"{stats.rows_parked:,} rows, {mebibytes(stats.bytes_parked)}")
