"""Streams that cannot take what is written: characters outside their encoding, a reader that is gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def replace_characters() -> None:
    """Replace what the encoding of stdin or stdout lacks; stderr escapes it by itself."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # not the stand-ins of test runners
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Flush stdout at the end of the block: the interpreter complains about a failure when it exits."""
    try:
        yield
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def discard_output() -> None:
    """Point streams that cannot be written to at nothing, so that what they still hold fails no more."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                os.dup2(null, stream.fileno())
    finally:
        os.close(null)
