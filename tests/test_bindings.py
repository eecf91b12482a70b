"""The declarations that the package builds of llama-dge.h are those that a C compiler reads."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_dge import _bindings
from llama_dge._library import API, LIBRARY

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "native" / "include" / "llama-dge.h"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

# what llama-dge.h takes from llama.h
LLAMA_H = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define LLAMA_API
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
struct llama_context;
"""


def described(header: str, tmp_path: Path) -> tuple[int, str, dict[str, Any]]:
    """Run the script on a header: its exit status, what it prints, what it writes."""
    (tmp_path / "header.h").write_text(header)
    command = [sys.executable, str(ROOT / "scripts" / "header_api.py"), "header.h", "api.json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    written = tmp_path / "api.json"
    return result.returncode, result.stderr, json.loads(written.read_text()) if written.exists() else {}


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_structs_and_numbers_are_those_of_a_compiler(tmp_path: Path) -> None:
    ours, lines = {}, []
    for name, fields in API["structs"].items():
        struct = _bindings.struct(name[len("llama_dge_") :])
        ours[f"sizeof {name}"] = ctypes.sizeof(struct)
        lines.append(f'printf("sizeof {name}=%zu\\n", sizeof(struct {name}));')
        for field, _ in fields:
            member = getattr(struct, field)
            ours[f"{name}.{field}"] = member.offset, member.size
            lines.append(
                f'printf("{name}.{field}=%zu %zu\\n", offsetof(struct {name}, {field}), '
                f"sizeof(((struct {name} *) 0)->{field}));"
            )
    numbers = {**API["constants"], **{name: n for values in API["enums"].values() for name, n in values.items()}}
    for name, number in numbers.items():
        ours[name] = number
        lines.append(f'printf("{name}=%d\\n", (int) {name});')

    (tmp_path / "llama.h").write_text(LLAMA_H)
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{chr(10).join(lines)}\nreturn 0;\n}}\n'
    )
    program = tmp_path / "layout"
    subprocess.run([str(COMPILER), "-I", str(tmp_path), str(source), "-o", str(program)], check=True)
    theirs = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, values = line.partition("=")
        read = tuple(map(int, values.split()))
        theirs[name] = read if len(read) > 1 else read[0]
    assert ours == theirs
    assert len(API["structs"]) >= 6 and len(numbers) > 30


def test_every_declaration_of_the_header_is_read(tmp_path: Path) -> None:
    text = HEADER.read_text()
    status, _, api = described(text, tmp_path)
    assert status == 0
    # the library under test is of this header
    assert api == API
    for name, start in (("functions", "\nLLAMA_API "), ("structs", "\nstruct "), ("enums", "\nenum ")):
        # a struct that a function returns stands behind LLAMA_API
        assert len(api[name]) == text.count(start), name
    for name in api["functions"]:
        assert getattr(LIBRARY, name).argtypes is not None


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("struct llama_dge_a { int32_t a, b; };", "cannot read the type: int32_t a,"),
        ("struct llama_dge_a { int32_t a[4]; };", "cannot read"),
        ("struct llama_dge_a { struct llama_dge_b b; };", "unknown type: struct llama_dge_b"),
        ("struct llama_dge_a { long a; };", "unknown type: long"),
        ("enum llama_dge_a { LLAMA_DGE_A_ONE = 1 << 3 };", "an enum's value must be written as a number"),
        ("enum llama_dge_a { LLAMA_DGE_A_ONE };", "an enum's value must be written as a number"),
        ("#define LLAMA_DGE_A (1 << 3)", "cannot read: #define LLAMA_DGE_A"),
        ("static inline int32_t llama_dge_a(void) { return 1; }", "cannot read the declaration that begins with"),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path: Path, line: str, complaint: str) -> None:
    status, error, api = described(f"#define LLAMA_DGE_ABI_VERSION 1\n{line}\n", tmp_path)
    assert status == 1 and complaint in error and api == {}


def test_a_field_that_the_library_does_not_have_cannot_be_set() -> None:
    params = _bindings.lib.default_params()
    with pytest.raises(AttributeError, match="no_such_field"):
        params.no_such_field = 1


def test_a_null_context_is_an_error() -> None:
    with pytest.raises(ctypes.ArgumentError, match="the model is closed"):
        _bindings.lib.fingerprint(None)
