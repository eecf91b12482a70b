#!/usr/bin/env python3
"""Install the package with ggml-cuda into an interpreter of its own, as the README says, without a card.

    pip install -r requirements/runtime.txt
    CMAKE_ARGS=-DGGML_CUDA=on pip install .

with these additions to ``CMAKE_ARGS``, which are printed: one architecture, since none can be found by looking at a
card; and no virtual memory management, since CUDA's driver library is not there to link to. The toolkit is that of nvcc
(``NVCC``, ``PATH``, ``CUDA_PATH`` or where toolkits are usually installed), if it has cuBLAS; else the wheels of
``requirements/cuda-link.txt`` are unpacked into ``build/cuda-toolkit``.

Prints the path of that interpreter. ggml-cuda takes 40 minutes of CPU time and more; ccache keeps what is done.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from cuda_compile import ROOT, CudaError, find_nvcc, install_wheels

TOOLKIT = ROOT / "build/cuda-toolkit"
VENV = ROOT / "build/cuda-venv"

# a wheel has libcublas.so.13; the linker asks for libcublas.so
LIBRARIES = ("cublas", "cublasLt", "cudart")


def has_cublas(root: Path) -> bool:
    """Can programs be linked with this toolkit?"""
    return any((root / folder / "libcublas.so").exists() for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))


def find_toolkit(install: bool) -> Path:
    """Return the root of a toolkit with nvcc and cuBLAS: an installed one, or that of the wheels.

    Raises
    ------
    CudaError
        when the wheels cannot be had
    """
    nvcc = None if install else find_nvcc()
    if nvcc is not None and has_cublas(nvcc.resolve().parent.parent):
        return nvcc.resolve().parent.parent
    root = install_wheels(TOOLKIT, ROOT / "requirements/cuda-link.txt").parent.parent
    # where nvcc looks for what it links to every program
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    for name in LIBRARIES:
        link = root / "lib" / f"lib{name}.so"
        if not link.exists():
            link.symlink_to(next((root / "lib").glob(f"lib{name}.so.*")).name)
    return root


def build(toolkit: Path, arch: str) -> Path:
    """Install the package into ``build/cuda-venv`` and return that interpreter.

    Raises
    ------
    CudaError
        when a command fails
    """
    options: dict[str, object] = {
        "GGML_CUDA": "on",
        "CMAKE_CUDA_COMPILER": toolkit / "bin/nvcc",
        "CUDAToolkit_ROOT": toolkit,
        "CMAKE_CUDA_ARCHITECTURES": arch,
        "GGML_CUDA_NO_VMM": "on",
    }
    if TOOLKIT in toolkit.parents:
        # CMake leaves folders of the project out of the paths by which a library finds others
        options["CMAKE_SHARED_LINKER_FLAGS"] = f"-Wl,-rpath,{toolkit / 'lib'}"
    args = " ".join(f"-D{name}={value}" for name, value in options.items())
    python = VENV / "bin/python"
    pip = [str(python), "-m", "pip", "install"]
    for command in (
        [sys.executable, "-m", "venv", str(VENV)],
        [*pip, "--quiet", "pip>=23.1"],
        [*pip, "--quiet", "-r", "requirements/runtime.txt"],
        # a build folder of its own: CMake remembers options, and those of other builds are others
        [*pip, "--verbose", "--no-deps", "--force-reinstall", "--config-settings=build-dir=build/cuda-wheel", "."],
    ):
        text = " ".join(command)
        print(f"CMAKE_ARGS='{args}' {text}", flush=True)
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "CMAKE_ARGS": args}).returncode != 0:
            raise CudaError(f"failed, its message is above: {text}")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="install the package with ggml-cuda, without a card")
    parser.add_argument("--install", action="store_true", help="take the wheels even where there is a toolkit")
    parser.add_argument("--arch", default="86-real", help="as CMAKE_CUDA_ARCHITECTURES has it")
    args = parser.parse_args()
    try:
        python = build(find_toolkit(args.install), args.arch)
    except CudaError as error:
        print(f"cuda_link: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
