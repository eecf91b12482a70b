"""``python -m bench.versions --package DIR --library DIR``: this tree beside another version of it, in paired turns.

Each turn is a process of its own, so both versions start alike. Versions take turns in an order that changes; a ratio
is that of one round. One thread and CPU time, which other work on the machine disturbs less than seconds.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ._common import ROOT, model_file, say

WANTED = 0.98  # other / this, at least, of each figure

# runs in both versions, so it names settings that both have; RECALL is the setting of either
WORKER = """
import json, sys, time
from itertools import islice
import llama_dge
path, n_prompt, n_answer, budget, recall = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
figures = {}
for arm, dge in (("full", None), ("evicted", {}), ("recall", {recall: 4})):
    if dge is not None:
        dge = {"budget": budget, "draft_tokens": 8, **dge}
    llm = llama_dge.Llama(path, n_ctx=n_prompt + n_answer + 64, n_threads=1, n_threads_batch=1, verbose=False, dge=dge)
    text = " ".join(f"The code of house {i} is {i * 7919 % 10000}." for i in range(n_prompt))
    prompt = llm.tokenize(text.encode())[:n_prompt]
    stream = llm.generate(prompt, temp=0.0)
    start = time.process_time()
    next(stream)
    figures[f"prefill, {arm}"] = time.process_time() - start
    list(islice(stream, 8))
    start = time.process_time()
    tokens = list(islice(stream, n_answer))
    figures[f"decode, {arm}"] = (time.process_time() - start) / len(tokens)
    if dge is not None:
        stats = llm.dge_stats
        assert stats.rows_after < n_prompt, stats
        figures[f"eviction, {arm}"] = stats.seconds
    del stream
    llm.close()
print(json.dumps(figures))
"""


def turn(package: Path, library: Path | None, args: Sequence[str], recall: str) -> dict[str, float]:
    """Run the worker in one version; returns CPU seconds, the eviction in seconds of the clock."""
    env = {**os.environ, "PYTHONPATH": str(package)}
    env.pop("LLAMA_DGE_LIB_PATH", None)
    if library is not None:
        env["LLAMA_DGE_LIB_PATH"] = str(library)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *args, recall], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 where a figure of this version is worse than wanted."""
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file or name (smollm2-135m)")
    parser.add_argument("--package", type=Path, required=True, help="folder python/ of the other version")
    parser.add_argument("--library", type=Path, required=True, help="folder of its libllama")
    parser.add_argument("--recall", default="recall", help="name of the setting `recall` there (refresh before 0.2)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens (2048)")
    parser.add_argument("--answer", type=int, default=96, help="tokens that are timed (96)")
    parser.add_argument("--budget", type=int, default=128, help="entries per KV head (128)")
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    args = parser.parse_args(argv)
    path = model_file(args.model)
    given = [str(path), str(args.prompt), str(args.answer), str(args.budget)]
    own = os.environ.get("LLAMA_DGE_LIB_PATH")
    versions = {
        "this": (ROOT / "python", Path(own) if own else None, "recall"),
        "other": (args.package, args.library, args.recall),
    }
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = random.sample(list(versions), len(versions))
        rounds.append({name: turn(versions[name][0], versions[name][1], given, versions[name][2]) for name in order})
        say(f"round {number + 1} of {args.rounds}: {', '.join(order)}")
    failed = False
    print(f"{'CPU seconds, median':24}{'other':>12}{'this':>12}{'other / this':>14}{'spread':>16}")
    for name in rounds[0]["this"]:
        ratios = sorted(each["other"][name] / each["this"][name] for each in rounds)
        medians = {arm: statistics.median(each[arm][name] for each in rounds) for arm in versions}
        ratio = statistics.median(ratios)
        failed |= ratio < WANTED
        print(
            f"{name:24}{medians['other']:12.4f}{medians['this']:12.4f}{ratio:14.3f}{ratios[0]:9.3f} ..{ratios[-1]:5.3f}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
