"""The form of a probe."""

from __future__ import annotations

from typing import NamedTuple


class Order(NamedTuple):
    """Pieces of text that a file holds in this order. Runs of white space count as one space."""

    file: str
    texts: tuple[str, ...]


class Count(NamedTuple):
    """A text that occurs `n` times in the files of a pattern, all together."""

    files: str
    text: str
    n: int


class Probe(NamedTuple):
    """One assumption about llama.cpp's source.

    Parameters
    ----------
    name : what ``upstream_probe.py NAME`` selects
    file : the file of llama.cpp that it is about
    what : the assumption, in Markdown
    why : what it is used for
    ours : files to open when it is gone, below native/
    code : C++17 that compiles as long as it holds. ``HAS(x, T)`` requires that x has type T; private members are public
    broken : text of `file`, and what it could be one day: `code` must not compile then
    texts : what the sources say where no compiler can check it
    """

    name: str
    file: str
    what: str
    why: str
    ours: tuple[str, ...]
    code: str = ""
    broken: tuple[str, str] = ("", "")
    texts: tuple[Order | Count, ...] = ()
