"""``python -m bench.memory MODEL``: what an eviction frees, bytes of the cache and resident memory of the process.

A long prompt, an eviction, a second question; one process for each place of the host copy. Resident memory is VmRSS of
/proc/self/status, so this runs on Linux.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from llama_dge import Llama, __version__
from llama_dge.benchmark.workers import BenchError

from ._common import ROOT, model_file, say

PARKS = ("off", "ram", "disk")
MIB = 2**20
KV_WANTED, RSS_WANTED = 0.15, 0.8  # KV after / full, at most; RSS that went / KV that went, at least


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise BenchError("no VmRSS in /proc/self/status")


def snapshot(llm: Llama) -> dict[str, int]:
    """Return the bytes in use now."""
    return {"rss": resident(), **asdict(llm.dge_memory)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in this process. Returns its figures; raises BenchError."""
    llm = Llama(
        args.model,
        dge={"budget": args.budget, "draft_tokens": args.draft_tokens, "park": args.arm},
        n_ctx=args.context + 256,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=args.flash_attn,
        verbose=False,
    )
    rng = random.Random(1)
    tokens = [rng.randrange(100, min(llm.n_vocab(), 40000)) for _ in range(args.context)]
    figures: dict[str, Any] = {"park": args.arm, "loaded": snapshot(llm)}
    start = time.perf_counter()
    generator = llm.generate(tokens, temp=0.0)
    answer = [next(generator)]
    figures["seconds_prefill"] = time.perf_counter() - start
    answer += islice(generator, args.draft_tokens - 1)
    figures["before"] = snapshot(llm)
    answer += islice(generator, 2)
    figures["after"] = snapshot(llm)
    stats = llm.dge_stats
    if stats is None or stats.state != "evicted":
        raise BenchError(f"nothing was evicted: {stats}")
    figures["eviction"] = {k: v for k, v in asdict(stats).items() if k != "rows_by_head"}
    if args.arm != "off":
        again = [*tokens, *answer, *tokens[:8]]
        generator = llm.generate(again, temp=0.0)
        list(islice(generator, args.draft_tokens + 2))
        stats = llm.dge_stats
        assert stats is not None
        figures["second"] = {"rows_restored": stats.rows_restored, "seconds_restore": stats.seconds_restore}
        figures["second"].update(snapshot(llm))
    return figures


def verdict(figures: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of an arm."""
    before, after = figures["before"], figures["after"]
    ratios = {
        "kv after / full": after["kv"] / after["kv_max"],
        "rss fall / kv fall": (before["rss"] - after["rss"]) / max(before["kv"] - after["kv"], 1),
    }
    if "second" in figures:
        ratios["restore / prefill, seconds"] = figures["second"]["seconds_restore"] / figures["seconds_prefill"]
    return ratios


def show(arms: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print("| MiB | " + " | ".join(f'park="{arm["park"]}"' for arm in arms) + " |")
    print("| --- |" + " --- |" * len(arms))
    for name, at, key in (
        ("K and V at full size", "after", "kv_max"),
        ("K and V before the eviction", "before", "kv"),
        ("K and V after it", "after", "kv"),
        ("host copy", "after", "parked"),
        ("resident before the eviction", "before", "rss"),
        ("resident after it", "after", "rss"),
    ):
        print(f"| {name} | " + " | ".join(f"{arm[at][key] / MIB:,.1f}" for arm in arms) + " |")
    for name in ("kv after / full", "rss fall / kv fall", "restore / prefill, seconds"):
        cells = [arm["ratios"].get(name) for arm in arms]
        print(f"| {name} | " + " | ".join("" if cell is None else f"{cell:.3f}" for cell in cells) + " |")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. A target that is missed is no error."""
    p = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    p.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of `llama-dge models list`")
    p.add_argument("--context", type=int, default=8192, metavar="N", help="tokens of the prompt (8192)")
    p.add_argument("--budget", type=int, default=512, metavar="N", help="entries kept per layer and KV head (512)")
    p.add_argument("--draft-tokens", type=int, default=2, metavar="N")
    p.add_argument("--threads", type=int, default=1, metavar="N")
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--park", choices=PARKS, action="append", help="only this one; may be repeated")
    p.add_argument("--json", type=Path, metavar="FILE", help="results (build/bench-memory.json)")
    p.add_argument("--arm", choices=PARKS, help=argparse.SUPPRESS)  # a child process
    args = p.parse_args(argv)
    if args.arm:
        print(json.dumps(measure(args)))
        return 0

    args.model = os.path.abspath(model_file(args.model))
    settings = {name: getattr(args, name) for name in ("context", "budget", "draft_tokens", "threads", "flash_attn")}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "flash_attn"]
    passed += ["--flash-attn"] if args.flash_attn else []
    arms = []
    for park in args.park or PARKS:
        start = time.monotonic()
        command = [sys.executable, "-m", "bench.memory", args.model, *passed, f"--arm={park}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        arms.append(json.loads(done.stdout))
        arms[-1]["ratios"] = verdict(arms[-1])
        say(f"park {park}: {time.monotonic() - start:.0f} s")

    result = {
        "llama_dge": __version__,
        "model": Path(args.model).name,
        "settings": settings,
        "arms": arms,
    }
    out = args.json or ROOT / "build" / "bench-memory.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"llama-dge {__version__}, {result['model']}, {result['settings']}\n")
    show(arms)
    off = [arm["ratios"] for arm in arms if arm["park"] == "off"]
    for ratios in off:
        missed = ratios["kv after / full"] > KV_WANTED or ratios["rss fall / kv fall"] < RSS_WANTED
        print(f"\nwanted with park off: {KV_WANTED} or less, {RSS_WANTED} or more: {'MISSED' if missed else 'met'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
