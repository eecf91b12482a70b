"""One prompt, all arms: what is compared is measured side by side.

The noise of a machine lasts for seconds. So the arms take turns every few hundred tokens of prefill and every few
tokens of decoding, and the order turns round each time (A B C, C B A, ...): whatever slows one arm down slows the
others down as well, and ratios are those of the same turn.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DGEConfig
from .workers import FULL, BenchError, Workers

Times = list[list[float]]  # [n][wall, CPU] seconds

#: Steps after the eviction that still pay for it: graphs are built again, and their buffers shrink.
SETTLE = 2
#: Tokens that a worker reads before anything is timed.
WARM_UP = 32


@dataclass(frozen=True)
class Plan:
    """What one round measures.

    Parameters
    ----------
    context
        Tokens of the prompt.
    chunk
        Tokens of prefill per turn.
    blocks, block
        Turns of decoding, and tokens per turn: of the end of the prompt, which is read token by token on the full
        cache, of the answer after the eviction, and again of the answer beside a fresh prompt.
    """

    context: int
    chunk: int
    blocks: int
    block: int

    @property
    def n_before(self) -> int:
        """Tokens at the end of the prompt that are read one by one."""
        return self.blocks * self.block

    @property
    def n_prefill(self) -> int:
        """Tokens in front of those."""
        return self.context - self.n_before

    def n_ctx(self, draft_tokens: int) -> int:
        """Return the context that an arm with so many draft tokens needs, a multiple of 256."""
        needed = self.context + draft_tokens + SETTLE + 2 * self.blocks * self.block + 1
        return -(-needed // 256) * 256


def is_even(config: DGEConfig) -> bool:
    """Return whether all layers and heads keep the same number of entries."""
    return config.policy != "pyramidkv" and config.head_budgets == "uniform"


def prompt_tokens(n: int, n_vocab: int) -> list[int]:
    """Return n token ids, always the same ones. Speed does not depend on what a text says."""
    draw = random.Random(n)
    return [draw.randrange(n_vocab) for _ in range(n)]


def prefill(
    workers: Workers, names: Sequence[str], prompt: list[int], stop: int, chunk: int, first: int
) -> dict[str, Times]:
    """Evaluate the first `stop` tokens of a prompt in all arms, chunk by chunk. Returns the times of the chunks."""
    for name in names:
        workers[name]("reset", prompt=prompt)
    times: dict[str, Times] = {name: [] for name in names}
    starts = range(0, stop, chunk)
    for start, order in zip(starts, workers.turns(names, len(starts), first)):
        for name in order:
            times[name].append(workers[name]("evaluate", start=start, stop=min(start + chunk, stop)))
    return times


def read(workers: Workers, names: Sequence[str], plan: Plan, first: int) -> dict[str, Times]:
    """Evaluate the end of the prompt in all arms, token by token. Returns the time of each block."""
    times: dict[str, Times] = {name: [] for name in names}
    starts = range(plan.n_prefill, plan.context, plan.block)
    for start, order in zip(starts, workers.turns(names, plan.blocks, first)):
        for name in order:
            times[name].append(workers[name]("read", start=start, stop=start + plan.block))
    return times


def decode(workers: Workers, names: Sequence[str], plan: Plan, first: int) -> dict[str, Times]:
    """Decode in all arms, block by block. Returns the time of each block."""
    times: dict[str, Times] = {name: [] for name in names}
    for order in workers.turns(names, plan.blocks, first):
        for name in order:
            steps = workers[name]("step", n=plan.block)
            times[name].append([sum(step[i] for step in steps) for i in range(2)])
    return times


def check_eviction(name: str, config: DGEConfig, stats: Mapping[str, Any] | None, context: int) -> None:
    """Raise BenchError where the eviction was not what the arm asks for."""
    k = config.draft_tokens
    if stats is None or stats["state"] != "evicted" or stats["error"]:
        why = "eviction is off" if stats is None else stats["error"] or f'its state is "{stats["state"]}"'
        raise BenchError(f"arm {name}: nothing of the prompt of {context} tokens was evicted: {why}")
    least, most = stats["budget"], stats["budget"] + k - 1
    if stats["rows_before"] != context + k - 1 or (is_even(config) and not least <= stats["rows_after"] <= most):
        found = f"{stats['rows_before']} -> {stats['rows_after']} entries"
        raise BenchError(f"arm {name}: {found} instead of {context + k - 1} -> {least} .. {most}")


def run_round(
    workers: Workers, plan: Plan, arms: Mapping[str, DGEConfig | None], n_vocab: int, index: int
) -> dict[str, Any]:
    """Measure everything once.

    Parameters
    ----------
    workers
        Loaded and fresh; stock may be among them.
    plan
        What to do.
    arms
        Settings by name; None for the full cache and for stock.
    n_vocab
        Size of the vocabulary.
    index
        Number of the round, by which the order of the first turn changes.

    Returns
    -------
    dict
        ``prefill``, ``before`` (decoding on the full cache), ``decode`` (after the eviction) and ``fresh`` hold times
        by arm, the last one by budget first; the rest is what report.py explains.

    Raises
    ------
    BenchError
        An arm failed, or did not evict as its settings say.
    """
    load_before = load_average()
    names = workers.names
    prompt = prompt_tokens(plan.context, n_vocab)
    memory: dict[str, dict[str, Any]] = {name: {"loaded": workers[name]("memory")} for name in names}
    times = prefill(workers, names, prompt, plan.n_prefill, plan.chunk, index)
    before = read(workers, names, plan, index)

    draft, eviction_steps, evictions = {}, {}, {}
    for name in names:
        config = arms[name]
        workers[name]("first")
        # k - 1 tokens on the full cache, then the one whose decoding starts with the eviction
        draft[name] = workers[name]("step", n=config.draft_tokens - 1) if config is not None else []
        memory[name]["before"] = workers[name]("memory")
        eviction_steps[name] = workers[name]("step", n=1)
        if config is not None:
            evictions[name] = workers[name]("stats")
            check_eviction(name, config, evictions[name], plan.context)
        eviction_steps[name] += workers[name]("step", n=SETTLE)
        memory[name]["after"] = workers[name]("memory")
    decoded = decode(workers, names, plan, index)
    end = {name: workers[name]("stats") for name in evictions}

    # a short prompt in the arm without eviction, beside the long ones that keep as many entries
    fresh: dict[str, dict[str, Times]] = {}
    for budget in sorted({stats["budget"] for stats in evictions.values()}):
        prefill(workers, [FULL], prompt_tokens(budget, n_vocab), budget, plan.chunk, index)
        workers[FULL]("first")
        workers[FULL]("step", n=1 + SETTLE)
        same = [name for name, stats in evictions.items() if stats["budget"] == budget]
        fresh[str(budget)] = decode(workers, [FULL, *same], plan, index)

    return {
        "context": plan.context,
        "round": index,
        "load_average": [load_before, load_average()],
        "prefill": times,
        "before": before,
        "draft": draft,
        "eviction_steps": eviction_steps,
        "eviction": evictions,
        "decode": decoded,
        "end": end,
        "fresh": fresh,
        "memory": memory,
    }


def load_average() -> float | None:
    """Return how many processes want to run, or None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # Windows
        return None
