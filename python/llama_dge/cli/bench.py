"""``llama-dge bench``: speed and memory before and after an eviction, beside full cache and stock llama-cpp-python."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from ..benchmark import report
from ..benchmark.measure import WARM_UP, Plan, run_round
from ..benchmark.workers import FULL, STOCK, BenchError, Lock, Workers
from ..config import DGEConfig
from ..eval.arms import Arm, parse_arms
from ..eval.results import versions
from ._common import CLIError, Progress, model_path
from ._options import add_cache_options, add_model, add_threads, add_verbose, at_least, context_settings

DEFAULT_MODEL = "smollm2-135m"
STOCK_VARIABLE = "LLAMA_DGE_STOCK_PYTHON"


@dataclasses.dataclass(frozen=True)
class _Size:
    """What --quick changes: defaults of options, and the turns."""

    contexts: tuple[int, ...]
    budgets: tuple[int, ...]
    arms: tuple[str, ...]
    rounds: int
    chunk: int
    blocks: int
    block: int = 8


_WHOLE = _Size(
    contexts=(1024, 4096),
    budgets=(512,),
    arms=("snapkv", "paper", "default", "recall"),
    rounds=2,
    chunk=256,
    blocks=12,
)
_QUICK = _Size(contexts=(384, 768), budgets=(128,), arms=("paper", "recall:k=4"), rounds=1, chunk=128, blocks=4)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "bench",
        help="speed and memory before and after an eviction, beside the full cache",
        description="Each arm is a process of its own, and they take turns, on random tokens.",
    )
    whole, quick = _WHOLE, _QUICK
    add_model(parser, default=DEFAULT_MODEL)
    parser.add_argument("--quick", action="store_true", help=f"prompts of {_list(quick.contexts)}: does it run?")
    parser.add_argument(
        "--contexts",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help=f"tokens of the prompts ({_list(whole.contexts)}; quick: {_list(quick.contexts)})",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help=f"as in `llama-dge eval`; full is always there ({' '.join(whole.arms)}; quick: {' '.join(quick.arms)})",
    )
    parser.add_argument(
        "--budgets",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help=f"entries kept by arms that name none ({_list(whole.budgets)}; quick: {_list(quick.budgets)})",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), metavar="N", help=f"of each prompt ({whole.rounds}; quick: {quick.rounds})"
    )
    add_threads(parser, default=1, text="CPU threads of each arm (1: the steadiest)")
    add_cache_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and all settings")
    parser.add_argument(
        "--stock",
        metavar="PYTHON",
        help=f"interpreter with a stock llama-cpp-python (${STOCK_VARIABLE}, or this one if it has one)",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="hold an flock on FILE while measuring, for minutes at a time"
    )
    add_verbose(parser)
    parser.set_defaults(command_function=_bench)


def _list(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _plans(args: argparse.Namespace, size: _Size, arms: Mapping[str, DGEConfig | None]) -> list[Plan]:
    """Return one plan per prompt length, shortest first; raises CLIError."""
    contexts = sorted(set(args.contexts or size.contexts))
    plans = [Plan(n, size.chunk, size.blocks, size.block) for n in contexts]
    shortest = plans[0]
    if shortest.n_prefill < shortest.n_before:
        least = 2 * shortest.n_before
        raise CLIError(f"--contexts {shortest.context} is too short to be measured; take {least} or more")
    for name, config in arms.items():
        if config is not None and isinstance(config.budget, int) and shortest.context <= config.budget:
            raise CLIError(
                f"--contexts {shortest.context}: arm {name} keeps {config.budget} entries, so nothing is evicted; "
                f"take a longer prompt or a smaller budget"
            )
    return plans


def _arms(args: argparse.Namespace, size: _Size, stock: str | None) -> dict[str, DGEConfig | None]:
    """Return settings by name, stock (where it is there) and the full cache first; raises CLIError."""
    try:
        arms: list[Arm] = parse_arms([FULL, *(args.arms or size.arms)], args.budgets or size.budgets)
    except ValueError as error:
        raise CLIError(str(error)) from error
    named: dict[str, DGEConfig | None] = {STOCK: None} if stock is not None else {}
    for arm in arms:
        # in `eval` one prompt serves all arms, here each has a cache that may grow and shrink as a user's does
        named[arm.name] = dataclasses.replace(arm.config, elastic=True) if arm.config is not None else None
    if len(arms) == 1:
        raise CLIError("--arms full: nothing is compared with it; name an arm with eviction, such as paper")
    return named


def stock_python(given: str | None) -> str | None:
    """Return an interpreter with a stock llama-cpp-python: the one that is asked for, this one, or None."""
    if given or os.environ.get(STOCK_VARIABLE):
        return given or os.environ[STOCK_VARIABLE]
    folder = Path(llama_cpp.__file__).parent / "lib"
    return sys.executable if any(folder.glob("*llama.*")) else None


def _bench(args: argparse.Namespace) -> int:
    size = _QUICK if args.quick else _WHOLE
    stock = stock_python(args.stock)
    arms = _arms(args, size, stock)
    plans = _plans(args, size, arms)
    progress = Progress(True)  # it takes minutes
    path = model_path(args.model, progress)
    if args.json is not None:
        try:  # before the minutes, not after them
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with open(args.json, "a"):
                pass
        except OSError as error:
            raise CLIError(f"cannot write {args.json}: {error}") from error
    if stock is None:
        progress.line("stock llama-cpp-python is not measured: no interpreter that has it (--stock PYTHON)")
    pythons = {name: stock if name == STOCK and stock is not None else sys.executable for name in arms}
    settings = {"n_batch": 512, "n_ubatch": 512, **context_settings(args)}
    result: dict[str, Any] = {
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": {"name": path.name, "bytes": path.stat().st_size},
        "settings": settings,
        "plan": {name: value for name, value in dataclasses.asdict(plans[0]).items() if name != "context"},
        "rounds": [],
    }
    lock = Lock(args.lock)
    try:
        # all lengths once, then again: whatever is there when it is stopped covers all of them
        for index in range(args.rounds or size.rounds):
            for plan in plans:
                start = time.monotonic()
                progress.update(f"{plan.context:,} tokens, round {index + 1}")
                _round(result, plan, arms, pythons, lock, str(path), index)
                progress.line(f"{plan.context:,} tokens, round {index + 1}: {time.monotonic() - start:.0f} s")
                if args.json is not None:
                    whole = {"summary": report.summary(result), **result}
                    args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    except BenchError as error:
        raise CLIError(str(error)) from error
    finally:
        progress.clear()
    print(
        f"llama-dge {result['versions']['llama_dge']}, {path.name}, {args.threads} thread(s), "
        f"{args.type_k} and {args.type_v} cache, flash attention {'on' if settings['flash_attn'] else 'off'}\n"
    )
    print(report.table(result))
    if args.json is not None:
        print(f"\nevery sample: {args.json}")
    return 0


def _round(
    result: dict[str, Any],
    plan: Plan,
    arms: Mapping[str, DGEConfig | None],
    pythons: Mapping[str, str],
    lock: Lock,
    path: str,
    index: int,
) -> None:
    """Measure one prompt once, in processes that end with it, so that memory is that of this length alone."""
    n_ctx = plan.n_ctx(max(config.draft_tokens for config in arms.values() if config is not None))
    lock.take()
    try:
        with Workers(pythons, lock) as workers:
            loaded = {}
            for name, config in arms.items():
                dge = dataclasses.asdict(config) if config is not None else None
                load = {"model": path, "dge": dge, "n_ctx": n_ctx, **result["settings"]}
                loaded[name] = {**workers[name]("load", **load), "dge": dge}
                workers[name]("warm_up", n=WARM_UP)
            result["arms"] = loaded
            n_vocab = loaded[FULL]["n_vocab"]
            result["rounds"].append({"n_ctx": n_ctx, **run_round(workers, plan, arms, n_vocab, index)})
    finally:
        lock.give()
