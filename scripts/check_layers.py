#!/usr/bin/env python3
"""Check that every file of ``native/src`` includes only its own layer and the layers below it.

``docs/architecture.md`` says what each layer does; ``LAYERS`` is the table. Files are named without ending, relative to
``native/src``; the first pattern that matches gives the layer. Nothing is compiled, only ``#include`` lines, type names
in headers and the ``friend`` lines of the patches are read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# lowest first: the name of the layer, and its files
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "plain",
        (
            "llama-dge-rows",
            "llama-dge-fault",
            "llama-dge-phase",
            "llama-dge-select",
            "llama-dge-policy",
            "llama-dge-settings",
            "llama-dge-params",
            "policies/*",
        ),
    ),
    (
        "adapters",
        ("llama-dge-kv", "llama-dge-kv-cells", "llama-dge-kv-entries", "llama-dge-kv-resize", "llama-dge-ctx"),
    ),
    (
        "parts",
        (
            "llama-dge-ring",
            "llama-dge-attn",
            "llama-dge-attn-run",
            "llama-dge-sums",
            "llama-dge-bias",
            "llama-dge-elastic",
            "llama-dge-store",
            "llama-dge-store-file",
        ),
    ),
    ("actions", ("llama-dge-move", "llama-dge-park", "llama-dge-gather", "llama-dge-selector")),
    ("sequence", ("llama-dge-seq",)),
    (
        "whole",
        (
            "llama-dge-whole",
            "llama-dge-evict",
            "llama-dge-recall",
            "llama-dge-restore",
            "llama-dge-sequences",
            "llama-dge-queries",
        ),
    ),
    (
        "edges",
        (
            "llama-dge-api",
            "llama-dge-hooks",
            "llama-dge-memory",
            "llama-dge-graph",
            "llama-dge-state",
            "llama-dge-estimate",
        ),
    ),
)

# the interface that everyone may include; it is plain C
PUBLIC_HEADER = "llama-dge.h"
# the type of the layer "whole", which no header below it may name
WHOLE, WHOLE_TYPE = "whole", "llama_dge"
# the only types that the patches may make friends of llama.cpp's classes: those of the adapters
FRIENDS = ("llama_dge_kv", "llama_dge_ctx")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
_FRIEND = re.compile(r"^\+[^/\n]*\bfriend\s+(?:(?:struct|class)\s+)?(\w+)", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def layer_of(name: str) -> int | None:
    """Return the number of the layer of a file, given without ending, or None where the table lacks it."""
    for number, (_, patterns) in enumerate(LAYERS):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return number
    return None


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def check_source(path: Path, src: Path) -> Iterator[str]:
    """Yield what is wrong with one file of `src`."""
    name = path.relative_to(src)
    layer = layer_of(name.with_suffix("").as_posix())
    if layer is None:
        yield f"{name}: in no layer; add it to LAYERS in scripts/check_layers.py"
        return
    title = LAYERS[layer][0]
    # offsets stay, so that the lines of what follows are right
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text(encoding="utf-8"))
    for match in _INCLUDE.finditer(text):
        quoted, bracketed = match.groups()
        where = f"{name}:{_line(text, match.start())}"
        if bracketed is not None:
            if layer == 0 and not re.fullmatch(r"[a-z_0-9]+", bracketed):
                yield f"{where}: layer {title} includes <{bracketed}>; only C++ standard headers are allowed"
            continue
        if quoted == PUBLIC_HEADER:
            continue
        target = next((p.resolve() for p in (path.parent / quoted, src / quoted) if p.is_file()), None)
        if target is None:
            if layer == 0:
                yield f"{where}: layer {title} includes {quoted}; only our own headers and {PUBLIC_HEADER} are allowed"
            continue
        other = layer_of(target.relative_to(src).with_suffix("").as_posix())
        if other is not None and other > layer:
            yield f"{where}: layer {title} includes {quoted} of the higher layer {LAYERS[other][0]}"
    if path.suffix == ".h" and layer < [known for known, _ in LAYERS].index(WHOLE):
        for match in re.finditer(rf"\b{WHOLE_TYPE}\b", text):
            yield f"{name}:{_line(text, match.start())}: a header of layer {title} names {WHOLE_TYPE}"


def check_patch(path: Path) -> Iterator[str]:
    """Yield the friends that a patch adds to llama.cpp's classes and that are no adapters."""
    text = path.read_text(encoding="utf-8")
    for match in _FRIEND.finditer(text):
        if match[1] not in FRIENDS:
            where = f"{path.name}:{_line(text, match.start())}"
            yield f"{where}: makes {match[1]} a friend; only {' and '.join(FRIENDS)} may be"


def check(root: Path) -> list[str]:
    """Return what breaks the rules below `root`, one line each."""
    src = (root / "native" / "src").resolve()
    sources = sorted(path for ending in ("*.h", "*.cpp") for path in src.rglob(ending))
    if not sources:
        return [f"{src}: no sources"]
    problems = [line for path in sources for line in check_source(path, src)]
    return problems + [line for path in sorted((root / "patches").glob("*.patch")) for line in check_patch(path)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="source tree (this one)")
    problems = check(parser.parse_args(argv).root)
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
