"""``llama-dge plot``: pictures of what ``llama-dge eval`` found."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ..eval.results import ResultsError, read_rows, told_apart, unique
from ..eval.summary import known_to_full
from ..plots.figures import curves, grids
from ..plots.svg import draw_curves, draw_grids
from ._common import CLIError
from ._options import add_verbose


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "plot",
        help="pictures of the results of eval: budget curves with intervals, hits by depth and length",
        description="Writes SVG files and prints their paths. Arms are compared on the prompts that all have answered.",
    )
    parser.add_argument("results", nargs="+", metavar="FILE", type=Path, help="made by `llama-dge eval`")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--pool", action="store_true", help="needle: kinds of facts together")
    parser.add_argument("--known", action="store_true", help="only prompts that the full cache answers rightly")
    add_verbose(parser)
    parser.set_defaults(command_function=_plot)


def _plot(args: argparse.Namespace) -> int:
    try:
        rows = told_apart(unique(row for path in args.results for row in read_rows(path)))
        if not rows:
            raise CLIError(f"no rows of `llama-dge eval` in {', '.join(map(str, args.results))}")
        if args.known:
            rows = known_to_full(rows)
        pictures = [(made.name, draw_curves(made)) for made in curves(rows, pool=args.pool)]
        pictures += [(made.name, draw_grids(made)) for made in grids(rows, pool=args.pool)]
    except ResultsError as error:
        raise CLIError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise CLIError(f"a row is not as `llama-dge eval` writes it: {error}") from error
    if not pictures:
        raise CLIError(
            "there is nothing to draw: it takes an arm beside the full cache, and prompts that all arms answered"
        )
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        taken: set[str] = set()
        for name, picture in pictures:
            stem = base = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
            n = 2
            while stem.lower() in taken:  # names that differ in other characters
                stem, n = f"{base}-{n}", n + 1
            taken.add(stem.lower())
            path = args.output / f"{stem}.svg"
            path.write_text(picture, encoding="utf-8")
            print(path)
    except OSError as error:
        raise CLIError(f"cannot write: {error}") from error
    return 0
