"""How far two libraries agree on kept sets, and ratios of what peers.py timed. Nothing here measures anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

WALL, CPU = 0, 1
MIB = 2**20
WANTED = 0.99

#: arm, its own full cache, title
ARMS = (
    ("llama-dge full", None, "llama-dge, full cache"),
    ("llama-dge snapkv", "llama-dge full", "llama-dge, SnapKV"),
    ("kvpress full", None, "transformers, full cache"),
    ("kvpress snapkv", "kvpress full", "kvpress, SnapKVPress"),
)

Kept = Sequence[Sequence[Sequence[int]]]


def overlaps(ours: Kept, theirs: Kept, n_past: int | None = None) -> list[list[float]]:
    """Return which share of the entries that one library keeps the other keeps as well, per layer and KV head.

    Parameters
    ----------
    ours, theirs
        [n_layer][n_head_kv][n_kept] positions.
    n_past
        Count only positions below it: the window, which both keep in any case, is left out.

    Returns
    -------
    list of list of float
        [n_layer][n_head_kv]

    Raises
    ------
    ValueError
        Layers, heads, or the numbers of entries differ, so that a share would not mean the same from both sides.
    """
    if [len(layer) for layer in ours] != [len(layer) for layer in theirs]:
        raise ValueError(f"layers of {[len(layer) for layer in ours]} and {[len(layer) for layer in theirs]} heads")
    shares: list[list[float]] = []
    for i, (layer_a, layer_b) in enumerate(zip(ours, theirs)):
        shares.append([])
        for j, (a, b) in enumerate(zip(layer_a, layer_b)):
            mine, other = ({row for row in rows if n_past is None or row < n_past} for rows in (a, b))
            if len(mine) != len(other) or not mine or len(set(a)) != len(a):
                raise ValueError(f"layer {i}, head {j}: {len(mine)} and {len(other)} entries cannot be compared")
            shares[-1].append(len(mine & other) / len(other))
    return shares


def agreement(row: Mapping[str, Any]) -> dict[str, float]:
    """Return means and minima of one comparison, over its texts, layers and heads."""

    def flat(key: str) -> list[float]:
        return [share for text in row["texts"].values() for layer in text[key] for share in layer]

    return {
        "mean": mean(flat("all")),
        "min": min(flat("all")),
        "past_mean": mean(flat("past")),
        "past_min": min(flat("past")),
        "equal": mean(share == 1.0 for share in flat("all")),
        "logits": max(text["logits"] for text in row["texts"].values()),
    }


def figures(rounds: Sequence[Mapping[str, Any]], name: str, full: str | None, context: int) -> dict[str, float]:
    """Return speeds and bytes of an arm, and ratios to its own full cache: medians over rounds, paired by turn."""
    arms = [round_["arms"][name] for round_ in rounds]
    memory = arms[-1]["memory"]
    found = {
        "prefill": median(context / arm["prefill"][WALL] for arm in arms),
        "decode": median(8 / block[WALL] for arm in arms for block in arm["decode"]),
        "kv": memory["kv"],
        "rss": memory["rss"],
        "peak_rss": memory["peak_rss"],
    }
    if full is None:
        return found
    fulls = [round_["arms"][full] for round_ in rounds]
    pairs = [(a, b) for arm, other in zip(arms, fulls) for a, b in zip(arm["decode"], other["decode"])]
    for clock, suffix in ((WALL, ""), (CPU, ", CPU time")):
        # of ours, the eviction comes in the first step; of kvpress, it is part of the prefill
        seconds = [
            arm["prefill"][clock] + arm["step"][clock] - median(block[clock] for block in arm["decode"]) / 8
            for arm in arms
        ]
        found[f"prefill / full{suffix}"] = median(b["prefill"][clock] / a for a, b in zip(seconds, fulls))
        found[f"decode / full{suffix}"] = median(b[clock] / a[clock] for a, b in pairs)
    found["kv / full"] = memory["kv"] / fulls[-1]["memory"]["kv"]
    return found


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return agreement by comparison and figures by arm."""
    context = result["settings"]["context"]
    kept = [{k: v for k, v in row.items() if k != "texts"} | agreement(row) for row in result["kept"]]
    rounds = result["rounds"]
    return {
        "kept": kept,
        "arms": {name: figures(rounds, name, full, context) for name, full, _ in ARMS} if rounds else {},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the text that is printed, as Markdown."""
    found = summary(result)
    out = [
        "| window, kernel, budget | ours | both keep | least | without window | least | equal sets | logits differ |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["kept"]:
        shares = (f"{row[key]:.4f}" for key in ("mean", "min", "past_mean", "past_min", "equal"))
        size = f"{row['window']}, {row['kernel']}, {row['budget']}"
        out.append(f"| {size} | {row['variant']} | {' | '.join(shares)} | {row['logits']:.1e} |")
    least = min(row["mean"] for row in found["kept"] if row["variant"] == "f32")
    out.append(f"\nwanted in f32: {WANTED} or more: {'met' if least >= WANTED else 'MISSED'}")
    if not found["arms"]:
        return "\n".join(out)
    out += [
        "",
        "| arm | prefill, tokens/s | decode | prefill / own full | decode / own full | K and V, MiB | resident |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, _, title in ARMS:
        arm = found["arms"][name]
        keys = ("prefill / full", "decode / full")
        ratios = [f"{arm[key]:.3f} ({arm[key + ', CPU time']:.3f})" if key in arm else "" for key in keys]
        sizes = [f"{arm[key] / MIB:,.1f}" for key in ("kv", "rss")]
        cells = (title, f"{arm['prefill']:,.1f}", f"{arm['decode']:,.1f}", *ratios, *sizes)
        out.append(f"| {' | '.join(cells)} |")
    out.append("\nIn brackets: by CPU time. The eviction counts as part of the prefill.")
    return "\n".join(out)
