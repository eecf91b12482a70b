"""``llama-dge doctor``: what is installed, and whether a model is supported."""

from __future__ import annotations

import argparse
import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import llama_cpp

from .. import __version__, _library, _native
from ._common import Progress, load, mebibytes, model_path
from ._options import add_model, add_verbose


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser("doctor", help="print versions, libraries and devices, and check a model")
    add_model(parser, optional=True)
    add_verbose(parser)
    parser.set_defaults(command_function=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    def show(name: str, value: object) -> None:
        print(f"{name:<18}{value}")

    show("llama-dge", __version__)
    show("llama-cpp-python", llama_cpp.__version__)
    show("llama.cpp", llama_cpp.llama_version().decode() if hasattr(llama_cpp, "llama_version") else "unknown")
    show("ABI", _library.ABI_VERSION)
    show("Python", f"{platform.python_version()} on {platform.platform()}")
    show("library", _library.LIBRARY._name)
    for device in _devices():
        show("device", device)
    show("system", llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip())
    if args.model is None:
        return 0

    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    llm = load(path, progress, n_ctx=256, n_batch=256)
    reason = _native.supported(llm.ctx)
    show("model", path)
    if reason is not None:
        show("eviction", f"not supported: {reason}")
        return 1
    layers = llm.dge_layers
    heads = sorted({_native.n_head_kv(llm.ctx, layer) for layer in layers})
    show("eviction", f"supported: {len(layers)} layers with {'/'.join(map(str, heads))} KV heads")
    return 0


def _devices() -> Iterator[str]:
    """Describe ggml's devices. Its functions are in libggml, which libllama depends on."""
    library = _library.LIBRARY
    try:
        count, get = library.ggml_backend_dev_count, library.ggml_backend_dev_get
        name, description = library.ggml_backend_dev_name, library.ggml_backend_dev_description
        memory = library.ggml_backend_dev_memory
    except AttributeError:  # Windows looks only in the library itself
        yield "unknown"
        return
    count.restype = ctypes.c_size_t
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    description.restype, description.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    memory.restype = None
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    for i in range(count()):
        device = get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        text = f"{name(device).decode('utf-8', 'replace')}: {description(device).decode('utf-8', 'replace')}"
        yield f"{text}, {mebibytes(free.value)} of {mebibytes(total.value)} free" if total.value else text
