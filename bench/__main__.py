"""``python -m bench``: speed and memory of a cut against a full cache and against stock llama-cpp-python."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .measure import DGE, OFF, STOCK, Arms, BenchError, Lock, Plan, run_round

ROOT = Path(__file__).resolve().parent.parent
STOCK_VARIABLE = "LLAMA_DGE_STOCK_PYTHON"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    p.add_argument("--quick", action="store_true", help="one short prompt, one round: does it run? (under 3 minutes)")
    p.add_argument("--model", default="smollm2-135m", help="GGUF file, or a name of `llama-dge models list`")
    p.add_argument("--contexts", type=int, nargs="+", metavar="N", help="tokens of the prompts (4096 8192)")
    p.add_argument("--rounds", type=int, metavar="N", help="rounds per prompt (3)")
    p.add_argument("--budget", type=int, metavar="N", help="rows per layer and KV head after the cut (512)")
    p.add_argument("--draft-tokens", type=int, default=2, metavar="N", help="tokens before the cut (2)")
    p.add_argument("--scores", default="draft", help="draft, policy or both (draft)")
    p.add_argument("--threads", type=int, default=1, metavar="N", help="per arm (1: the steadiest)")
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--json", type=Path, metavar="FILE", help="results (build/bench.json)")
    p.add_argument(
        "--lock", type=Path, metavar="FILE", help="hold an flock on FILE while measuring, for minutes at a time"
    )
    return p


def plans(args: argparse.Namespace) -> list[Plan]:
    """Return one plan per prompt length, shortest first."""
    contexts = args.contexts or ([1024] if args.quick else [4096, 8192])
    budget = args.budget or (128 if args.quick else 512)
    chunk, blocks, block = (128, 4, 8) if args.quick else (256, 12, 8)
    made = [Plan(n, budget, args.draft_tokens, chunk, blocks, block) for n in sorted(contexts)]
    if made[0].context <= budget:
        raise BenchError(f"--contexts {made[0].context} must be more than the budget of {budget} rows")
    return made


def stock_python() -> str | None:
    """Return an interpreter with a stock llama-cpp-python, or None."""
    given = os.environ.get(STOCK_VARIABLE)
    if given:
        return given
    built = ROOT / "build" / "stock-venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    return str(built) if built.exists() else None


def model_file(name: str) -> str:
    """Return the path of a model, downloaded where it is named; raises BenchError."""
    from llama_dge import models

    try:
        found = models.find(name, models.read_manifest())
        return str(found if isinstance(found, Path) else models.fetch(found, report=say))
    except models.ModelError as error:
        raise BenchError(str(error)) from error


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark. Returns the results, which are in the JSON file as well; raises BenchError."""
    import llama_dge

    todo = plans(args)
    python = stock_python()
    pythons = {**({STOCK: python} if python else {}), OFF: sys.executable, DGE: sys.executable}
    path = model_file(args.model)
    n_ctx = -(-(todo[-1].context + todo[-1].n_decode + 1) // 256) * 256
    settings = {
        "n_ctx": n_ctx,
        "n_batch": 512,
        "n_ubatch": 512,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "flash_attn": args.flash_attn,
    }
    dge = {"budget": todo[0].budget, "draft_tokens": args.draft_tokens, "scores": args.scores}

    lock = Lock(args.lock)
    with Arms(pythons, lock) as arms:
        say("loading " + ", ".join(arms.names))
        loaded = {n: arms[n]("load", model=path, dge=dge if n == DGE else None, **settings) for n in arms.names}
        result: dict[str, Any] = {
            "llama_dge": llama_dge.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            "model": {"name": Path(path).name, "bytes": os.path.getsize(path)},
            "settings": settings,
            "dge": dge,
            "plan": {k: v for k, v in dataclasses.asdict(todo[0]).items() if k != "context"},
            "arms": loaded,
        }
        rounds: list[dict[str, Any]] = []
        # all lengths once, then again: whatever is there when it is stopped covers all of them
        for index in range(args.rounds or (1 if args.quick else 3)):
            for plan in todo:
                lock.take()
                start = time.monotonic()
                rounds.append(run_round(arms, plan, loaded[OFF]["n_vocab"], index))
                lock.give()
                say(f"{plan.context:,} tokens, round {index + 1}: {time.monotonic() - start:.0f} s")
                write(args.json, result, rounds)
    return {**result, "rounds": rounds}


def write(path: Path, result: dict[str, Any], rounds: list[dict[str, Any]]) -> None:
    """Write what is known so far."""
    whole = {**result, "rounds": rounds}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"summary": report.summary(whole), **whole}, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table. A target that is missed is no error: look at the table."""
    args = parser().parse_args(argv)
    args.json = args.json or ROOT / "build" / "bench.json"
    try:
        result = run(args)
    except (BenchError, ImportError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    settings = result["settings"]
    print(
        f"llama-dge {result['llama_dge']}, {result['model']['name']}, {settings['n_threads']} thread(s), "
        f"n_ctx {settings['n_ctx']:,}, f16 cache, flash attention {'on' if settings['flash_attn'] else 'off'}, "
        f"{result['dge']}\n"
    )
    print(report.table(result))
    print(f"\nevery sample: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
