"""Figures as SVG, drawn by matplotlib: told apart by shape as well as by colour."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator
from typing import Any

from .figures import Budget, Curves, Grid, Grids, Point

# told apart by people with any kind of colour vision (Okabe and Ito)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 2)), (0, (1, 2)), (0, (5, 2, 1, 2)))
_MARKERS = "osD^"
_INK, _DIM, _SHADE = "#1f2328", "#59636e", "#0969da"
_STYLE = {
    "axes.edgecolor": _DIM,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#d0d7de",
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "llama-dge",  # ids that do not differ from run to run
    "text.color": _INK,
    "text.parse_math": False,  # a $ in a file's name is not mathematics
}


def require_matplotlib() -> Any:
    """Return matplotlib; raises ModuleNotFoundError that says what to install."""
    try:
        import matplotlib
        import matplotlib.figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("figures need matplotlib: pip install 'llama-dge[plot]'") from None
    return matplotlib


@contextlib.contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    """Make a figure of its own, apart from pyplot and whatever windows the user has."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # text stays text in an SVG, and whoever shows it may have the character
        warnings.filterwarnings("ignore", message="Glyph")
        yield matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any, title: str) -> str:
    """Return the SVG of a figure."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Title": printable(title)})
    return file.getvalue()


def printable(text: str) -> str:
    """Replace control characters, which XML does not know."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _budget(budget: Budget, share: bool) -> str:
    return f"{100 * budget:g} %" if share else f"{budget:,}"


def _apart(budgets: list[Budget]) -> list[Budget]:
    """Leave out budgets whose labels would touch on a logarithmic axis."""
    shown = budgets[:1]
    for budget in budgets[1:]:
        if math.log(budget / shown[-1]) > 0.07 * math.log(budgets[-1] / budgets[0]):
            shown.append(budget)
    return shown


def _prompts(points: tuple[Point, ...]) -> str:
    counts = sorted({point.n for point in points})
    return f"{counts[0]:,} prompts" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} prompts"


def draw_curves(curves: Curves) -> str:
    """Return the SVG of figures over budgets.

    Parameters
    ----------
    curves
        With at least one arm.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    n_lines = len(curves.arms) + (curves.full is not None)
    with _figure(7.5, 4.6 + 0.2 * n_lines) as figure:
        axes = figure.subplots()
        budgets = sorted({point.budget for points in curves.arms.values() for point in points})
        axes.set_xscale("log")
        ticks = _apart(budgets)
        axes.set_xticks(ticks, [_budget(budget, curves.share) for budget in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(budgets[0] / 1.4, budgets[-1] * 1.4)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        if curves.log:
            axes.set_yscale("log", nonpositive="clip")
        if curves.full is not None:
            full = curves.full
            axes.axhspan(full.low, full.high, color=_INK, alpha=0.08, linewidth=0)
            label = f"full cache, {_prompts((full,))}"
            axes.axhline(full.value, color=_INK, linestyle=(0, (4, 3)), linewidth=1.2, label=label)
        ratio = min((b / a for a, b in zip(budgets, budgets[1:])), default=2.0)
        for i, (arm, points) in enumerate(curves.arms.items()):
            # whiskers side by side: together they take a third of the way to the next budget
            apart = ratio ** ((i - (len(curves.arms) - 1) / 2) / (3 * len(curves.arms)))
            turn = i // len(_COLOURS)
            axes.errorbar(
                [point.budget * apart for point in points],
                [point.value for point in points],
                yerr=[
                    [max(point.value - point.low, 0.0) for point in points],
                    [max(point.high - point.value, 0.0) for point in points],
                ],
                color=_COLOURS[i % len(_COLOURS)],
                linestyle=_DASHES[turn % len(_DASHES)],
                marker=_MARKERS[(i + turn) % len(_MARKERS)],
                linewidth=1.5,
                elinewidth=1.0,
                capsize=2.5,
                label=printable(f"{arm}, {_prompts(points)}"),
            )
        if not curves.log:
            axes.set_ylim(bottom=0.0)
        axes.set_title(f"{printable(curves.title)}\n{curves.interval}", loc="left")
        axes.set_ylabel(curves.y_label)
        axes.set_xlabel("share of the prompt that is kept" if curves.share else "entries kept per layer and KV head")
        figure.legend(loc="outside lower left")
        return _svg(figure, curves.title)


def draw_grids(grids: Grids) -> str:
    """Return the SVG of hits by depth and length, one panel per arm.

    Parameters
    ----------
    grids
        With at least one arm.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    first = grids.grids[0]
    width = max(1.1 + 0.7 * len(first.lengths), 0.3 + 0.085 * max(len(grid.arm) for grid in grids.grids))
    columns = max(1, min(len(grids.grids), int(12 // width)))
    rows = -(-len(grids.grids) // columns)
    with _figure(width * columns, 0.8 + (0.9 + 0.27 * len(first.depths)) * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False)
        for i, axes in enumerate(panels.flat):
            if i < len(grids.grids):
                _panel(axes, grids.grids[i])
            else:
                axes.set_axis_off()
        what = "questions answered rightly, by place of the fact and tokens of the text"
        figure.suptitle(f"{printable(grids.title)}\n{what}", x=0.01, ha="left", fontsize=9)
        return _svg(figure, grids.title)


def _panel(axes: Any, grid: Grid) -> None:
    shares = [[_share(grid, depth, length) for length in grid.lengths] for depth in grid.depths]
    axes.pcolormesh(shares, cmap=_shades(), vmin=0.0, vmax=1.0, edgecolors="#d0d7de", linewidth=0.5)
    for row, depth in enumerate(grid.depths):
        for column, length in enumerate(grid.lengths):
            found = grid.cells.get((depth, length))
            if found is not None:
                axes.text(column + 0.5, row + 0.5, f"{found[0]}/{found[1]}", ha="center", va="center")
    axes.set_xticks([i + 0.5 for i in range(len(grid.lengths))], [f"{length:,}" for length in grid.lengths])
    axes.set_yticks(
        [i + 0.5 for i in range(len(grid.depths))], [f"{10 * depth} - {10 * depth + 10} %" for depth in grid.depths]
    )
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.set_title(printable(grid.arm), loc="left", fontsize=9, fontweight="bold")


def _share(grid: Grid, depth: int, length: int) -> float:
    hits, asked = grid.cells.get((depth, length), (0, 0))
    return hits / asked if asked else float("nan")


def _shades() -> Any:
    """Return colours from white to the shade at 60 %, so that text on it stays legible."""
    colors = require_matplotlib().colors
    return colors.LinearSegmentedColormap.from_list("hits", ["white", colors.to_rgba(_SHADE, 0.6)])
