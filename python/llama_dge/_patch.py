"""For libraries that build ``llama_cpp.Llama`` themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import llama_cpp

from .llama import Llama

_MODULES = ("llama_cpp", "llama_cpp.llama")
_OWN = ("llama_cpp", "llama_dge")
_STOCK = Llama.__base__


def patch_llama_cpp() -> Callable[[], None]:
    """Let ``llama_cpp.Llama`` be `llama_dge.Llama`, for libraries that build it themselves.

    Call it before such a library is imported: one that took the stock class by ``from llama_cpp import Llama`` keeps
    it, and that class ignores ``dge=...`` silently. Calling it again changes nothing.

    Returns
    -------
    callable
        Puts the stock class back; calling it again changes nothing. Instances that exist stay what they are.

    Raises
    ------
    RuntimeError
        A module that was imported before has the stock class. The message names it; nothing is changed.

    Notes
    -----
    Where llama_cpp was imported with libraries of its own before llama_dge, ``import llama_dge`` raises ImportError.

    Examples
    --------
    >>> import llama_dge
    >>> undo = llama_dge.patch_llama_cpp()
    >>> import llama_cpp
    >>> llama_cpp.Llama is llama_dge.Llama
    True
    >>> undo()
    """
    modules: list[Any] = [importlib.import_module(name) for name in _MODULES]
    if llama_cpp.Llama is not Llama:
        holders = _holders()
        if holders:
            raise RuntimeError(
                f"patch_llama_cpp: {', '.join(holders)} has taken the stock Llama already. Call "
                "llama_dge.patch_llama_cpp() first, before that is imported."
            )
    for module in modules:
        module.Llama = Llama

    def undo() -> None:
        for module in modules:
            if module.Llama is Llama:
                module.Llama = _STOCK

    return undo


def _holders() -> list[str]:
    """Names of modules, except llama_cpp's own, in which the stock class is called Llama."""
    others = [(name, module) for name, module in list(sys.modules.items()) if name.split(".")[0] not in _OWN]
    return sorted(name for name, module in others if getattr(module, "__dict__", {}).get("Llama") is _STOCK)
