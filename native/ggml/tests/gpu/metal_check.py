#!/usr/bin/env python3
"""Check the syntax, types and address spaces of a Metal source with clang, and that the check sees what it should.

The source has to pass; each variant of it without one of its address spaces, or with a typing error, has to fail.

usage: metal_check.py CLANG SOURCE.metal INCLUDE_DIR...
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from msl2cpp import convert

STUB = Path(__file__).resolve().parent / "metal-stub"
N_VARIANTS = 16

# a pointer to one of these needs an address space; clang alone lets a cast drop it, and kernel arguments have none
TYPE = r"(?:void|bool|char|u?int\d+_t|u?char[234]?|u?short[234]?|u?int[234]?|half[234]?|float[234]?)"


def errors(clang: str, text: str, includes: list[str]) -> str:
    """Return what is wrong, empty where the source is accepted."""
    code = re.sub(r"\s+", " ", re.sub(r"//.*", "", text))
    for m in re.finditer(rf"(\w*) ?((?:const )?\b{TYPE} \*)", code):
        if m[1] not in ("device", "threadgroup", "constant", "thread"):
            return f"a pointer without an address space: {m[0]}\n"
    command = [clang, "-x", "c++", "-std=c++17", "-nostdinc++", "-DMSL_CHECK", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unused-function", "-Wno-unused-const-variable", "-include", str(STUB / "metal_stdlib")]
    command += [f"-I{folder}" for folder in (STUB, *includes)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.cpp"
        path.write_text(convert(text), encoding="ascii")
        run = subprocess.run([*command, "-fsyntax-only", str(path)], capture_output=True, text=True)
    return run.stderr if run.returncode else ""


def variants(text: str) -> dict[str, str]:
    """Return wrong sources: spread over the file, one address space less each."""
    code = re.sub(r"//.*", "", text)
    found = list(re.finditer(r"\b(device|threadgroup|constant) (?=[\w ]+[*&])", code))
    step = max(1, len(found) // N_VARIANTS)
    wrong = {
        f"line {code.count(chr(10), 0, m.start()) + 1} without '{m[1]}'": code[: m.start()] + code[m.end() :]
        for m in found[::step]
    }
    wrong["a name that is not there"] = code.replace("simd_shuffle_xor", "simd_shuffle_zor", 1)
    wrong["a write to a constant"] = code.replace(
        "    const int n_rows ", "    args.n_q = 1;\n    const int n_rows ", 1
    )
    return wrong


def main() -> int:
    """Check the source and its variants."""
    clang, source, includes = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    text = source.read_text(encoding="ascii")
    message = errors(clang, text, includes)
    if message:
        sys.stdout.write(message)
        return 1
    wrong = variants(text)
    missed = [name for name, variant in wrong.items() if variant == text or not errors(clang, variant, includes)]
    for name in missed:
        sys.stdout.write(f"not seen: {name}\n")
    sys.stdout.write(f"{source.name} passes, {len(wrong) - len(missed)} of {len(wrong)} wrong variants are refused\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
