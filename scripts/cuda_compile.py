#!/usr/bin/env python3
"""Compile the CUDA kernels of ATTN_SCORE for every architecture, without a card, and look at what they need.

Prints registers, shared memory and spills of each kernel as ptxas reports them, and fails above the bounds below. nvcc
is taken from ``NVCC``, ``PATH``, ``CUDA_PATH`` or where toolkits are usually installed; else the wheels of
``requirements/cuda.txt`` are unpacked into ``build/cuda``.

``--objects`` compiles the two files that put the operation into ggml-cuda, for the first of the architectures: our
launcher and the patched ``ggml-cuda.cu``, which need the headers of cuBLAS (a wheel of 420 MB, of which they are kept).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "native/ggml/tests/gpu/instances.cu"
TOOLKIT = ROOT / "build/cuda"

ARCHITECTURES = (75, 80, 86, 89, 90, 120)

# 4 blocks of 128 threads on a multiprocessor, of which the smallest (sm_75) has 64 K registers and 64 KiB
MAX_REGISTERS = 128
MAX_SHARED = 16 * 1024
MAX_SPILL = 0

# objects of ggml-cuda, without the driver's library and without cuBLAS itself
GGML = ROOT / "build/upstream/llama.cpp/ggml"
OBJECTS = (ROOT / "native/ggml/cuda/attn-score.cu", GGML / "src/ggml-cuda/ggml-cuda.cu")
INCLUDES = (
    GGML / "include",
    GGML / "src",
    GGML / "src/ggml-cuda",
    ROOT / "native/ggml/include",
    ROOT / "native/ggml/cuda",
)
DEFINITIONS = ("GGML_CUDA_ATTN_SCORE", "GGML_CUDA_NO_VMM", "GGML_CUDA_PEER_MAX_BATCH_SIZE=128", "GGML_USE_CUDA")
SYMBOLS = ("ggml_cuda_attn_score(", "ggml_cuda_attn_score_supported(")
CUBLAS = "nvidia-cublas==13.0.2.14"

# two kernels for 8 types of K and 2 sizes of tiles, for 6 types with matrix units; one joins parts, one splits queries
N_KERNELS = 2 * (8 + 6) * 2 + 2


class CudaError(Exception):
    """Something is missing, or a kernel is above its bounds; the message says what to do."""


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel.

    Parameters
    ----------
    name
        as in the source, with template arguments
    arch
        architecture, such as 86
    registers
        per thread
    shared
        bytes of shared memory per block
    spill
        bytes of registers that are stored to memory and loaded again, per thread
    """

    name: str
    arch: int
    registers: int
    shared: int
    spill: int


def find_nvcc() -> Path | None:
    """Return nvcc of an installed toolkit, or None."""
    chosen = os.environ.get("NVCC")
    if chosen:
        program = shutil.which(chosen)
        if program is None:
            raise CudaError(f"NVCC={chosen} is no program: unset it, or set it to the path of nvcc")
        return Path(program)
    places = [Path(os.environ[name]) / "bin" for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ]
    places += [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]
    on_path = shutil.which("nvcc")
    for path in [Path(on_path)] if on_path else [place / "nvcc" for place in places]:
        if path.exists():
            return path
    return None


def install_wheels(folder: Path, requirements: Path) -> Path:
    """Unpack pinned wheels into a folder, if they are not there yet, and return their nvcc.

    Raises
    ------
    CudaError
        when pip fails, or the wheels hold no nvcc
    """
    pinned = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "requirements/cuda.txt", requirements))
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != pinned:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if subprocess.run([*command, "-r", str(requirements)]).returncode != 0:
            raise CudaError(f"pip could not install {requirements.relative_to(ROOT)}: its message is above")
        stamp.write_text(pinned, encoding="utf-8")
    for path in sorted(folder.glob("nvidia/*/bin/nvcc")):
        for tool in [*path.parent.iterdir(), *path.parent.parent.glob("nvvm/bin/*")]:
            if tool.is_file():  # pip --target drops the permission to execute
                tool.chmod(0o755)
        return path
    raise CudaError(f"no nvcc in {folder}: delete that folder and try again")


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Return readable names by c++filt, or the names themselves where there is none."""
    unique = sorted(set(names))
    tool = shutil.which("c++filt")
    if tool is None:
        return {name: name for name in unique}
    out = subprocess.run([tool], input="\n".join(unique), capture_output=True, text=True, check=True).stdout
    return {
        name: re.sub(r"^void |attn_score_args const|\(attn_score_args\)", "", text).replace("attn_score_", "")
        for name, text in zip(unique, out.splitlines())
    }


def parse(log: str) -> list[Kernel]:
    """Read the output of ``ptxas -v``."""
    found = []
    for part in log.split("Compiling entry function ")[1:]:
        head = re.match(r"'(\S+)' for 'sm_(\d+)", part)
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if head is None or spill is None or registers is None:
            raise CudaError(f"cannot read what ptxas says: {part[:300]!r}")
        found.append(
            Kernel(
                name=head[1],
                arch=int(head[2]),
                registers=int(registers[1]),
                shared=int(shared[1]) if shared else 0,
                spill=int(spill[1]) + int(spill[2]),
            )
        )
    return found


def compile_kernels(nvcc: Path, architectures: Sequence[int]) -> list[Kernel]:
    """Compile all kernels, as ggml-cuda is compiled, and return what ptxas says of each.

    Raises
    ------
    CudaError
        when nvcc fails
    """
    command = [str(nvcc), "-c", "-std=c++17", "-use_fast_math", "-extended-lambda", "-Xptxas", "-v"]
    for arch in architectures:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [*command, "-o", f"{folder}/instances.o", str(SOURCE)], capture_output=True, text=True, check=False
        )
    if run.returncode != 0:
        raise CudaError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return parse(run.stdout + run.stderr)


def check(kernels: Sequence[Kernel], architectures: Sequence[int]) -> list[str]:
    """Return what is above the bounds, or missing."""
    bad = []
    for arch in architectures:
        n = sum(kernel.arch == arch for kernel in kernels)
        if n != N_KERNELS:
            bad.append(f"sm_{arch}: {n} kernels, expected {N_KERNELS}")
    for kernel in kernels:
        for what, value, bound in (
            ("registers", kernel.registers, MAX_REGISTERS),
            ("bytes of shared memory", kernel.shared, MAX_SHARED),
            ("bytes spilled", kernel.spill, MAX_SPILL),
        ):
            if value > bound:
                bad.append(f"sm_{kernel.arch} {kernel.name}: {value} {what}, at most {bound}")
    return bad


def table(kernels: Sequence[Kernel], architectures: Sequence[int]) -> str:
    """Return one line per kernel: registers for each architecture, shared memory, the largest spill."""
    names = demangle(kernel.name for kernel in kernels)
    lines = ["| registers of | " + " | ".join(f"sm_{a}" for a in architectures) + " | shared, bytes | spilled, bytes |"]
    lines.append("| --- |" + " ---: |" * (len(architectures) + 2))
    for mangled, name in sorted(names.items(), key=lambda item: item[1]):
        of = {kernel.arch: kernel for kernel in kernels if kernel.name == mangled}
        registers = " | ".join(str(of[a].registers) if a in of else "-" for a in architectures)
        shared = max(kernel.shared for kernel in of.values())
        lines.append(f"| `{name}` | {registers} | {shared} | {max(kernel.spill for kernel in of.values())} |")
    return "\n".join(lines)


def cublas_headers(nvcc: Path) -> Path:
    """Return a folder with cublas_v2.h: the toolkit's own, or that of the wheel, of which the rest is thrown away."""
    own = nvcc.resolve().parent.parent / "include"
    folder = TOOLKIT.with_name("cuda-cublas")
    if (own / "cublas_v2.h").exists():
        return own
    if not (folder / "cublas_v2.h").exists():
        with tempfile.TemporaryDirectory(dir=TOOLKIT.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, CUBLAS]
            if subprocess.run(command).returncode != 0:
                raise CudaError(f"pip could not download {CUBLAS}: its message is above")
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                folder.mkdir(exist_ok=True)
                for name in wheel.namelist():
                    if "/include/" in name and name.endswith(".h"):
                        (folder / Path(name).name).write_bytes(wheel.read(name))
    return folder


def symbols(path: Path, kind: str) -> str:
    """Return the demangled symbols of an object: T are those that it has, U those that it asks for."""
    out = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in out.splitlines() if f" {kind} " in line)


def compile_objects(nvcc: Path, arch: int) -> None:
    """Compile what ggml-cuda gets of the operation; what one object asks for has to be in the other.

    Raises
    ------
    CudaError
        when a source does not compile, or the two do not fit
    """
    if not OBJECTS[1].exists():
        raise CudaError(f"{OBJECTS[1]} is not there: make patches-apply")
    command = [str(nvcc), "-c", "-std=c++17", f"-arch=sm_{arch}", "-use_fast_math", "-extended-lambda"]
    command += [f"-I{path}" for path in (*INCLUDES, cublas_headers(nvcc))] + [f"-D{name}" for name in DEFINITIONS]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in OBJECTS]
        for source, path in zip(OBJECTS, objects):
            run = subprocess.run([*command, "-o", str(path), str(source)], capture_output=True, text=True)
            if run.returncode != 0:
                raise CudaError(f"{source} does not compile for sm_{arch}:\n{run.stdout}{run.stderr}")
            print(f"{source.relative_to(ROOT)}: sm_{arch}, {path.stat().st_size} bytes")
        for name in SYMBOLS:
            if name not in symbols(objects[1], "U") or name not in symbols(objects[0], "T"):
                raise CudaError(f"{name}...) is not called by ggml-cuda.cu, or attn-score.cu has another")
    print(f"ggml-cuda.cu calls {len(SYMBOLS)} functions of attn-score.cu")


def main() -> int:
    parser = argparse.ArgumentParser(description="compile the CUDA kernels of ATTN_SCORE for every architecture")
    parser.add_argument("--install", action="store_true", help="take nvcc from the wheels even where there is another")
    parser.add_argument("--objects", action="store_true", help="the files of ggml-cuda in place of the kernels")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="such as 86 90")
    args = parser.parse_args()
    try:
        nvcc = (None if args.install else find_nvcc()) or install_wheels(TOOLKIT, ROOT / "requirements/cuda.txt")
        print(f"{nvcc}: {subprocess.run([nvcc, '--version'], capture_output=True, text=True).stdout.splitlines()[-1]}")
        if args.objects:
            compile_objects(nvcc, args.arch[0])
            return 0
        kernels = compile_kernels(nvcc, args.arch)
        print(table(kernels, args.arch))
        bad = check(kernels, args.arch)
    except CudaError as error:
        print(f"cuda_compile: {error}", file=sys.stderr)
        return 1
    for text in bad:
        print(f"above the bound: {text}", file=sys.stderr)
    print(f"{len(kernels)} kernels for {len(args.arch)} architectures, {len(bad)} above the bounds")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
