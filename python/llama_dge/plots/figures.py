"""What the figures show: values by arm and budget with intervals, and hits by depth and length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from ..eval.arms import FULL, without_budget
from ..eval.metrics import paired_bootstrap, wilson
from ..eval.results import Row
from ..eval.summary import n_hits

Budget = Union[int, float]  # entries, or a share of the prompt


@dataclass(frozen=True)
class Point:
    """A figure of one arm and budget, its 95 % interval, and how many prompts it is made of."""

    budget: Budget
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Curves:
    """Figures over budgets.

    Parameters
    ----------
    name
        For a file's name.
    title, y_label
        Of the figure.
    interval
        What kind of interval points have.
    full
        The full cache, or None where it has no figure.
    arms
        Points by arm, smallest budget first.
    top
        Largest possible value, or None.
    log
        Whether values differ by orders of magnitude.
    share
        Whether budgets are shares of the prompt.
    """

    name: str
    title: str
    y_label: str
    interval: str
    full: Point | None
    arms: dict[str, tuple[Point, ...]]
    top: float | None
    log: bool
    share: bool


@dataclass(frozen=True)
class Grid:
    """Hits of one arm: `cells[depth, length]` are hits and questions; depths are tenths, 0 the beginning."""

    arm: str
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: dict[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Grids:
    """Grids of all arms of a model and a set of questions."""

    name: str
    title: str
    grids: tuple[Grid, ...]


def _group(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _prompt(row: Row) -> tuple[str, ...]:
    return row["task"], row["prompt_id"], row["prompt_sha256"], row["model_sha256"]


Measure = Callable[[Sequence[Row], Budget], Optional[Point]]


def _hits(rows: Sequence[Row], budget: Budget) -> Point | None:
    scored = [row for row in rows if row["score"] is not None]
    if not scored:
        return None
    hits, asked = n_hits(scored), sum(len(row["expected"]) for row in scored)
    low, high = wilson(hits, asked)
    return Point(budget, hits / asked, low, high, asked)


def _score(rows: Sequence[Row], budget: Budget) -> Point | None:
    """Mean over sets of the mean score in each; prompts are drawn again within their sets."""
    scored = [row for row in rows if row["score"] is not None]
    groups = _group(scored, lambda row: row["set"])
    if not groups:
        return None
    mean, low, high = paired_bootstrap([[100 * row["score"] for row in cell] for _, cell in sorted(groups.items())])
    return Point(budget, mean, low, high, len(scored))


def _divergence(rows: Sequence[Row], budget: Budget) -> Point | None:
    """Mean over prompts of the mean divergence of the positions after the eviction."""
    values = [float(row["kl_mean"]) for row in rows if row["evicted"] and row["kl_mean"] is not None]
    if not values:
        return None
    mean, low, high = paired_bootstrap([values])
    return Point(budget, mean, low, high, len(values))


def _curves(
    rows: Sequence[Row], measure: Measure, *, name: str, title: str, y_label: str, interval: str,
    top: float | None = None, log: bool = False,
) -> list[Curves]:  # fmt: skip
    """One figure for budgets in entries and one for shares of the prompt, of prompts that all arms have in common."""
    made = []
    full_rows = [row for row in rows if row["arm"] == FULL]
    for share in (False, True):
        evicted = [row for row in rows if row["arm"] != FULL and isinstance(row["budget"], float) == share]
        cells = _group(evicted, lambda row: (without_budget(row["arm"]), row["budget"]))
        if not cells:
            continue
        # arms are compared on the same prompts only; an unfinished run lacks some of the last ones
        everyone = [*cells.values(), *([full_rows] if full_rows else [])]
        common = set.intersection(*({_prompt(row) for row in cell} for cell in everyone))
        arms: dict[str, list[Point]] = {}
        for (arm, budget), cell in sorted(cells.items()):
            point = measure([row for row in cell if _prompt(row) in common], budget)
            if point is not None:
                arms.setdefault(arm, []).append(point)
        if not arms:
            continue
        made.append(
            Curves(
                name=name + ("-share" if share else ""),
                title=title,
                y_label=y_label,
                interval=interval,
                full=measure([row for row in full_rows if _prompt(row) in common], 0) if not log else None,
                arms={arm: tuple(points) for arm, points in arms.items()},
                top=top,
                log=log,
                share=share,
            )
        )
    return made


def curves(rows: Sequence[Row], *, pool: bool = False) -> list[Curves]:
    """Return the budget curves of results.

    Needles: share of hits, by model, length and set. LongBench: average score, by model. All tasks: divergence after
    the eviction, by model and, for needles, length and set. Only prompts that every arm has answered count.

    Parameters
    ----------
    rows
        Of files of results.
    pool
        Needles: all sets together.
    """
    made: list[Curves] = []
    groups = _group(rows, lambda row: (row["task"], row["model"], *_place(row, pool)))
    for (task, model, length, name), cell in sorted(groups.items()):
        what = [task, model, *([f"{length} tokens"] if length else []), *([name] if name else [])]
        title, file = ", ".join(what), "-".join(what)
        if task == "needle":
            made += _curves(
                cell, _hits, name=f"{file}-hits", title=title, y_label="share of questions answered rightly",
                interval="95 % Wilson intervals", top=1.0,
            )  # fmt: skip
        elif task == "longbench":
            made += _curves(
                cell, _score, name=f"{file}-score", title=title, y_label="average score", top=100.0,
                interval="95 % bootstrap intervals over prompts, within their sets",
            )  # fmt: skip
        made += _curves(
            cell, _divergence, name=f"{file}-kl", title=title, log=True,
            y_label="KL divergence from the full cache after the eviction, nats",
            interval="95 % bootstrap intervals over prompts",
        )  # fmt: skip
    return made


def _place(row: Row, pool: bool) -> tuple[int, str]:
    if row["task"] != "needle":
        return 0, ""
    return int(row.get("length", 0)), "" if pool else str(row["set"])


def tenth(depth: float) -> int:
    """Return the tenth of a text that a depth in [0, 1] is in."""
    return min(9, int(depth * 10))


def grids(rows: Sequence[Row], *, pool: bool = False) -> list[Grids]:
    """Return hits by depth and length of the needles in results, the full cache first.

    Parameters
    ----------
    rows
        Of files of results.
    pool
        All sets together.
    """
    made = []
    needles = [row for row in rows if row["task"] == "needle" and row.get("depth") is not None]
    groups = _group(needles, lambda row: (row["model"], "" if pool else str(row["set"])))
    for (model, name), cell in sorted(groups.items()):
        what = ["needle", model, *([name] if name else [])]
        arms = _group(cell, lambda row: (row["arm"] != FULL, row["budget"] or 0, row["arm"]))
        lengths = tuple(sorted({int(row["length"]) for row in cell}))
        depths = tuple(sorted({tenth(row["depth"]) for row in cell}))
        panels = []
        for (_, _, arm), found in sorted(arms.items()):
            places = _group(found, lambda row: (tenth(row["depth"]), int(row["length"])))
            cells = {
                place: (round(sum(row["score"] or 0 for row in here)), len(here)) for place, here in places.items()
            }
            panels.append(Grid(arm, depths, lengths, cells))
        made.append(Grids("-".join([*what, "grid"]), ", ".join(what), tuple(panels)))
    return made
