"""Ratios of what measure.py timed, and the table that shows them. Nothing here measures anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .measure import DGE, OFF, STOCK, Times

WALL, CPU = 0, 1

#: Below this share of the time on the CPU, something else ran on the machine and wall-clock ratios say little.
QUIET = 0.97


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Parameters
    ----------
    key
        Name in the JSON file.
    title
        What is compared.
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
        """Return "ok", "MISSED", "not measured", or nothing where nothing is wanted."""
        if value is None:
            return "not measured"
        if context < self.wanted_from:
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


LINES = (
    Line("prefill_off_stock", "prefill speed, dge off / stock", at_least=0.98),
    Line("decode_off_stock", "decode speed, dge off / stock", at_least=0.98),
    Line("prefill_armed_off", "prefill speed, armed / dge off", at_least=0.97),
    Line("decode_cut_fresh", "decode speed, after the cut / fresh prompt of `budget` tokens", at_least=0.95),
    Line("cut_prefill", "seconds, cut (from outside) / its prefill", at_most=0.03, wanted_from=4096),
    Line("cut_prefill_stats", "seconds, cut (dge_stats) / its prefill", at_most=0.03, wanted_from=4096),
    Line("decode_cut_full", "decode speed, after the cut / full cache"),
)


def paired_speed(fast: Times, slow: Times, clock: int) -> list[float]:
    """Return speed of the first over speed of the second, turn by turn."""
    if len(fast) != len(slow):
        raise ValueError(f"{len(fast)} turns cannot be paired with {len(slow)}")
    return [b[clock] / a[clock] for a, b in zip(fast, slow)]


def cut_seconds(round_: dict[str, Any], plan: dict[str, Any], clock: int) -> float:
    """Return what the cut took as a user sees it: the k steps that end with it, less what k steps cost without it.

    That counts what dge_stats cannot see, such as graphs that have to be built again.
    """
    block = plan["block"]
    full = median(t[clock] for t in round_["decode"][OFF]) / block
    after = median(t[clock] for t in round_["decode"][DGE]) / block
    steps = [t[clock] for t in round_["draft"][DGE]]
    return float(sum(steps) - (len(steps) - 1) * full - after)


def ratios(rounds: Sequence[dict[str, Any]], plan: dict[str, Any], clock: int = WALL) -> dict[str, float | None]:
    """Return the ratios of the rounds of one prompt length.

    Parameters
    ----------
    rounds
        Results of `measure.run_round`.
    plan
        Fields of `measure.Plan`.
    clock
        WALL or CPU.

    Returns
    -------
    dict
        A value for each of LINES: the median over all pairs of all rounds, None where an arm did not take part.
    """

    def speed(phase: str, fast: str, slow: str) -> float | None:
        pairs: list[float] = []
        for round_ in rounds:
            times = round_[phase]
            if fast not in times or slow not in times:
                return None
            pairs += paired_speed(times[fast], times[slow], clock)
        return median(pairs)

    def share(seconds: list[float]) -> float:
        prefills = [sum(t[clock] for t in round_["prefill"][DGE]) for round_ in rounds]
        return float(median(cut / prefill for cut, prefill in zip(seconds, prefills)))

    return {
        "prefill_off_stock": speed("prefill", OFF, STOCK),
        "decode_off_stock": speed("decode", OFF, STOCK),
        "prefill_armed_off": speed("prefill", DGE, OFF),
        "decode_cut_fresh": speed("fresh", DGE, OFF),
        "cut_prefill": share([cut_seconds(round_, plan, clock) for round_ in rounds]),
        "cut_prefill_stats": share([round_["cut"]["seconds"] for round_ in rounds]),
        "decode_cut_full": speed("decode", DGE, OFF),
    }


def quietness(rounds: Sequence[dict[str, Any]], n_threads: int) -> float:
    """Return the median share of the time that the threads of an arm really ran; 1 on a quiet machine."""
    shares = [
        t[CPU] / (t[WALL] * n_threads)
        for round_ in rounds
        for phase in ("prefill", "decode", "fresh")
        for times in round_[phase].values()
        for t in times
    ]
    return float(median(shares))


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ratios, memory and quietness by prompt length, for the JSON file and for `table`."""
    found = []
    for context in sorted({round_["context"] for round_ in result["rounds"]}):
        rounds = [round_ for round_ in result["rounds"] if round_["context"] == context]
        cut = rounds[-1]["cut"]
        found.append(
            {
                "context": context,
                "rounds": len(rounds),
                "ratios": ratios(rounds, result["plan"], WALL),
                "ratios_cpu_time": ratios(rounds, result["plan"], CPU),
                "on_cpu": quietness(rounds, result["settings"]["n_threads"]),
                "rows": [cut["rows_before"], cut["rows_after"]],
                "bytes": [cut["bytes_before"], cut["bytes_after"]],
                # whole processes, so they only ever grow: the first round says most about one length
                "peak_rss": rounds[0]["peak_rss"],
            }
        )
    return found


def table(result: dict[str, Any]) -> str:
    """Return the text that is printed."""
    found = summary(result)
    width = max(len(line.title) for line in LINES)
    head = "".join(f"{entry['context']:>9,}           " for entry in found)
    out = [f"{'ratio, median of paired turns':<{width}}  {'wanted':<8}{head}".rstrip()]
    for line in LINES:
        cells = []
        for entry in found:
            value = entry["ratios"][line.key]
            text = "-" if value is None else f"{value:.3f}"
            cells.append(f"{text:>9} {line.verdict(value, entry['context']):<10}")
        out.append(f"{line.title:<{width}}  {line.wanted:<8}{''.join(cells)}".rstrip())

    out.append("")
    for entry in found:
        before, after = entry["rows"]
        full, cut = (n / 2**20 for n in entry["bytes"])
        out.append(
            f"{entry['context']:,} tokens: {before:,} -> {after:,} rows per layer and KV head, K and V in use "
            f"{full:.1f} -> {cut:.1f} MiB (the buffers stay allocated for n_ctx)"
        )
        peaks = ", ".join(f"{arm} {n / 2**20:,.0f} MiB" for arm, n in entry["peak_rss"].items() if n is not None)
        if peaks:
            out.append(f"  peak resident memory so far: {peaks}")
        quiet = entry["on_cpu"]
        out.append(
            f"  rounds: {entry['rounds']}; threads were on a CPU for {quiet:.0%} of the time: "
            + ("a quiet machine" if quiet >= QUIET else "NOT a quiet machine, so mistrust small differences")
        )
    if STOCK not in result["arms"]:
        out.append("stock was not measured: set LLAMA_DGE_STOCK_PYTHON to an interpreter with a stock llama-cpp-python")
    elif result["arms"][STOCK]["system"] != result["arms"][OFF]["system"]:
        out.append("stock was built with other options, so part of the difference may be theirs:")
        out += [f"  {arm}: {result['arms'][arm]['system']}" for arm in (STOCK, OFF)]
    return "\n".join(out)
