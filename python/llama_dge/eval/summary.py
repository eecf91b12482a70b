"""Tables of results, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .arms import FULL, without_budget
from .metrics import paired_bootstrap, wilson
from .results import Row, key_of, told_apart, unique

Groups = dict[tuple[Any, ...], list[Row]]


def _group(rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [list(header), ["---"] * len(header), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def distances(rows: Iterable[Row]) -> tuple[list[float], list[int]]:
    """Return divergences and equal top tokens of all positions after an eviction."""
    kl: list[float] = []
    same: list[int] = []
    for row in rows:
        if row["evicted"]:
            kl += row["kl"][row["n_before_eviction"] :]
            same += row["same_top"][row["n_before_eviction"] :]
    return kl, same


def _kl_cells(rows: list[Row]) -> list[str]:
    kl, same = distances(rows)
    n_evicted = f"{sum(row['evicted'] for row in rows)}"
    if not kl:
        return ["", "", "", "", n_evicted]
    # from the second token on: what precedes an eviction counts as equal, so that arms with unlike k compare
    along = [value for row in rows for value in row["kl"][1:]]
    return [
        f"{np.mean(kl):.3f}",
        f"{np.quantile(kl, 0.99):.2f}",
        f"{np.mean(along):.3f}",
        f"{100 * np.mean(same):.1f}",
        n_evicted,
    ]


_KL_HEADER = ["KL", "p99", "KL, all", "same top %", "evicted"]


def known_to_full(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of prompts that the full cache answers rightly."""
    right = {_prompt(row) for row in rows if row["arm"] == FULL and (row["score"] or 0) >= 1.0}
    return [row for row in rows if _prompt(row) in right]


def _prompt(row: Row) -> tuple[str, ...]:
    task, prompt_id, sha256, _, model = key_of(row)
    return task, prompt_id, sha256, model


def in_common(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of prompts that every arm has answered."""
    by_arm = _group(rows, lambda row: (row["arm"],)).values()
    common = set.intersection(*({_prompt(row) for row in cell} for cell in by_arm)) if by_arm else set()
    return [row for row in rows if _prompt(row) in common]


def n_hits(rows: Iterable[Row], score: str = "score") -> int:
    """Return how many of the expected answers were found."""
    return sum(round(row[score] * len(row["expected"])) for row in rows)


def _n_late(rows: Iterable[Row]) -> int:
    """Return how many hits were not complete before the eviction."""
    # digits that follow the draft can spoil a number at its end: that hit is lost, and is not one less of another row
    return sum(max(0, n_hits([row]) - n_hits([row], "score_draft")) for row in rows)


def needle_table(rows: Sequence[Row], by_set: bool = True) -> str:
    """Return hits and divergences by length, budget, set and arm.

    Rows of different prompts are pooled; a cell tells how many there are. "after it" counts hits whose answer was not
    complete before the eviction.
    """
    groups = _group(
        rows,
        lambda row: (
            row["model"], row.get("length", 0), row["set"] if by_set else "all",
            row["budget"] or 0, _order(row), without_budget(row["arm"]),
        ),
    )  # fmt: skip
    lines = []
    for (model, length, name, budget, _, arm), cell in sorted(groups.items()):
        # one question may ask for several things; its score is the share that was found
        hits, asked = n_hits(cell), sum(len(row["expected"]) for row in cell)
        low, high = wilson(hits, asked)
        lines.append(
            [model, str(length), name, str(budget or "all"), arm, f"{hits}/{asked}", f"{low:.2f} .. {high:.2f}"]
            + ([f"{_n_late(cell)}"] if arm != FULL else [""])
            + _kl_cells(cell)
        )
    header = ["model", "tokens", "set", "entries", "arm", "hits", "95 %", "after it", *_KL_HEADER]
    return table(header, lines)


def grid_table(rows: Sequence[Row], by_set: bool = True) -> str:
    """Return hits, mean and p99 of the divergence by arm and budget: a table for each model, length and set."""
    parts = []
    groups = _group(rows, lambda row: (row["model"], row.get("length", 0), row["set"] if by_set else "all"))
    for (model, length, name), cell in sorted(groups.items()):
        full = [row for row in cell if row["arm"] == FULL]
        budgets = sorted({row["budget"] for row in cell if row["arm"] != FULL})
        places = _group(
            (row for row in cell if row["arm"] != FULL), lambda row: (without_budget(row["arm"]), row["budget"])
        )
        lines = [["full cache", *[_hits_cell(full)] * len(budgets)]] if full else []
        for arm in sorted({arm for arm, _ in places}):
            lines.append([f"`{arm}`", *(_hits_cell(places.get((arm, budget), [])) for budget in budgets)])
        if not budgets:  # nothing but the full cache
            lines = [["full cache", _hits_cell(full)]]
        table_ = table(["arm", *(map(_entries, budgets) if budgets else ["all entries"])], lines)
        parts.append(f"{model}, {length} tokens, {name}: hits, KL after the eviction: mean, p99\n\n{table_}")
    return "\n\n".join(parts)


def _entries(budget: int | float) -> str:
    return f"{100 * budget:g} % of the entries" if isinstance(budget, float) else f"{budget} entries"


def _hits_cell(rows: list[Row]) -> str:
    if not rows:
        return ""
    kl, _ = distances(rows)
    hits = f"{n_hits(rows)}/{sum(len(row['expected']) for row in rows)}"
    return f"{hits}, {np.mean(kl):.3f}, {np.quantile(kl, 0.99):.2f}" if kl else hits


def _order(row: Row) -> int:
    return 0 if row["arm"] == FULL else 1


def depth_table(rows: Sequence[Row], by_set: bool = True) -> str:
    """Return hits by depth and length, one table per model, set and arm: a heat map."""
    parts = []
    placed = [row for row in rows if row.get("depth") is not None]
    groups = _group(placed, lambda row: (row["model"], row["set"] if by_set else "all", row["arm"]))
    for (model, name, arm), cell in sorted(groups.items()):
        lengths = sorted({row["length"] for row in cell})
        places = _group(cell, lambda row: (_tenth(row["depth"]), row["length"]))
        depths = sorted({depth for depth, _ in places})

        def text(depth: float, length: int, places: Groups = places) -> str:
            found = places.get((depth, length), [])
            return f"{int(sum(row['score'] for row in found))}/{len(found)}" if found else ""

        lines = [[f"{depth:.2f}", *(text(depth, length) for length in lengths)] for depth in depths]
        parts.append(
            f"{model}, {name}, {arm}\n\n" + table(["depth", *(f"{length} tokens" for length in lengths)], lines)
        )
    return "\n\n".join(parts)


def _tenth(depth: float) -> float:
    return min(9, int(depth * 10)) / 10 + 0.05


def score_table(rows: Sequence[Row]) -> str:
    """Return the mean score per set and arm, the macro average, and its difference to the full cache.

    Only prompts that every arm has answered count. The interval is that of a bootstrap over prompts, paired, within
    each set.
    """
    rows = in_common(rows)
    if not rows:
        return "No prompt was answered by all arms."
    by_arm = {arm[0]: cell for arm, cell in _group(rows, lambda row: (row["arm"],)).items()}
    prompts: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        prompts.setdefault(row["set"], set()).add(_prompt(row))
    sets = sorted(prompts)
    lines = []
    full = {_prompt(row): row["score"] for row in by_arm.get(FULL, [])}
    for arm, cell in sorted(by_arm.items(), key=lambda item: (item[0] != FULL, item[0])):
        scores = _group(cell, lambda row: (row["set"],))
        means = [float(np.mean([row["score"] for row in scores[(name,)]])) for name in sets]
        difference = ""
        if full and arm != FULL:
            groups = [[100 * (row["score"] - full[_prompt(row)]) for row in scores[(name,)]] for name in sets]
            mean, low, high = paired_bootstrap(groups)
            difference = f"{mean:+.2f} ({low:+.2f} .. {high:+.2f})"
        average = f"{100 * np.mean(means):.2f}" if means else ""
        lines.append([arm, *(f"{100 * mean:.1f}" for mean in means), average, difference, *_kl_cells(cell)])
    return table(
        [
            "arm",
            *(f"{name} ({len(prompts[name])})" for name in sets),
            "average",
            "less the full cache, 95 %",
            *_KL_HEADER,
        ],
        lines,
    )


def kl_table(rows: Sequence[Row]) -> str:
    """Return divergences by arm, for prompts without a right answer. Only those that every arm has answered count."""
    groups = _group(in_common(rows), lambda row: (_order(row), row["arm"]))
    return table(
        ["arm", "prompts", *_KL_HEADER],
        [[arm, f"{len(cell)}", *_kl_cells(cell)] for (_, arm), cell in sorted(groups.items())],
    )


def summary(
    rows: Sequence[Row], *, depths: bool = False, by_set: bool = True, known: bool = False, grid: bool = False
) -> str:
    """Return the tables of all tasks in a file of results.

    Parameters
    ----------
    rows
        Of the file.
    depths
        Add hits by depth and length.
    by_set
        Keep the sets of needles apart.
    known
        Only prompts that the full cache answers rightly.
    grid
        Needles by arm and budget, hits and divergence alone.
    """
    parts = []
    rows = told_apart(unique(rows))
    for (task,), cell in sorted(_group(rows, lambda row: (row["task"],)).items()):
        cell = known_to_full(cell) if known and task != "kld" else cell
        if not cell:
            parts.append(f"## {task}\n\nNo row is of a prompt that the full cache is known to answer rightly.")
            continue
        if task == "needle":
            parts.append(f"## {task}\n\n{(grid_table if grid else needle_table)(cell, by_set)}")
            if depths and any(row.get("depth") is not None for row in cell):
                parts.append(depth_table(cell, by_set))
        elif task == "longbench":
            for (model,), part in sorted(_group(cell, lambda row: (row["model"],)).items()):
                parts.append(f"## {task}, {model}\n\n{score_table(part)}")
        else:
            for (model,), part in sorted(_group(cell, lambda row: (row["model"],)).items()):
                parts.append(f"## {task}, {model}\n\n{kl_table(part)}")
    parts.append(
        "KL: divergence of the next token's distribution from the full cache's along its answer, in nats: mean and p99 "
        'of the positions after the eviction; "all" is the mean of all positions but the first. "evicted": prompts '
        'with an eviction. "after it": hits whose answer was not complete before.'
    )
    return "\n\n".join(parts) + "\n"
