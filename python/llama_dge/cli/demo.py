"""``llama-dge demo``: the same question with the full cache and with eviction, side by side."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import DGEConfig
from ..demo_text import FACTS, chronicle
from ..stats import DGEStats
from ._common import Answer, CLIError, Progress, answer, load, mebibytes, model_path, tokenize
from ._options import add_dge_options, add_model, add_threads, add_verbose, dge_config, given_dge_options

MODEL = "smollm2-135m"
DEFAULT = DGEConfig.preset("default", budget=256, draft_tokens=4)
N_CTX = 4096
MAX_TOKENS = 24


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "demo",
        help="one question about a long document, full cache and eviction side by side",
        description="The document is an invented chronicle; the model completes a sentence of it.",
    )
    add_model(parser, default=MODEL)
    parser.add_argument(
        "--fact", type=int, choices=range(1, len(FACTS) + 1), default=2, help="which fact is asked for, in order (2)"
    )
    add_threads(parser)
    add_dge_options(parser, DEFAULT)
    add_verbose(parser)
    parser.set_defaults(command_function=_demo)


def _demo(args: argparse.Namespace) -> int:
    config = dge_config(DEFAULT, given_dge_options(args))
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    fact = FACTS[args.fact - 1]
    prompt = f"{chronicle()}\n\n{fact.question}"

    results = []
    for name, dge in (("full cache", None), ("eviction", config)):
        progress.line(f"{name}: reading the document")
        llm = load(path, progress, dge=dge, n_ctx=N_CTX, n_threads=args.threads, n_threads_batch=args.threads)
        tokens = tokenize(llm._model, prompt)
        if len(tokens) + MAX_TOKENS > N_CTX:
            raise CLIError(f"this model's {len(tokens)} tokens do not fit into {N_CTX}")
        results.append(answer(llm, tokens, max_tokens=MAX_TOKENS, progress=progress))
        llm.close()
    full, evicted = results
    if evicted.stats is None or evicted.stats.state != "evicted":
        raise CLIError(f"nothing was evicted: {evicted.why_full}")

    print(f"Document    {full.n_prompt:,} tokens, the chronicle of an invented town; {path.name}")
    print(f"Settings    {_describe(config)}")
    print(f"Question    {fact.question} ...")
    for label, result in (("Full cache", full), ("Eviction", evicted)):
        right = result.text.strip().lower().startswith(fact.answer.lower())
        print(f"{label:<12}{_first_sentence(result.text)}    [{'right' if right else f'wrong: it is {fact.answer}'}]")
    draft = "".join(evicted.pieces[: config.draft_tokens]).strip()
    print(f"            the first {config.draft_tokens} tokens come from the full cache in any case: {draft}")
    print()
    _print_table(full, evicted, evicted.stats)
    return 0


def _describe(config: DGEConfig) -> str:
    names = ("scores", "pooling", "budget", "draft_tokens", "window", "recall")
    return ", ".join([str(config.policy), *(f"{name}={getattr(config, name)}" for name in names)])


def _first_sentence(text: str) -> str:
    line = " ".join(text.split())
    end = line.find(".")
    return line if end < 0 else line[: end + 1]


def _print_table(full: Answer, evicted: Answer, stats: DGEStats) -> None:
    row_bytes = stats.bytes_after / stats.rows_after
    rows = [
        ("", "full cache", "eviction"),
        ("entries per layer and KV head", f"{full.n_rows:,}", f"{evicted.n_rows:,}"),
        ("entries attended", f"{full.n_kv:,}", f"{evicted.n_kv:,}"),
        ("K and V", mebibytes(full.n_rows * row_bytes), mebibytes(evicted.n_rows * row_bytes)),
        ("prefill, tokens/s", f"{full.prefill_speed:,.1f}", f"{evicted.prefill_speed:,.1f}"),
        ("decode, tokens/s", f"{full.decode_speed:,.1f}", f"{evicted.decode_speed:,.1f}"),
        ("eviction, seconds", "-", f"{stats.seconds:.3f}"),
    ]
    for name, left, right in rows:
        print(f"{name:<32}{left:>14}{right:>14}")
