"""``python -m bench.recall MODEL``: what recall costs, and how decoding compares with the full cache.

One prefill; its state is the start of every turn. The arms take turns, so that each is compared with the full cache of
the same round; medians of the rounds count.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_dge import Llama, __version__
from llama_dge.benchmark.workers import BenchError

from ._common import ROOT, model_file, say

if TYPE_CHECKING:
    from llama_cpp import LlamaState

# arm: what is wanted of decode, full cache / arm in seconds per token
WANTED = {"recall 4": 2.0, "recall 16": 3.0}
STEP_WANTED = 1.5  # a selection / a decode step of the full cache, at most


def arms(budget: int) -> dict[str, dict[str, Any] | None]:
    """Return the settings of each arm; the first is the full cache."""
    # the eviction has to be behind the tokens that `turn` does not time
    some: dict[str, dict[str, Any] | None] = {"full": None, "one eviction": {"budget": budget, "draft_tokens": 2}}
    for recall in (16, 8, 4, 1):
        some[f"recall {recall}"] = {"budget": budget, "draft_tokens": 2, "recall": recall}
    some["recall 4, async"] = {"budget": budget, "draft_tokens": 2, "recall": 4, "recall_async": True}
    some["recall auto"] = {"budget": budget, "draft_tokens": 2, "recall": "auto"}
    return some


def turn(llm: Llama, state: LlamaState, dge: dict[str, Any] | None, prompt: list[int], n: int) -> dict[str, float]:
    """Decode n tokens from the state of the prompt; returns seconds per token and what the selections took."""
    llm.set_dge(dge)
    llm.load_state(state)
    stream = llm.generate(prompt, temp=0.0)
    list(islice(stream, 4))  # the eviction is behind these
    before = llm.dge_stats
    start = time.perf_counter()
    list(islice(stream, n))
    seconds = time.perf_counter() - start
    stats = llm.dge_stats
    result = {"token": seconds / n, "rows": float(llm.n_tokens)}
    if stats is not None and before is not None:
        if stats.state != "evicted":
            raise BenchError(f"nothing was evicted: {stats}")
        n_recalls = stats.n_recalls - before.n_recalls
        result["rows"] = float(stats.rows)
        result["recalls"] = float(n_recalls)
        if n_recalls:
            result["recall"] = (stats.seconds_recall - before.seconds_recall) / n_recalls
            result["moved"] = (stats.rows_moved - before.rows_moved) / n_recalls
    return result


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians over the rounds, and the median of the ratios to the full cache of the same round."""
    table: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        some = [each[name] for each in rounds]
        table[name] = {key: statistics.median(one[key] for one in some) for key in some[0]}
        table[name]["speed"] = statistics.median(each["full"]["token"] / each[name]["token"] for each in rounds)
        if "recall" in some[0]:
            table[name]["recall / full step"] = statistics.median(
                each[name]["recall"] / each["full"]["token"] for each in rounds
            )
    return table


def show(table: dict[str, dict[str, float]]) -> None:
    """Print the table and what is missed."""
    print("| arm | decode / full cache | wanted | ms per token | entries | a selection / a full step | entries moved |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in table.items():
        wanted = f"{WANTED[name]:g} or more" if name in WANTED else ""
        recall = f"{row['recall / full step']:.2f}" if "recall / full step" in row else ""
        moved = f"{row['moved']:,.0f}" if "moved" in row else ""
        cells = (name, f"{row['speed']:.2f}", wanted, f"{row['token'] * 1e3:.1f}", f"{row['rows']:,.0f}", recall, moved)
        print(f"| {' | '.join(cells)} |")
    missed = [name for name, least in WANTED.items() if table[name]["speed"] < least]
    missed += [f"a selection, {name}" for name, row in table.items() if row.get("recall / full step", 0) > STEP_WANTED]
    print(
        f"\nwanted: see above, and a selection within {STEP_WANTED} full steps: {'MISSED: ' if missed else 'met'}",
        end="",
    )
    print(", ".join(missed))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. A target that is missed is no error."""
    p = argparse.ArgumentParser(prog="python -m bench.recall", description=__doc__)
    p.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of `llama-dge models list`")
    p.add_argument("--context", type=int, default=7900, metavar="N", help="tokens of the prompt (7900)")
    p.add_argument("--budget", type=int, default=256, metavar="N", help="entries kept per layer and KV head (256)")
    p.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens that are timed in a turn (32)")
    p.add_argument("--rounds", type=int, default=3, metavar="N")
    p.add_argument("--threads", type=int, default=1, metavar="N")
    p.add_argument("--no-flash-attn", dest="flash_attn", action="store_false")
    p.add_argument("--json", type=Path, metavar="FILE", help="results (build/bench-recall.json)")
    args = p.parse_args(argv)

    llm = Llama(
        str(model_file(args.model)),
        dge={"elastic": True},
        n_ctx=-(-(args.context + args.tokens + 16) // 256) * 256,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=args.flash_attn,
        verbose=False,
    )
    rng = random.Random(1)
    prompt = [rng.randrange(100, min(llm.n_vocab(), 40000)) for _ in range(args.context)]
    start = time.perf_counter()
    llm.eval(prompt)
    seconds_prefill = time.perf_counter() - start
    say(f"prefill: {seconds_prefill:.0f} s")
    state = llm.save_state()

    rounds = []
    for i in range(args.rounds):
        rounds.append({name: turn(llm, state, dge, prompt, args.tokens) for name, dge in arms(args.budget).items()})
        say(f"round {i + 1} of {args.rounds}")
    table = summary(rounds)
    settings = {name: value for name, value in vars(args).items() if name not in ("model", "json")}
    out = args.json or ROOT / "build" / "bench-recall.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "llama_dge": __version__,
        "model": Path(model_file(args.model)).name,
        "settings": settings,
        "seconds_prefill": seconds_prefill,
        "rounds": rounds,
        "medians": table,
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"llama-dge {__version__}, {result['model']}, {settings}\n")
    show(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
