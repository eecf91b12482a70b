"""``python -m bench.policies``: what policies and uneven budgets cost, as ratios of turns taken in one process.

Prefill with H2O's sums against eviction off, and decoding after an eviction with uneven budgets against SnapKV's even
one with the same total of entries. CPU time of the process on one thread, so that a busy machine disturbs little.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_dge import Llama

from ._common import ROOT, model_file, say

H2O = {"policy": "h2o", "scores": "policy"}
UNEVEN: dict[str, dict[str, Any]] = {
    "pyramidkv": {"policy": "pyramidkv"},
    "snapkv, adaptive heads": {"head_budgets": "adaptive"},
    "pyramidkv, adaptive heads": {"policy": "pyramidkv", "head_budgets": "adaptive"},
}
CHUNK, BLOCK = 256, 8


def cpu_seconds(call: Any) -> float:
    """Return the CPU time that a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def take_turns(calls: Sequence[Any], n: int) -> list[list[float]]:
    """Run each call n times in turns, the order turned round each time. Returns the seconds of each call."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(n):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            seconds[i].append(cpu_seconds(calls[i]))
    return seconds


def ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Return the speed of `other` relative to `base`, the median over turns."""
    return statistics.median(b / o for b, o in zip(base, other))


def prefill(path: str, tokens: list[int], settings: dict[str, Any]) -> dict[str, float]:
    """Speed of a whole prefill with H2O's sums relative to one without eviction: total time, as chunks get dearer."""
    arms = [Llama(path, **settings), Llama(path, dge={"budget": 512, **H2O}, **settings)]
    totals = [0.0, 0.0]
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        order = (0, 1) if start // CHUNK % 2 == 0 else (1, 0)
        for i in order:
            totals[i] += cpu_seconds(functools.partial(arms[i].eval, part))
    return {"h2o prefill / dge off": totals[0] / totals[1]}


def decode(path: str, tokens: list[int], budget: int, turns: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Speed of decoding with uneven budgets relative to SnapKV's with the same total of entries."""
    figures: dict[str, Any] = {}
    even: dict[str, Any] = {"budget": budget, "scores": "policy"}
    for name, more in UNEVEN.items():
        answers = []
        for dge in (even, {**even, **more}):
            llm = Llama(path, dge=dge, **settings)
            answer = llm.generate(tokens, temp=0.0)
            for _ in range(4):
                next(answer)
            answers.append((llm, answer))
        stats = [llm.dge_stats for llm, _ in answers]
        if any(s is None or s.state != "evicted" for s in stats) or stats[0].bytes_kept != stats[1].bytes_kept:  # type: ignore[union-attr]
            raise RuntimeError(f"{name}: not evicted to the same total of entries: {stats}")

        def block(answer: Any) -> Any:
            return lambda: [next(answer) for _ in range(BLOCK)]

        seconds = take_turns([block(answer) for _, answer in answers], turns)
        figures[f"{name} / snapkv, decode"] = ratio(*seconds)
        figures[f"{name}, cells in use / budget"] = stats[1].rows_after / budget  # type: ignore[union-attr]
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    p = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    p.add_argument("--quick", action="store_true", help="1,024 tokens: does it run?")
    p.add_argument("--model", default="smollm2-135m", help="GGUF file, or a name of `llama-dge models list`")
    p.add_argument("--context", type=int, metavar="N", help="tokens of the prompt (4096)")
    p.add_argument("--budget", type=int, default=512, metavar="N", help="entries kept per layer and KV head (512)")
    p.add_argument("--no-flash-attn", action="store_true")
    p.add_argument("--json", type=Path, metavar="FILE", help="results (build/bench-policies.json)")
    args = p.parse_args(argv)

    context = args.context or (1024 if args.quick else 4096)
    turns = 4 if args.quick else 12
    rng = random.Random(1)
    tokens = [rng.randrange(100, 40000) for _ in range(context)]
    settings = {
        "n_ctx": context + 256,
        "n_threads": 1,
        "n_threads_batch": 1,
        "flash_attn": not args.no_flash_attn,
        "verbose": False,
    }
    path = model_file(args.model)
    figures: dict[str, Any] = {}
    for name, part in (
        ("prefill", lambda: prefill(path, tokens, settings)),
        ("decode", lambda: decode(path, tokens, args.budget, turns, settings)),
    ):
        start = time.monotonic()
        figures.update(part())
        say(f"{name}: {time.monotonic() - start:.0f} s")
    print(
        f"{Path(path).name}, {context} tokens, budget {args.budget}, flash attention {settings['flash_attn']}, 1 thread"
    )
    for name, figure in figures.items():
        print(f"{name:45} {figure:6.2f}")
    out = args.json or ROOT / "build" / "bench-policies.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"context": context, "settings": settings, "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
