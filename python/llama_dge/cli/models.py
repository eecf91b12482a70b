"""``llama-dge models``: list and download models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..models import cache_dir, fetch, read_manifest
from ._common import CLIError, Progress
from ._options import add_verbose


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser("models", help="list or download small models from the package registry")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    list_parser = actions.add_parser("list", help="list the models")
    get_parser = actions.add_parser("get", help="download a model, verify it, and print its path")
    get_parser.add_argument("name", metavar="NAME", help="model, as in the list")
    get_parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help=f"folder for the file ({cache_dir()})".replace("%", "%%")
    )
    for action in (list_parser, get_parser):
        action.add_argument("--manifest", metavar="FILE", type=Path, help="list of models instead of the built-in one")
        add_verbose(action)
    list_parser.set_defaults(command_function=_list)
    get_parser.set_defaults(command_function=_get)


def _list(args: argparse.Namespace) -> int:
    models = read_manifest(args.manifest)
    if not models:
        raise CLIError(f"{args.manifest} lists no models")
    rows = [("name", "architecture", "context", "size", "licence", "package")]
    for model in models.values():
        packages = f"{model.package} {model.version}" + (f" ({model.parts} parts)" if model.parts > 1 else "")
        size = f"{model.size / 1e6:,.0f} MB"
        rows.append((model.name, model.architecture, f"{model.context:,}", size, model.licence, packages))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


def _get(args: argparse.Namespace) -> int:
    models = read_manifest(args.manifest)
    if args.name not in models:
        raise CLIError(f"no model {args.name}; the models are {', '.join(models)}")
    print(fetch(models[args.name], args.output, Progress(args.verbose).line))
    return 0
