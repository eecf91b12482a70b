"""``python -m bench.server MODEL``: tokens per second of several conversations at once, and one after the other.

Each conversation has a long prompt, which is evicted; only what is decoded after all evictions counts. Engines of the
server with ``parallel=N`` and ``parallel=1`` take turns, without HTTP.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from llama_dge import __version__
from llama_dge.server.engine import Engine
from llama_dge.server.job import Job, Work
from llama_dge.server.prompts import Prompt
from llama_dge.server.sampling import Sampling
from llama_dge.server.settings import Settings

from ._common import model_file, say


def job_of(engine: Engine, prompt: list[int], n: int) -> Job:
    """Make a request whose answer does not end by itself."""

    def prepare(loaded: Any) -> Work:
        ends = [token for token in (loaded.llm.token_eos(), loaded.llm._model.token_eot()) if token >= 0]
        sampling = Sampling(temperature=0.0, logit_bias=dict.fromkeys(ends, -1e9))
        return Work([Prompt(prompt)], sampling, n)

    return Job(engine.default, engine.config(None), prepare, engine.metrics)


async def _times(engine: Engine, job: Job) -> list[float]:
    times = []
    async for piece in job.pieces():
        times += [time.perf_counter()] * max(1, len(piece.text) > 0)
    state = job.usage.dge["state"]
    if state != "evicted":
        raise SystemExit(f"bench: error: a conversation was not evicted: {state}")
    return times


async def together(engine: Engine, prompts: list[list[int]], n: int, skip: int) -> tuple[float, float]:
    """Run all at once. Returns tokens per second while all decode after their evictions, and the seconds in all."""
    jobs = [job_of(engine, prompt, n) for prompt in prompts]
    start = time.perf_counter()
    for job in jobs:
        await engine.submit("bench", job)
        await job.ready()
    times = await asyncio.gather(*(_times(engine, job) for job in jobs))
    begin, end = max(one[skip] for one in times), min(one[-1] for one in times)
    n_tokens = sum(begin < moment <= end for one in times for moment in one)
    return n_tokens / (end - begin), time.perf_counter() - start


async def in_turn(engine: Engine, prompts: list[list[int]], n: int, skip: int) -> tuple[float, float]:
    """Run one after the other; likewise."""
    start, n_tokens, seconds = time.perf_counter(), 0, 0.0
    for prompt in prompts:
        job = job_of(engine, prompt, n)
        await engine.submit("bench", job)
        await job.ready()
        times = await _times(engine, job)
        n_tokens += len(times) - 1 - skip
        seconds += times[-1] - times[skip]
    return n_tokens / seconds, time.perf_counter() - start


def measure(path: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run both ways in turns; returns medians."""
    rng = random.Random(0)
    found: dict[str, list[tuple[float, float]]] = {"together": [], "in turn": []}
    skip = 10  # the draft, and the evictions of the others
    for i in range(args.repeat):
        for name in found:
            parallel = args.parallel if name == "together" else 1
            settings = Settings(
                model=path,
                n_ctx=args.n_prompt + args.n_answer + 64,
                n_threads=args.threads,
                n_threads_batch=args.threads,
                parallel=parallel,
                verbose=False,
                dge={"budget": args.budget} if args.budget else False,
            )
            engine = Engine(settings, [settings])
            prompts = [[rng.randrange(100, 1000) for _ in range(args.n_prompt)] for _ in range(args.parallel)]
            run = together if name == "together" else in_turn
            found[name].append(asyncio.run(run(engine, prompts, args.n_answer, skip)))
            engine.close()
            say(f"{i + 1}/{args.repeat} {name}: {found[name][-1][0]:.1f} tokens/s, {found[name][-1][1]:.1f} s in all")
    rates = {name: statistics.median(rate for rate, _ in runs) for name, runs in found.items()}
    totals = {name: statistics.median(total for _, total in runs) for name, runs in found.items()}
    return {
        "version": __version__,
        **{name: getattr(args, name) for name in ("parallel", "n_prompt", "n_answer", "budget", "threads", "repeat")},
        "tokens_per_second": rates,
        "seconds_in_all": totals,
        "ratio": rates["together"] / rates["in turn"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.server", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--n-prompt", type=int, default=2048)
    parser.add_argument("--n-answer", type=int, default=128)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    print(json.dumps({"model": args.model, **measure(model_file(args.model), args)}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
