"""Speeds and ratios of what measure.py timed, and the tables that show them. Nothing here measures anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..config import DGEConfig
from ..eval.arms import needs_sums
from .measure import SETTLE, Times, is_even
from .workers import FULL, STOCK

WALL, CPU = 0, 1
MIB = 2**20

#: Below this share of the time on the CPU, something else ran on the machine and wall-clock ratios say little.
QUIET = 0.97

Round = Mapping[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """One ratio of an arm.

    Parameters
    ----------
    key
        Name in the JSON file.
    title
        Head of the column.
    at_least, at_most
        What is wanted, or None.
    wanted_from
        Tokens of the prompt from which on it is wanted: fixed costs are a larger share of a shorter one.
    """

    key: str
    title: str
    at_least: float | None = None
    at_most: float | None = None
    wanted_from: int = 0

    def verdict(self, value: float | None, context: int) -> str:
        """Return "ok", "MISSED", or nothing where nothing is wanted or known."""
        if value is None or context < self.wanted_from:
            return ""
        if self.at_least is not None:
            return "ok" if value >= self.at_least else "MISSED"
        if self.at_most is not None:
            return "ok" if value <= self.at_most else "MISSED"
        return ""

    @property
    def wanted(self) -> str:
        """What is wanted, for the table."""
        if self.at_least is not None:
            return f">= {self.at_least}"
        return f"<= {self.at_most}" if self.at_most is not None else ""


#: Of an arm with eviction. Speeds are over those of the full cache, or of a fresh prompt of `budget` tokens.
RATIOS = (
    Ratio("prefill", "prefill / full", at_least=0.97),
    Ratio("before", "before / full"),
    Ratio("after", "after / full"),
    Ratio("fresh", "after / fresh", at_least=0.95),
    Ratio("eviction", "eviction / prefill", at_most=0.03, wanted_from=4096),
    Ratio("eviction_outside", "from outside", at_most=0.03, wanted_from=4096),
)
#: Of the full cache over stock llama-cpp-python: what the package costs where nothing is evicted.
STOCK_RATIOS = (
    Ratio("prefill", "prefill", at_least=0.98),
    Ratio("decode", "decode", at_least=0.98),
)


def paired_speed(fast: Times, slow: Times, clock: int) -> list[float]:
    """Return speed of the first over speed of the second, turn by turn."""
    if len(fast) != len(slow):
        raise ValueError(f"{len(fast)} turns cannot be paired with {len(slow)}")
    return [b[clock] / a[clock] for a, b in zip(fast, slow)]


def eviction_seconds(round_: Round, name: str, block: int, clock: int) -> float:
    """Return what the eviction took as a user sees it: the steps in and after it, less what they cost later.

    That counts what dge_stats cannot see, such as graphs that have to be built again.
    """
    after = median(t[clock] for t in round_["decode"][name]) / block
    steps = [t[clock] for t in round_["eviction_steps"][name]]
    return float(sum(steps) - len(steps) * after)


def ratios(rounds: Sequence[Round], name: str, block: int, clock: int = WALL) -> dict[str, float]:
    """Return RATIOS of an arm with eviction, of the rounds of one prompt length: medians over all turns or rounds.

    By CPU time without ``eviction``, of which dge_stats knows the wall-clock time only.
    """
    budget = str(rounds[0]["eviction"][name]["budget"])
    prefills = [sum(t[clock] for t in round_["prefill"][name]) for round_ in rounds]
    outside = [eviction_seconds(round_, name, block, clock) for round_ in rounds]
    found = {
        "prefill": _speed((r["prefill"] for r in rounds), name, FULL, clock),
        "before": _speed((r["before"] for r in rounds), name, FULL, clock),
        "after": _speed((r["decode"] for r in rounds), name, FULL, clock),
        "fresh": _speed((r["fresh"][budget] for r in rounds), name, FULL, clock),
        "eviction_outside": float(median(some / prefill for some, prefill in zip(outside, prefills))),
    }
    if clock == WALL:
        found["eviction"] = float(
            median(r["eviction"][name]["seconds"] / prefill for r, prefill in zip(rounds, prefills))
        )
    return found


def stock_ratios(rounds: Sequence[Round], clock: int = WALL) -> dict[str, float]:
    """Return STOCK_RATIOS; on the full cache the two phases of decoding are the same."""
    return {
        "prefill": _speed((r["prefill"] for r in rounds), FULL, STOCK, clock),
        "decode": _speed((r[phase] for r in rounds for phase in ("before", "decode")), FULL, STOCK, clock),
    }


def _speed(phases: Iterable[Mapping[str, Times]], fast: str, slow: str, clock: int) -> float:
    return float(median(pair for times in phases for pair in paired_speed(times[fast], times[slow], clock)))


def figures(rounds: Sequence[Round], name: str, plan: Mapping[str, int]) -> Figures:
    """Return what is said of an arm by itself: tokens per second, seconds, entries, bytes. Medians over the rounds."""
    n_before = plan["blocks"] * plan["block"]

    def of_blocks(phase: str) -> float:
        return float(plan["block"] / median(t[WALL] for r in rounds for t in r[phase][name]))

    last = rounds[-1]
    found: Figures = {
        "tokens_per_second": {
            "prefill": float(
                median((r["context"] - n_before) / sum(t[WALL] for t in r["prefill"][name]) for r in rounds)
            ),
            "before": of_blocks("before"),
            "after": of_blocks("decode"),
        },
        "memory": {when: last["memory"][name][when] for when in ("loaded", "before", "after")},
        "peak_rss": last["memory"][name]["after"].get("peak_rss"),
    }
    if name in last["eviction"]:
        eviction = last["eviction"][name]
        parts = {part: f"seconds_{part}" for part in ("score", "select", "compact")}
        found["seconds"] = {
            "draft": float(median(sum(t[WALL] for t in r["draft"][name]) for r in rounds)),
            **{part: float(median(r["eviction"][name][key] for r in rounds)) for part, key in parts.items()},
            "eviction_outside": float(median(eviction_seconds(r, name, plan["block"], WALL) for r in rounds)),
        }
        found["rows"] = [eviction["rows_before"], eviction["rows_after"], last["end"][name]["rows"]]
        found["bytes"] = [eviction["bytes_before"], eviction["bytes_after"]]
        found["n_recalls"] = last["end"][name]["n_recalls"]
    return found


def quietness(rounds: Sequence[Round], n_threads: int) -> float:
    """Return the median share of the time that the threads of an arm really ran; 1 on a quiet machine."""
    shares = [
        t[CPU] / (t[WALL] * n_threads)
        for round_ in rounds
        for phase in ("prefill", "before", "decode")
        for times in round_[phase].values()
        for t in times
    ]
    return float(median(shares))


def summary(result: Mapping[str, Any]) -> list[Figures]:
    """Return figures and ratios of each arm, by prompt length: for the JSON file and for `table`."""
    plan = result["plan"]
    found = []
    for context in sorted({round_["context"] for round_ in result["rounds"]}):
        rounds = [round_ for round_ in result["rounds"] if round_["context"] == context]
        arms = {}
        for name in rounds[0]["prefill"]:
            arms[name] = figures(rounds, name, plan)
            if name in rounds[0]["eviction"]:
                arms[name]["ratios"] = ratios(rounds, name, plan["block"], WALL)
                arms[name]["ratios_cpu_time"] = ratios(rounds, name, plan["block"], CPU)
        one: Figures = {
            "context": context,
            "rounds": len(rounds),
            "on_cpu": quietness(rounds, result["settings"]["n_threads"]),
            "arms": arms,
            "full_over_stock": None,
            "full_over_stock_cpu_time": None,
        }
        if STOCK in arms:
            one["full_over_stock"] = stock_ratios(rounds, WALL)
            one["full_over_stock_cpu_time"] = stock_ratios(rounds, CPU)
        found.append(one)
    return found


def _wants(ratio: Ratio, settings: Mapping[str, Any]) -> bool:
    """Return whether the target of a ratio applies to an arm: sums, recalls and uneven budgets have a price."""
    config = DGEConfig(**settings)
    if ratio.key == "prefill":
        return not needs_sums(config)
    return ratio.key != "fresh" or (not config.recall and is_even(config))


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cells: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}" for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in (head, *rows)
    ]


def _mib(n: int | None) -> str:
    return "-" if n is None else f"{n / MIB:,.1f}"


def _change(before: int | None, after: int | None) -> str:
    return "-" if before is None or after is None else f"{_mib(before)} -> {_mib(after)}"


def _speeds(one: Figures) -> list[str]:
    head = ("tokens/s; seconds", "prefill", "before", "after", "draft s", "score s", "select s", "compact s", "entries")
    rows = []
    for name, arm in one["arms"].items():
        speed, seconds = arm["tokens_per_second"], arm.get("seconds")
        cells = [name, *(f"{speed[key]:,.1f}" for key in ("prefill", "before", "after"))]
        if seconds is None:
            cells += ["-"] * 5
        else:
            cells += [f"{seconds[key]:.4f}" for key in ("draft", "score", "select", "compact")]
            cells.append(f"{arm['rows'][0]:,} -> {arm['rows'][1]:,}")
        rows.append(cells)
    return _grid(head, rows)


def _ratios(one: Figures, arms: Mapping[str, Any], key: str, title: str) -> list[str]:
    rows = [["wanted", *(ratio.wanted for ratio in RATIOS)]]
    for name, arm in one["arms"].items():
        if key not in arm:
            continue
        cells = [name]
        for ratio in RATIOS:
            value = arm[key].get(ratio.key)
            verdict = ratio.verdict(value, one["context"]) if _wants(ratio, arms[name]["dge"]) else ""
            cells.append("-" if value is None else f"{value:.3f} {verdict}".rstrip())
        rows.append(cells)
    return _grid((title, *(ratio.title for ratio in RATIOS)), rows)


def _memory(one: Figures) -> list[str]:
    head = ("MiB, before -> after the eviction", "K and V in use", "cache", "host copy", "resident", "peak")
    rows = []
    for name, arm in one["arms"].items():
        before, after = arm["memory"]["before"], arm["memory"]["after"]
        in_use = _change(*arm["bytes"]) if "bytes" in arm else "-"
        caches, resident = _change(before.get("kv"), after.get("kv")), _change(before["rss"], after["rss"])
        rows.append([name, in_use, caches, _mib(after.get("parked")), resident, _mib(arm["peak_rss"])])
    return _grid(head, rows)


def _stock(one: Figures, key: str) -> list[str]:
    if one[key] is None:
        return ["full / stock: not measured, no interpreter with a stock llama-cpp-python (--stock PYTHON)"]
    cells = []
    for ratio in STOCK_RATIOS:
        value = one[key][ratio.key]
        cells.append(f"{ratio.title} {value:.3f} {ratio.verdict(value, one['context'])} (wanted {ratio.wanted})")
    return [f"full / stock: {', '.join(cells)}"]


def _builds(result: Mapping[str, Any]) -> list[str]:
    """Return how the libraries were built, if not alike."""
    out: list[str] = []
    if STOCK not in result["arms"]:
        return out
    if result["arms"][STOCK]["system"] != result["arms"][FULL]["system"]:
        out.append("\nstock was built with other options, so part of the difference may be theirs:")
        out += [f"  {arm}: {result['arms'][arm]['system']}" for arm in (STOCK, FULL)]
    return out


def table(result: Mapping[str, Any]) -> str:
    """Return the text that is printed."""
    n_before = result["plan"]["blocks"] * result["plan"]["block"]
    out: list[str] = []
    for one in summary(result):
        quiet = one["on_cpu"]
        out += [
            f"{one['context']:,} tokens, the last {n_before} of them read one by one (before the eviction); "
            f"medians of {one['rounds']} round(s); threads were on a CPU for {quiet:.0%} of the time: "
            + ("a quiet machine" if quiet >= QUIET else "NOT a quiet machine, so mistrust small differences"),
            "",
            *_speeds(one),
            "",
            *_ratios(one, result["arms"], "ratios", "ratio, same turn"),
            *_stock(one, "full_over_stock"),
            "",
        ]
        if quiet < QUIET:
            cpu_time = _ratios(one, result["arms"], "ratios_cpu_time", "the same by CPU time")
            out += [*cpu_time, *_stock(one, "full_over_stock_cpu_time"), ""]
        out += [*_memory(one), ""]
    out += [
        "One process per arm. before, after: the eviction. draft: the k - 1 tokens before it. score, select and",
        f"compact: its parts by dge_stats; from outside: {SETTLE + 1} steps in and after it, less their later price.",
        "fresh: a prompt of as many tokens as the budget, on the full cache. cache: buffers of K and V.",
        *_builds(result),
    ]
    return "\n".join(out)
