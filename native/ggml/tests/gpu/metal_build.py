#!/usr/bin/env python3
"""Configure the library for Metal with empty files for Apple's frameworks, and compile what is C++ of our part there.

usage: metal_build.py CMAKE PYTHON BUILD_FOLDER   (CMake's generator is Ninja, or that of CMAKE_GENERATOR)
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
FRAMEWORKS = ("FOUNDATION_LIBRARY", "METAL_FRAMEWORK", "METALKIT_FRAMEWORK")

# of ggml-metal; what is Objective-C has to see the same switch and headers, and is not compiled
COMPILED = {"ggml-metal-ops.cpp", "ggml-metal.cpp", "ggml-metal-attn-score.cpp"}
OBJECTIVE_C = {"ggml-metal-device.m"}


def main() -> int:
    """Configure, compile, and print what failed."""
    cmake, python, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    empty = folder / "framework.a"
    empty.touch()
    command = [cmake, "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={python}", "-DGGML_METAL=ON"]
    command += [f"-D{name}={empty}" for name in FRAMEWORKS]
    # headers of Apple's library bring <memory> along
    command += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_CXX_FLAGS=-include memory", "-DGGML_CCACHE=OFF"]
    run = subprocess.run(
        command,
        env={"CMAKE_GENERATOR": "Ninja", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        sys.stdout.write(run.stdout)
        return 1

    bad, seen = 0, set()
    for entry in json.loads((folder / "compile_commands.json").read_text(encoding="utf-8")):
        name = Path(entry["file"]).name
        if "/ggml-metal.dir/" not in entry["output"] or name not in COMPILED | OBJECTIVE_C:
            continue
        seen.add(name)
        arguments = shlex.split(entry["command"])
        if "-DGGML_METAL_ATTN_SCORE" not in arguments:
            sys.stdout.write(f"{name}: not told of the operation\n")
            bad += 1
        elif name in COMPILED:
            # upstream's warn where int64_t is another type than on a Mac
            arguments += ["-fsyntax-only", "-Werror" if name.endswith("attn-score.cpp") else "-w"]
            bad += subprocess.run(arguments, cwd=entry["directory"]).returncode != 0
    for name in sorted((COMPILED | OBJECTIVE_C) - seen):
        sys.stdout.write(f"{name}: not part of ggml-metal\n")
        bad += 1
    sys.stdout.write(f"{len(COMPILED)} files of C++ in ggml-metal, {bad} errors\n")
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
