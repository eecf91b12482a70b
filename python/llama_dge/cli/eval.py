"""``llama-dge eval``: what eviction costs in answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..eval import longbench
from ..eval.arms import Arm, parse_arms
from ..eval.cache import EvalError
from ..eval.documents import QUESTION, document_prompts
from ..eval.engine import Engine, Stop
from ..eval.needle import KINDS, NeedleTask, hit, needle_prompts
from ..eval.prompts import STYLES, Prompt, Prompter, context_for
from ..eval.results import Results, ResultsError, file_sha256, read_rows, versions
from ..eval.runner import Score, run_prompts
from ..eval.summary import summary
from ._common import CLIError, Progress, load, load_vocabulary, model_path, read_text
from ._options import (
    add_cache_options,
    add_max_tokens,
    add_model,
    add_threads,
    add_verbose,
    at_least,
    context_settings,
)

DEFAULT_ARMS = ("full", "streamingllm", "snapkv", "paper", "default", "recall")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "eval",
        help="what eviction costs in answers: facts in long texts, LongBench, distributions",
        description="Writes a row per prompt and arm to a file, and goes on where an earlier run ended.",
    )
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)

    needle = tasks.add_parser("needle", help="facts in a long text, and questions for them")
    _add_model_options(needle, max_tokens=16)
    needle.add_argument("--kinds", nargs="+", choices=KINDS, default=["numbers"], help="of facts (numbers)")
    needle.add_argument("--lengths", type=at_least(128), nargs="+", default=[1024], metavar="N", help="tokens (1024)")
    needle.add_argument("--facts", type=at_least(1), default=12, metavar="N", help="in a text, each is asked for (12)")
    needle.add_argument("--texts", type=at_least(1), default=4, metavar="N", help="of each kind and length (4)")
    needle.add_argument("--first-seed", type=at_least(0), default=1, metavar="N", help="of the first text (1)")
    needle.add_argument(
        "--depths",
        type=_share,
        nargs="+",
        default=[0.1, 0.3, 0.5, 0.7, 0.9],
        metavar="X",
        help="with --facts 1, places of the fact in the text (0.1 0.3 0.5 0.7 0.9)",
    )
    needle.add_argument("--paraphrase", type=int, choices=range(3), help="one way to ask (all in turn)")
    needle.add_argument("--text", metavar="FILE", help="prose to hide the facts in (made up)")
    needle.set_defaults(command_function=_needle)

    bench = tasks.add_parser("longbench", help="LongBench's English sets, from a folder of SET.jsonl")
    _add_model_options(bench, max_tokens=None)
    bench.add_argument("--data", metavar="DIR", required=True, help="folder of the files")
    bench.add_argument("--sets", nargs="+", choices=longbench.SETS, metavar="SET", help="(those that are there)")
    bench.add_argument("--limit", type=at_least(1), metavar="N", help="prompts of a set at most (all)")
    _add_max_prompt(bench, 4096)
    bench.set_defaults(command_function=_longbench)

    kld = tasks.add_parser("kld", help="distributions along answers to questions for documents of yours")
    _add_model_options(kld, max_tokens=64)
    kld.add_argument("-f", "--file", nargs="+", metavar="FILE", required=True, help="documents, UTF-8")
    kld.add_argument("-p", "--prompt", nargs="+", metavar="QUESTION", default=[QUESTION], help=f'("{QUESTION}")')
    _add_max_prompt(kld, None)
    kld.set_defaults(command_function=_kld)

    tables = tasks.add_parser("summary", help="tables of results, in Markdown")
    tables.add_argument("results", nargs="+", metavar="FILE", help="made by the other tasks")
    tables.add_argument("--depths", action="store_true", help="needle: hits by depth and length, for each arm")
    tables.add_argument("--pool", action="store_true", help="needle: kinds of facts together")
    tables.add_argument("--grid", action="store_true", help="needle: hits and divergence by arm and budget")
    tables.add_argument("--known", action="store_true", help="only prompts that the full cache answers rightly")
    add_verbose(tables)
    tables.set_defaults(command_function=_summary)


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 .. 1")
    return value


def _add_max_prompt(parser: argparse.ArgumentParser, default: int | None) -> None:
    parser.add_argument(
        "--max-prompt",
        type=at_least(16),
        default=default,
        metavar="N",
        help=f"tokens; of a longer prompt the middle is left out ({default or 'no limit'})",
    )


def _add_model_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    add_model(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="results, a JSON object a line; it may exist")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(DEFAULT_ARMS),
        metavar="ARM",
        help=f"full, or a preset or a policy, changed by :NAME=VALUE,... ({' '.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--budgets", type=at_least(1), nargs="+", default=[128], metavar="N", help="of arms that name none (128)"
    )
    parser.add_argument("--style", choices=STYLES, default="auto", help="of a prompt (auto: chat where possible)")
    add_max_tokens(
        parser,
        max_tokens,
        f"length of an answer ({max_tokens})" if max_tokens else "at most, else as the protocol says",
    )
    parser.add_argument(
        "--kl-tokens", type=at_least(1), default=64, metavar="N", help="of the answer that are compared (64)"
    )
    parser.add_argument("--quick", action="store_true", help="a small part, to see that it runs")
    add_cache_options(parser)
    add_threads(parser)
    add_verbose(parser)


def _needle(args: argparse.Namespace) -> int:
    n_texts, lengths, n_facts = args.texts, sorted(set(args.lengths)), args.facts
    if args.quick:
        n_texts, lengths, n_facts = 1, lengths[:1], min(n_facts, 4)
    task = NeedleTask(
        kinds=args.kinds,
        lengths=lengths,
        n_facts=n_facts,
        depths=args.depths,
        seeds=range(args.first_seed, args.first_seed + n_texts),
        paraphrase=args.paraphrase,
        text=None if args.text is None else read_text(args.text),
    )
    return _run(
        args,
        lambda prompter: [prompt for group in needle_prompts(task, prompter) for prompt in group],
        score=lambda text, prompt: hit(text, prompt.expected),
        max_tokens=lambda prompt: int(args.max_tokens) * len(prompt.expected),
    )


def _longbench(args: argparse.Namespace) -> int:
    limit = 1 if args.quick else args.limit
    max_prompt = min(args.max_prompt, 256) if args.quick else args.max_prompt

    def make(prompter: Prompter) -> list[Prompt]:
        prompts = longbench.longbench_prompts(
            Path(args.data), prompter, max_prompt=max_prompt, sets=args.sets, limit=limit
        )
        longbench.check_libraries(prompts)
        return prompts

    def max_tokens(prompt: Prompt) -> int:
        most = longbench.max_tokens(prompt, args.max_tokens)
        return min(most, 8) if args.quick else most

    return _run(args, make, score=longbench.score, max_tokens=max_tokens, stop=longbench.stop)


def _kld(args: argparse.Namespace) -> int:
    documents = {Path(name).name: read_text(name) for name in args.file}
    if len(documents) < len(args.file):
        raise CLIError("two documents have the same name")
    max_prompt = min(args.max_prompt or 1024, 1024) if args.quick else args.max_prompt
    return _run(
        args,
        lambda prompter: list(document_prompts(documents, args.prompt, prompter, max_prompt=max_prompt)),
        score=None,
        max_tokens=lambda prompt: min(args.max_tokens, 16) if args.quick else int(args.max_tokens),
    )


def _summary(args: argparse.Namespace) -> int:
    try:
        rows = [row for name in args.results for row in read_rows(Path(name))]
    except ResultsError as error:
        raise CLIError(str(error)) from error
    if not rows:
        raise CLIError(f"no results in {', '.join(args.results)}")
    try:
        text = summary(rows, depths=args.depths, by_set=not args.pool, known=args.known, grid=args.grid)
    except (KeyError, TypeError, ResultsError) as error:
        raise CLIError(f"a row is incomplete: {error}") from error
    print(text, end="")
    return 0


def _run(
    args: argparse.Namespace,
    make: Callable[[Prompter], list[Prompt]],
    *,
    score: Score | None,
    max_tokens: Callable[[Prompt], int],
    stop: Callable[[Prompt], Stop | None] = lambda prompt: None,
) -> int:
    progress = Progress(args.verbose)
    try:
        arms: Sequence[Arm] = parse_arms(args.arms, args.budgets)
        path = model_path(args.model, progress)
        prompts = make(Prompter(load_vocabulary(path), args.style))
        context = context_settings(args)
        about = {
            "model": path.name,
            "model_sha256": file_sha256(path),
            "versions": versions(),
            "cache": {"type_k": args.type_k, "type_v": args.type_v, "flash_attn": context["flash_attn"]},
            "threads": args.threads,
        }
        with Results(Path(args.out)) as results:
            llm = load(path, progress, n_ctx=context_for(prompts, max(map(max_tokens, prompts))), **context)
            try:
                n = run_prompts(
                    Engine(llm),
                    prompts,
                    arms,
                    results,
                    about=about,
                    max_tokens=max_tokens,
                    kl_tokens=args.kl_tokens,
                    score=score,
                    stop=stop,
                    report=progress.line if args.verbose else progress.update,
                )
            finally:
                progress.clear()
                llm.close()
    except BrokenPipeError:
        raise  # nobody reads the progress
    except (EvalError, ResultsError, ImportError, ValueError, OSError) as error:
        raise CLIError(str(error)) from error
    print(f"{n:,} rows were added to {args.out}; `llama-dge eval summary {args.out}` makes tables of it")
    return 0
