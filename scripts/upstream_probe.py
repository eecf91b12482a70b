#!/usr/bin/env python3
"""Check what the native part relies on inside llama.cpp, without building it.

A probe of ``probes/`` is one assumption: a few lines of C++ that compile as long as it holds, or text
that a source contains. Run this on the next llama.cpp before anything else: a failure names the assumption, what it is
used for and the files to open. The table in patches/README.md is written from the same probes.

Environment
-----------
CXX : the compiler, ``c++`` by default; GCC or Clang.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from probes import PROBES, Order, Probe
from upstream_tree import PATCHES, UpstreamError, locked, scratch_worktree, unpack

README = PATCHES / "README.md"
BEGIN, END = "<!-- probes: `make probes-table` writes this table -->\n", "<!-- /probes -->\n"

INCLUDES = ("src", "include", "ggml/include", "ggml/src", "ggml/src/ggml-cpu")

# the standard library comes first: it does not compile with its private members public
PRELUDE = """
#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cassert>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>
#define private public
#define protected public
#define HAS(x, ...) static_assert(std::is_same_v<decltype(x), __VA_ARGS__>, #x " has another type")
"""


def squeeze(text: str) -> str:
    """Make runs of white space one space."""
    return " ".join(text.split())


def missing(source: str, texts: Iterable[str]) -> str | None:
    """Return the first of the texts that the source does not hold behind the one before it; both are squeezed."""
    at = 0
    for text in texts:
        found = source.find(squeeze(text), at)
        if found < 0:
            return text
        at = found + len(squeeze(text))
    return None


def check_texts(probe: Probe, tree: Path) -> list[str]:
    """Return what the sources no longer say."""
    problems = []
    for rule in probe.texts:
        if isinstance(rule, Order):
            path = tree / rule.file
            text = missing(squeeze(path.read_text(encoding="utf-8")), rule.texts) if path.is_file() else "the file"
            if text is not None:
                problems.append(f"{rule.file} lacks, or has at another place: {text}")
        else:
            n = sum(squeeze(path.read_text(encoding="utf-8")).count(rule.text) for path in tree.glob(rule.files))
            if n != rule.n:
                problems.append(f"{rule.files}: {rule.text!r} occurs {n} times, not {rule.n}")
    return problems


def check_code(probe: Probe, tree: Path, cxx: str) -> list[str]:
    """Return the compiler's first errors."""
    command = [cxx, "-std=c++17", "-fsyntax-only", "-w", "-x", "c++", *(f"-I{tree / name}" for name in INCLUDES), "-"]
    result = subprocess.run(command, input=PRELUDE + probe.code, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return []
    # without the place, which is a macro's
    errors = [line[line.index("error:") :] for line in result.stderr.splitlines() if "error:" in line]
    return errors[:3] or [result.stderr.strip() or f"{cxx} failed with exit status {result.returncode}"]


def check(probe: Probe, tree: Path, cxx: str) -> list[str]:
    """Return what does not hold in a tree, nothing where the assumption does."""
    return check_texts(probe, tree) + (check_code(probe, tree, cxx) if probe.code else [])


def our_path(name: str) -> str:
    """Return the path, in this repository, of a file that a probe names."""
    return os.path.normpath(f"native/{name}")


def report(probe: Probe, problems: Sequence[str]) -> str:
    """Describe a probe that failed."""
    lines = [f"{probe.name}: {probe.file}: {probe.what}", f"  used for: {probe.why}"]
    lines += [f"  open: {', '.join(map(our_path, probe.ours))}", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def table(probes: Iterable[Probe]) -> str:
    """Return the table of patches/README.md."""
    rows = ["| probe | file | what | used for | our files |", "| --- | --- | --- | --- | --- |"]
    for probe in probes:
        ours = ", ".join(f"`{Path(name).name}`" for name in probe.ours)
        rows.append(f"| `{probe.name}` | {probe.file} | {probe.what} | {probe.why} | {ours} |")
    return "\n".join(rows) + "\n"


def split_readme() -> tuple[str, str, str]:
    """Return the README's text in front of the table, the table, and what follows."""
    text = README.read_text(encoding="utf-8")
    match = re.fullmatch(f"(.*{re.escape(BEGIN)})(.*)({re.escape(END)}.*)", text, re.DOTALL)
    if match is None:
        raise UpstreamError(f"{README} lacks the lines {BEGIN.strip()} and {END.strip()}")
    return match[1], match[2], match[3]


def run(probes: Sequence[Probe], tree: Path, cxx: str) -> int:
    """Check a tree and print what failed; returns the number of failures."""
    if shutil.which(cxx) is None:
        raise UpstreamError(f"the compiler {cxx} was not found; set CXX")
    if not (tree / "include" / "llama.h").is_file():
        raise UpstreamError(f"{tree} is not a tree of llama.cpp: it has no include/llama.h")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda probe: check(probe, tree, cxx), probes))
    failed = [(probe, problems) for probe, problems in zip(probes, results) if problems]
    for probe, problems in failed:
        print(report(probe, problems))
    print(f"{len(probes) - len(failed)} of {len(probes)} assumptions hold in {tree}")
    return len(failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PROBE", help="probes to run (all)")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="any unpatched llama.cpp (the pinned one)")
    parser.add_argument("--write-table", action="store_true", help="write the table in patches/README.md instead")
    args = parser.parse_args(argv)
    unknown = set(args.names) - {probe.name for probe in PROBES}
    if unknown:
        parser.error(f"no probe {', '.join(sorted(unknown))}; the probes are {', '.join(p.name for p in PROBES)}")
    probes = [probe for probe in PROBES if not args.names or probe.name in args.names]
    cxx = os.environ.get("CXX") or "c++"
    try:
        before, old, after = split_readme()
        if args.write_table:
            README.write_text(before + table(PROBES) + after, encoding="utf-8")
            return 0
        if args.tree:
            failed = run(probes, args.tree, cxx)
        else:
            with locked():
                unpack()
                with scratch_worktree() as tree:
                    failed = run(probes, tree, cxx)
        if old != table(PROBES):
            raise UpstreamError("the table in patches/README.md differs from scripts/probes; run `make probes-table`")
    except UpstreamError as error:
        print(f"probes: error: {error}", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
