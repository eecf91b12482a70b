"""ctypes declarations of llama-dge.h, built from its description beside the library.

The header documents the functions; nothing of it is typed a second time here.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from ._library import API, LIBRARY

_SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    **{f"{u}int{n}_t": getattr(ctypes, f"c_{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)},
}


class _Context(ctypes.c_void_p):
    """``struct llama_context *``."""

    @classmethod
    def from_param(cls, ctx: Any) -> Any:
        if ctx is None:  # the library would follow it
            raise RuntimeError("the model is closed")
        return ctypes.c_void_p.from_param(ctx)


_POINTERS: dict[str, Any] = {"void": ctypes.c_void_p, "char": ctypes.c_char_p, "llama_context": _Context}
_structs: dict[str, type[ctypes.Structure]] = {}
_callbacks: dict[str, Any] = {}


def _type(name: str) -> Any:
    """Return the ctypes type of a C type, as the description spells it."""
    if name == "void":
        return None
    if name.endswith(" *"):
        pointed = name[:-2]
        return _POINTERS[pointed] if pointed in _POINTERS else ctypes.POINTER(_type(pointed))
    return _SCALARS.get(name) or _callbacks.get(name) or _structs[name]


def _signature(declared: dict[str, Any]) -> list[Any]:
    return [_type(declared["result"]), *(_type(argument) for _, argument in declared["arguments"])]


def _function(name: str) -> Any:
    function = getattr(LIBRARY, name)
    function.restype, *function.argtypes = _signature(API["functions"][name])
    return function


for _name, _declared in API["callbacks"].items():
    _callbacks[_name] = ctypes.CFUNCTYPE(*_signature(_declared))
for _name, _fields in API["structs"].items():
    # no __dict__, so that a field which the library does not have cannot be set unnoticed
    _members = {"__slots__": (), "_fields_": [(field, _type(type_name)) for field, type_name in _fields]}
    _structs[_name] = type(_name, (ctypes.Structure,), _members)

#: Functions of the library by their names without ``llama_dge_``.
lib = SimpleNamespace(**{name[len("llama_dge_") :]: _function(name) for name in API["functions"]})


def struct(name: str) -> Any:
    """Return the class of ``struct llama_dge_{name}``."""
    return _structs[f"llama_dge_{name}"]


def callback(name: str) -> Any:
    """Return the class of callbacks ``llama_dge_{name}``."""
    return _callbacks[f"llama_dge_{name}"]


def constant(name: str) -> int:
    """Return the number ``LLAMA_DGE_{name}``, which the header defines."""
    return int(API["constants"][f"LLAMA_DGE_{name}"])


def enum(name: str) -> dict[str, int]:
    """Return the values of ``enum llama_dge_{name}`` by their names, lower case and without the enum's own name."""
    values: dict[str, int] = API["enums"][f"llama_dge_{name}"]
    # return codes are the one enum whose values do not carry its name
    prefix = "LLAMA_DGE_" if name == "status" else f"LLAMA_DGE_{name.upper()}_"
    return {value.removeprefix(prefix).lower(): number for value, number in values.items()}


def values(info: ctypes.Structure) -> dict[str, Any]:
    """Return the fields of a struct; text is decoded."""
    fields = {name: getattr(info, name) for name, *_ in info._fields_}
    return {name: value.decode("utf-8") if isinstance(value, bytes) else value for name, value in fields.items()}
