#!/usr/bin/env python3
"""Describe llama-dge.h as JSON, from which the package builds its ctypes declarations.

    scripts/header_api.py native/include/llama-dge.h build/dev/bin/llama-dge-api.json

The build writes the description beside the library. What is read is the header's own style: ``enum``, ``struct``,
``typedef`` of a callback, ``LLAMA_API`` function, numeric ``#define``. Anything else is an error, so that nothing is
left out unnoticed.

Only the standard library is used and any Python >= 3.9 will do, because CMake runs this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Types of llama.h that the header uses by name.
ALIASES = {"llama_pos": "int32_t", "llama_seq_id": "int32_t"}
SCALARS = {
    "void",
    "bool",
    "char",
    "float",
    "double",
    "size_t",
    *(f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)),
}
OPAQUE = {"llama_context"}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINE = re.compile(r"^#define\s+(LLAMA_DGE_\w+)\s+\(?(-?\d+)\)?\s*$")
_IGNORED = re.compile(r"^#(pragma once|include\b.*|ifdef __cplusplus|endif)$")
_DECLARATION = re.compile(
    r"\s*(?:"
    r"enum\s+(?P<enum>\w+)\s*\{(?P<values>[^}]*)\}\s*;"
    r"|struct\s+(?P<struct>\w+)\s*\{(?P<fields>[^}]*)\}\s*;"
    r"|typedef\s+(?P<result>[\w\s*]+?)\s*\(\s*\*\s*(?P<callback>\w+)\s*\)\s*\((?P<given>[^)]*)\)\s*;"
    r"|LLAMA_API\s+(?P<returned>[\w\s*]+?)\b(?P<function>llama_dge_\w+)\s*\((?P<arguments>[^)]*)\)\s*;"
    r")"
)


class HeaderError(ValueError):
    """The header holds something that this script does not read."""


def describe(header: str) -> dict[str, Any]:
    """Return what a header declares: constants, enums, structs, callbacks and functions, in its order.

    Types are written as in C, without ``const``, with the aliases of llama.h resolved.
    """
    api: dict[str, Any] = {"constants": {}, "enums": {}, "structs": {}, "callbacks": {}, "functions": {}}
    text = _without_preprocessor(_COMMENT.sub("", header), api["constants"])
    text = re.sub(r'extern "C" \{(.*)\}', r"\1", text, flags=re.DOTALL)
    at = 0
    while text[at:].strip():
        found = _DECLARATION.match(text, at)
        if found is None:
            raise HeaderError(f"cannot read the declaration that begins with: {text[at:].strip().splitlines()[0]}")
        _add(api, found.groupdict())
        at = found.end()
    if "LLAMA_DGE_ABI_VERSION" not in api["constants"]:
        raise HeaderError("LLAMA_DGE_ABI_VERSION is not defined")
    return api


def _without_preprocessor(text: str, constants: dict[str, int]) -> str:
    kept = []
    for line in text.splitlines():
        if not line.startswith("#"):
            kept.append(line)
        elif define := _DEFINE.match(line):
            constants[define[1]] = int(define[2])
        elif not _IGNORED.match(line.strip()):
            raise HeaderError(f"cannot read: {line}")
    return "\n".join(kept)


def _add(api: dict[str, Any], found: dict[str, Any]) -> None:
    if found["enum"]:
        api["enums"][found["enum"]] = dict(_enum_values(found["values"]))
    elif found["struct"]:
        lines = [line for line in found["fields"].split(";") if line.strip()]
        api["structs"][found["struct"]] = [_named(line, api) for line in lines]
    elif found["callback"]:
        api["callbacks"][found["callback"]] = _signature(found["result"], found["given"], api)
    else:
        api["functions"][found["function"]] = _signature(found["returned"], found["arguments"], api)


def _enum_values(text: str) -> Iterator[tuple[str, int]]:
    for item in filter(None, map(str.strip, text.split(","))):
        value = re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", item)
        if value is None:
            raise HeaderError(f"an enum's value must be written as a number: {item}")
        yield value[1], int(value[2])


def _signature(result: str, arguments: str, api: dict[str, Any]) -> dict[str, Any]:
    given = [] if arguments.strip() == "void" else arguments.split(",")
    return {"result": _type(result, api), "arguments": [_named(argument, api) for argument in given]}


def _named(declaration: str, api: dict[str, Any]) -> list[str]:
    """Split a field or an argument into name and type."""
    found = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", declaration, re.DOTALL)
    if found is None:
        raise HeaderError(f"cannot read: {declaration.strip()}")
    return [found[2], _type(found[1], api)]


def _type(text: str, api: dict[str, Any]) -> str:
    words = [word for word in text.replace("*", " * ").split() if word not in ("const", "struct")]
    stars = words.count("*")
    if len(words) != stars + 1 or words[0] == "*":
        raise HeaderError(f"cannot read the type: {text.strip()}")
    name = ALIASES.get(words[0], words[0])
    if name not in SCALARS and name not in OPAQUE and name not in api["structs"] and name not in api["callbacks"]:
        raise HeaderError(f"unknown type: {text.strip()}")
    return " ".join([name, *["*"] * stars])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("header", type=Path)
    parser.add_argument("json", type=Path)
    args = parser.parse_args()
    try:
        api = describe(args.header.read_text(encoding="utf-8"))
    except (OSError, HeaderError) as error:
        print(f"{parser.prog}: {args.header}: {error}", file=sys.stderr)
        return 1
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(api, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
