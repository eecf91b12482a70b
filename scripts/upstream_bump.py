#!/usr/bin/env python3
"""Move to another llama.cpp: write its version everywhere, unpack it, and say what has to be done.

It runs every probe and tries every patch on the new source, so that one run lists all the work. patches/README.md has
the steps that follow. Run it again after each repair; ``git checkout`` of the files that it wrote goes back.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from probes import PROBES
from upstream_probe import run
from upstream_tree import (
    PIN_FILE,
    ROOT,
    Pin,
    UpstreamError,
    apply_to,
    locked,
    log,
    patch_files,
    read_pin,
    scratch_worktree,
    unpack,
)

# files that name the version, and how often
NAMED_IN = {
    "pyproject.toml": 1,
    "requirements/runtime.txt": 1,
    "python/llama_dge/_library.py": 1,
    "tests/test_cli.py": 1,
    "tests/test_patch.py": 1,
}


def write_version(old: Pin, new: Pin, root: Path = ROOT) -> None:
    """Write the new version into the pin and into the files that name it.

    Raises
    ------
    UpstreamError
        A file does not name the old version as often as it should; nothing is written then.
    """
    texts = {}
    for name, n in NAMED_IN.items():
        text = (root / name).read_text(encoding="utf-8")
        texts[name], found = re.subn(rf"(?<![\w.]){re.escape(old.version)}(?![\w.])", new.version, text)
        if found != n:
            raise UpstreamError(f"{name} names {old.version} {found} times, not {n}: correct NAMED_IN in {__file__}")
    texts[PIN_FILE.relative_to(ROOT).as_posix()] = f"{new.name}=={new.version} --hash=sha256:{new.sha256}\n"
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
        log(f"wrote {name}")


def try_patches() -> int:
    """Apply each patch to the unpacked source, those behind one that fails as well; returns how many fail."""
    failed = 0
    with scratch_worktree() as tree:
        for file in patch_files():
            try:
                moved = apply_to(tree, [file])
                print(f"{file.name}: applies" + (f", {len(moved)} hunks moved" if moved else ""))
            except UpstreamError as error:
                failed += 1
                print(error)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of llama-cpp-python")
    parser.add_argument("sha256", help="of its sdist, as the package registry shows it")
    args = parser.parse_args(argv)
    try:
        if re.fullmatch(r"[\w.]+", args.version) is None or re.fullmatch(r"[0-9a-f]{64}", args.sha256) is None:
            raise UpstreamError(f"expected a version and 64 hexadecimal digits, got {args.version} and {args.sha256}")
        old = read_pin()
        new = Pin(old.name, args.version, args.sha256)
        with locked():
            if new != old:
                write_version(old, new)
            unpack()
            with scratch_worktree() as tree:
                failed = run(PROBES, tree, os.environ.get("CXX") or "c++")
            failed += try_patches()
    except UpstreamError as error:
        print(f"bump: error: {error}", file=sys.stderr)
        return 1
    print(f"{failed} to repair. The next steps: patches/README.md, 'A new upstream version'")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
