"""Signatures of the stock class for methods that pass everything on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import llama_cpp

_F = TypeVar("_F", bound=Callable[..., Any])


def as_stock(method: _F) -> _F:
    """Let a method show the parameters of the stock method of its name, and keyword-only ones of its own.

    Programs read them at run time to find out which settings they may pass.
    """
    stock = getattr(llama_cpp.Llama, method.__name__)
    signature = inspect.signature(stock)
    own = [
        parameter.replace(annotation=Any)
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in signature.parameters
    ]
    parameters = [*signature.parameters.values(), *own]
    # the order of kinds in a signature: **kwargs come last
    parameters.sort(key=lambda parameter: parameter.kind)
    # the stock method's annotations are text, which its own module explains
    functools.update_wrapper(method, stock, assigned=("__annotations__",), updated=())
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    arguments = inspect.signature(method).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments
