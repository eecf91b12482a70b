#!/usr/bin/env python3
"""Run wrong variants of the Metal kernels: the test has to see every one, and to pass what is right.

usage: metal_mutants.py SOURCE.metal COMPILER ARGUMENT...   (arguments: options, the test's source, objects)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from msl2cpp import convert

# what is wrong, text that occurs once in the source, what takes its place
MUTANTS = [
    ("none", "", ""),
    (
        "no barrier before a chunk is overwritten",
        "threadgroup_barrier(mem_flags::mem_threadgroup); // until the chunk before has been read",
        "",
    ),
    (
        "no barrier before a chunk is read",
        "threadgroup_barrier(mem_flags::mem_threadgroup); // until the chunk is there",
        "",
    ),
    (
        "no barrier before the sums take the chunk's place",
        "threadgroup_barrier(mem_flags::mem_threadgroup); // until the last chunk has been read",
        "",
    ),
    (
        "no barrier before column sums are read",
        "threadgroup_barrier(mem_flags::mem_threadgroup); // until all sums are there",
        "",
    ),
    ("a shuffle short", "offset = ATTN_SCORE_LANES/2;", "offset = ATTN_SCORE_LANES/4;"),
    ("a shuffle too many", "offset = ATTN_SCORE_LANES/2;", "offset = ATTN_SCORE_LANES;"),
    ("a key too many is read", "key0 + key < args.n_kv && i < args.d", "key0 + key <= args.n_kv && i < args.d"),
    ("the end of a short head", "key0 + key < args.n_kv && i < args.d", "key0 + key < args.n_kv"),
    (
        "what masked keys hold counts",
        "if (m <= (args.mask == 1 ? -MAXHALF : ATTN_SCORE_NONE)) {",
        "if (m > 1e30f) {",
    ),
    ("a query of weight 0 counts", "if (s.y != 0.0f) {", "{"),
    ("the sink of another head", "args.n_group + row/args.n_q;", "args.n_group + row%args.n_group;"),
    ("nothing is accumulated", "args.acc != 0 ? *out : 0.0f", "0.0f"),
]


def run(text: str, command: list[str]) -> str:
    """Return "passes", "result" or "report" (a sanitizer's, an abort)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "attn-score-metal.h").write_text(convert(text), encoding="ascii")
        program = str(Path(folder) / "mutant")
        # in front of a folder that may hold the right one
        full = [command[0], f"-I{folder}", "-DFEW_CASES", "-O0", *command[1:], "-o", program]
        subprocess.run(full, check=True)
        status = subprocess.run([program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    return {0: "passes", 1: "result"}.get(status, "report")


def main() -> int:
    """Run all of them."""
    text, command, bad = Path(sys.argv[1]).read_text(encoding="ascii"), sys.argv[2:], 0
    for name, old, new in MUTANTS:
        if old and text.count(old) != 1:
            raise SystemExit(f"mutant '{name}' has to match {sys.argv[1]} once: mend it in metal_mutants.py")
        seen = run(text.replace(old, new) if old else text, command)
        ok = (seen == "passes") == (name == "none")
        bad += not ok
        sys.stdout.write(f"{'ok  ' if ok else 'FAIL'} {name:50s} {seen}\n")
    sys.stdout.write(f"{len(MUTANTS) - 1} wrong kernels, {bad} not seen or the right one refused\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
