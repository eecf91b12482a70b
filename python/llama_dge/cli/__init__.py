"""The ``llama-dge`` command: one module per subcommand."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..models import ModelError
from . import bench, chat, compare, demo, doctor, estimate, inspect, models, plot, run, serve
from . import eval as evaluation
from ._common import CLIError
from ._options import flash_attn_flags, resolve_model
from ._terminal import discard_output, replace_characters, written_out


class _Parser(argparse.ArgumentParser):
    """Takes whole options only: ``--k`` must not be ``--kernel-size``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="llama-dge", description="llama.cpp with Draft-Guided Eviction of the KV cache.")
    parser.add_argument("--version", action="version", version=f"llama-dge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (run, chat, serve, compare, estimate, evaluation, inspect, plot, bench, models, doctor, demo):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted.
    """
    replace_characters()
    try:
        with written_out():
            return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        pass  # the reader of a pipe has enough
    except OSError as error:
        print(f"llama-dge: error: {error}", file=sys.stderr)
    discard_output()
    return 1


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(flash_attn_flags(argv))
    resolve_model(args)
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        return int(args.command_function(args))
    except (CLIError, ModelError) as error:
        print(f"llama-dge {args.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
