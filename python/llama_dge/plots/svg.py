"""Draws figures as SVG: light and dark, told apart by shape as well as by colour, with the numbers in tool tips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax import saxutils

from .figures import Budget, Curves, Grid, Grids, Point

# told apart by people with any kind of colour vision (Okabe and Ito), without those that white or black swallows
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328 }
  .dim { fill: #59636e }
  .head { font-weight: 600; font-size: 15px }
  .small { font-size: 11px }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .axis { stroke: #59636e; stroke-width: 1; fill: none }
  .full { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 6 4 }
  .band { fill: #1f2328; opacity: 0.08 }
  .cell { fill: #0969da; stroke: #d0d7de }
  .empty { fill: none; stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d }
    text { fill: #e6edf3 }
    .dim { fill: #9198a1 }
    .grid, .empty { stroke: #30363d }
    .axis { stroke: #9198a1 }
    .full { stroke: #e6edf3 }
    .band { fill: #e6edf3 }
    .cell { fill: #58a6ff; stroke: #30363d }
  }
""".strip("\n")


def escape(text: str) -> str:
    """Return a text as XML has it, which knows no control characters."""
    return saxutils.escape("".join(char if char.isprintable() else "\ufffd" for char in text))


def _document(width: float, height: float, title: str, description: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-labelledby="t d" '
            'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" font-size="13">',
            f'<title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(description)}</desc>',
            f"<style>\n{_STYLE}\n</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start", more: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{kind} text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _number(value: float) -> str:
    return f"{value:.3g}"


def _about(arm: str, point: Point, budget: str) -> str:
    interval = f"{_number(point.low)} .. {_number(point.high)}"
    return f"{arm}, {budget}: {_number(point.value)} ({interval}), {point.n} prompts"


class _Scale:
    """From values to pixels, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self._log = log
        self._low, self._high = self._of(low), self._of(high)
        self._start, self._end = start, end

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        span = self._high - self._low
        share = (self._of(value) - self._low) / span if span else 0.5
        return self._start + share * (self._end - self._start)


def nice_ticks(high: float, n: int = 5) -> list[float]:
    """Return about n round numbers from 0 on, the last of them not less than `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten that enclose two positive numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _look(i: int) -> tuple[str, str, int]:
    """Return the colour, the dashes and the marker of the i-th arm."""
    turn = i // len(_COLOURS)
    return _COLOURS[i % len(_COLOURS)], _DASHES[turn % len(_DASHES)], (i + turn) % 4


def _marker(shape: int, x: float, y: float, colour: str) -> str:
    """A disc, a square, a diamond or a triangle."""
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -6), (6, 0), (0, 6), (-6, 0)),
        3: ((0, -6), (5.5, 4), (-5.5, 4)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{colour}"/>'


def _budget(budget: Budget, share: bool) -> str:
    return f"{100 * budget:g} %" if share else f"{budget:,}"


def draw_curves(curves: Curves) -> str:
    """Return the picture of figures over budgets."""
    left, top, plot_width, plot_height = 76.0, 64.0, 600.0, 320.0
    right, bottom = left + plot_width, top + plot_height
    points = [point for arm in curves.arms.values() for point in arm]
    every = [*points, *([curves.full] if curves.full else [])]
    if curves.log:
        lows = [value for point in every for value in (point.low, point.value) if value > 0]
        ticks = log_ticks(min(lows, default=0.1), max([point.high for point in every if point.high > 0], default=1.0))
    else:
        most = max(point.high for point in every)
        ticks = nice_ticks(most if curves.top is None else min(most, curves.top))
    y_of = _Scale(ticks[0], ticks[-1], bottom, top, curves.log)
    budgets = sorted({point.budget for point in points})
    x_of = _Scale(budgets[0], budgets[-1], left + 60, right - 60, True)

    places = [x_of(budget) for budget in budgets]
    gap = min((b - a for a, b in zip(places, places[1:])), default=plot_width / 2)
    apart = min(10.0, 0.6 * gap / len(curves.arms))  # whiskers side by side

    def y_at(value: float) -> float:
        return y_of(max(value, ticks[0]))

    parts = [
        _text(24, 28, curves.title, kind="head"),
        _text(24, 46, f"{curves.y_label}; {curves.interval}", kind="small dim"),
    ]
    for tick in ticks:
        parts.append(_line(left, y_of(tick), right, y_of(tick), "grid"))
        parts.append(_text(left - 8, y_of(tick) + 4, f"{tick:g}", kind="small", anchor="end"))
    shown = -math.inf
    for budget in budgets:
        parts.append(_line(x_of(budget), bottom, x_of(budget), bottom + 5, "axis"))
        if x_of(budget) - shown >= 36:  # else the numbers would touch
            shown = x_of(budget)
            parts.append(_text(shown, bottom + 20, _budget(budget, curves.share), kind="small", anchor="middle"))
    parts.append(_line(left, bottom, right, bottom, "axis"))
    label = "share of the prompt that is kept" if curves.share else "rows kept per layer and KV head"
    parts.append(_text((left + right) / 2, bottom + 40, label, kind="dim", anchor="middle"))
    if curves.full is not None:
        about = _about("full cache", curves.full, "all rows")
        high, low = y_at(curves.full.high), y_at(curves.full.low)
        band = f'<rect class="band" x="{left:g}" y="{high:.1f}" width="{plot_width:g}" height="{low - high:.1f}"/>'
        parts.append(f"<g><title>{escape(about)}</title>{band}")
        parts.append(_line(left, y_at(curves.full.value), right, y_at(curves.full.value), "full") + "</g>")

    legend = [("full cache", -1)] if curves.full is not None else []
    for i, (arm, line) in enumerate(curves.arms.items()):
        legend.append((arm, i))
        colour, dash, shape = _look(i)
        shift = apart * (i - (len(curves.arms) - 1) / 2)
        at = [(x_of(point.budget) + shift, y_at(point.value), point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        for x, y, point in at:
            high, low = y_at(point.high), y_at(point.low)
            whisker = (
                f'<path d="M{x:.1f} {high:.1f}V{low:.1f}M{x - 3:.1f} {high:.1f}h6M{x - 3:.1f} {low:.1f}h6" '
                f'stroke="{colour}" stroke-width="1.2" fill="none"/>'
            )
            about = _about(arm, point, _budget(point.budget, curves.share))
            parts.append(f"<g><title>{escape(about)}</title>{whisker}{_marker(shape, x, y, colour)}</g>")

    y = bottom + 66
    for arm, i in legend:
        if i < 0:
            parts.append(_line(left, y - 4, left + 30, y - 4, "full"))
        else:
            colour, dash, shape = _look(i)
            parts.append(
                f'<path d="M{left:g} {y - 4:g}h30" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
                + _marker(shape, left + 15, y - 4, colour)
            )
        parts.append(_text(left + 40, y, arm))
        y += 20
    description = f"{curves.y_label} over {label}, one line per arm, with {curves.interval}."
    return _document(right + 24, y + 6, curves.title, description, parts)


def draw_grids(grids: Grids) -> str:
    """Return the picture of hits by depth and length, one panel per arm."""
    first = grids.grids[0]
    cell_width, cell_height = 64.0, 24.0
    panel_width = 70 + cell_width * len(first.lengths) + 20
    panel_width = max(panel_width, 24 + 8.4 * max(len(grid.arm) for grid in grids.grids))
    panel_height = 30 + cell_height * len(first.depths) + 44
    columns = max(1, min(len(grids.grids), int(1100 // panel_width)))
    parts = [
        _text(24, 28, grids.title, kind="head"),
        _text(24, 46, "questions answered rightly, by place of the fact and length of the text", kind="small dim"),
    ]
    for i, grid in enumerate(grids.grids):
        parts += _panel(grid, 24 + panel_width * (i % columns), 66 + panel_height * (i // columns))
    rows = -(-len(grids.grids) // columns)
    description = "Hits by depth and length, one panel per arm; the darker, the larger their share."
    return _document(48 + panel_width * columns, 72 + panel_height * rows, grids.title, description, parts)


def _panel(grid: Grid, x: float, y: float) -> list[str]:
    width, height = 64.0, 24.0
    left, top = x + 70, y + 22
    parts = [_text(x, y + 10, grid.arm, more=' font-weight="600"')]
    for row, depth in enumerate(grid.depths):
        place = top + row * height
        parts.append(_text(left - 8, place + 16, f"{10 * depth} - {10 * depth + 10} %", kind="small", anchor="end"))
        for column, length in enumerate(grid.lengths):
            at = left + column * width
            box = f'x="{at:g}" y="{place:g}" width="{width:g}" height="{height:g}"'
            found = grid.cells.get((depth, length))
            if found is None:
                parts.append(f'<rect class="empty" {box}/>')
                continue
            hits, asked = found
            about = f"{grid.arm}: {hits} of {asked}, {length} tokens, depth {10 * depth} - {10 * depth + 10} %"
            # at most 0.6, so that the text on it stays legible
            parts.append(
                f"<g><title>{escape(about)}</title>"
                f'<rect class="cell" {box} fill-opacity="{0.6 * hits / asked:.3f}"/>'
                + _text(at + width / 2, place + 16, f"{hits}/{asked}", kind="small", anchor="middle")
                + "</g>"
            )
    bottom = top + len(grid.depths) * height
    for column, length in enumerate(grid.lengths):
        parts.append(
            _text(left + (column + 0.5) * width, bottom + 15, f"{length:,}", kind="small dim", anchor="middle")
        )
    return parts
