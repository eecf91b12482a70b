"""An error instead of a crash for whatever is used after `close`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from llama_cpp._internals import LlamaModel

_C = TypeVar("_C", bound=type)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise RuntimeError("the model is closed")
        return function(self, *args, **kwargs)

    return guarded


def refuse_after_close(*harmless: str) -> Callable[[_C], _C]:
    """Let public methods and properties of a class, inherited ones as well, raise RuntimeError where `_closed` is set.

    Parameters
    ----------
    *harmless
        Names of those that do not.
    """

    def decorate(cls: _C) -> _C:
        for name in dir(cls):
            if (name.startswith("_") and name != "__call__") or name in harmless:
                continue
            member = inspect.getattr_static(cls, name)
            if inspect.isfunction(member):
                setattr(cls, name, _guarded(member))
            elif isinstance(member, property) and member.fget is not None:
                setattr(cls, name, property(_guarded(member.fget), member.fset, member.fdel, member.__doc__))
        return cls

    return decorate


@refuse_after_close("close")
class FreedModel(LlamaModel):
    """What a `LlamaModel` becomes when it is freed: tokenizers that users hold go on referring to it."""

    _closed = True
