"""``llama-dge plot``: figures of what ``llama-dge eval`` found."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..eval.results import ResultsError, read_rows, told_apart, unique
from ..eval.summary import known_to_full
from ..plots.draw import draw_curves, draw_grids, require_matplotlib
from ..plots.figures import curves, grids
from ._common import CLIError
from ._options import add_verbose


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "plot",
        help="figures of the results of eval: budget curves with intervals, hits by depth and length",
        description="Writes SVG files and prints their paths. Arms are compared on the prompts that all have answered.",
    )
    parser.add_argument("results", nargs="+", metavar="FILE", type=Path, help="made by `llama-dge eval`")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--pool", action="store_true", help="needle: kinds of facts together")
    parser.add_argument("--known", action="store_true", help="only prompts that the full cache answers rightly")
    add_verbose(parser)
    parser.set_defaults(command_function=_plot)


def _plot(args: argparse.Namespace) -> int:
    try:
        require_matplotlib()
        rows = told_apart(unique(row for path in args.results for row in read_rows(path)))
        if not rows:
            raise CLIError(f"no rows of `llama-dge eval` in {', '.join(map(str, args.results))}")
        if args.known:
            rows = known_to_full(rows)
        figures = [(made.name, draw_curves(made)) for made in curves(rows, pool=args.pool)]
        figures += [(made.name, draw_grids(made)) for made in grids(rows, pool=args.pool)]
    except (ResultsError, ModuleNotFoundError) as error:
        raise CLIError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise CLIError(f"a row is not as `llama-dge eval` writes it: {error}") from error
    if not figures:
        raise CLIError(
            "there is nothing to draw: it takes an arm beside the full cache, and prompts that all arms answered"
        )
    try:
        written = _write(args.output, figures)
    except OSError as error:
        raise CLIError(f"cannot write: {error}") from error
    print(*written, sep="\n")
    return 0


def _write(folder: Path, figures: Sequence[tuple[str, str]]) -> list[Path]:
    """Write figures, by names that file systems take. Returns the paths; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, figure in figures:
        stem = base = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
        n = 2
        while stem.lower() in paths:  # names that differ in other characters
            stem, n = f"{base}-{n}", n + 1
        paths[stem.lower()] = path = folder / f"{stem}.svg"
        path.write_text(figure, encoding="utf-8")
    return list(paths.values())
