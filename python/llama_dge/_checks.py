"""Types of settings, and names of choices. The library checks ranges, and what does not go together."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._params import RANGES

if TYPE_CHECKING:
    from .config import DGEConfig

_INT32 = range(-(2**31), 2**31)
_OTHER = {
    "policy": ", or an object with a method select(scores, n_rows, layer)",
    "head_budgets": ", or ints of shape [n_layer, n_head_kv]",
}


def converted(config: DGEConfig) -> dict[str, Any]:
    """Return the settings as plain Python values; raises ValueError for one of another type."""
    return {
        field.name: _check_of(field)(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)
    }


def _check_of(field: dataclasses.Field[Any]) -> Callable[[str, Any], Any]:
    if field.name in _SPECIAL:
        return _SPECIAL[field.name]
    if field.metadata["choices"]:
        return lambda name, value: _choice(name, value, field.metadata["choices"])
    return _switch if isinstance(field.default, bool) else _integer


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _is_int(value: object) -> bool:
    # bool is an int in Python, but True entries are a mistake
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _choice(name: str, value: Any, allowed: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(f'"{choice}"' for choice in allowed)
        raise ValueError(f"{name}={_shown(value)}: must be {choices}{_OTHER.get(name, '')}")
    return value


def _switch(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={_shown(value)}: must be True or False")
    return value


def _integer(name: str, value: Any) -> int:
    if not _is_int(value):
        raise ValueError(f"{name}={_shown(value)}: must be an int")
    if int(value) not in _INT32:  # the library would see another number
        raise ValueError(f"{name}={value}: must be in {RANGES[name][0]} .. {RANGES[name][1]}")
    return int(value)  # NumPy's integers as well


def _policy(name: str, value: Any) -> Any:
    # a class has the method as well, but only an instance can be called; the library knows the names
    if isinstance(value, str) or (not isinstance(value, type) and callable(getattr(value, "select", None))):
        return value
    raise ValueError(f"{name}={value!r}: must be the name of a policy{_OTHER[name]}")


def _budget(name: str, value: Any) -> int | float:
    if not _is_real(value):
        raise ValueError(f"{name}={_shown(value)}: must be an int (entries) or a float in (0, 1] (share of the prompt)")
    if _is_int(value):
        return _integer(name, value)
    if not 0.0 < float(np.float32(value)) <= 1.0:
        raise ValueError(f"{name}={value!r}: a float is a share of the prompt and must be in (0, 1]")
    return float(value)


def _recall(name: str, value: Any) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    if not _is_int(value) or int(value) < 0:
        raise ValueError(f'{name}={_shown(value)}: must be a number of tokens, 0 for never, or "auto"')
    return _integer(name, value)


def _recall_mass(name: str, value: Any) -> float:
    if not _is_real(value):
        raise ValueError(f"{name}={_shown(value)}: must be a fraction in (0, 1]")
    return float(value)


def _park_dir(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name}={value!r}: must be the path of a folder, or None")
    return os.path.expanduser(os.fspath(value))


def _park_limit(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not _is_int(value) or not 1 <= int(value) < 2**62:
        raise ValueError(f"{name}={_shown(value)}: must be a number of bytes from 1 on, or None")
    return int(value)


def _head_budgets(name: str, value: Any) -> str | tuple[tuple[int, ...], ...]:
    if isinstance(value, str):
        return str(_choice(name, value, ("uniform", "adaptive")))
    try:
        entries = [[int(n) for n in layer if _is_int(n)] for layer in value]
        complete = all(len(new) == len(old) for new, old in zip(entries, value))
    except TypeError:
        complete = False
    if not complete or not entries or not all(entries):
        raise ValueError(f'{name}={value!r}: must be "uniform", "adaptive"{_OTHER[name]}')
    for n in (n for heads in entries for n in heads if n not in _INT32):
        raise ValueError(f"{name}: {n} entries of a head must be in {RANGES['budget'][0]} .. {RANGES['budget'][1]}")
    # tuples, so that equal settings are equal and the object stays hashable and can be pickled
    return tuple(map(tuple, entries))


_SPECIAL: dict[str, Callable[[str, Any], Any]] = {
    "policy": _policy,
    "budget": _budget,
    "recall": _recall,
    "recall_mass": _recall_mass,
    "park_dir": _park_dir,
    "park_limit": _park_limit,
    "head_budgets": _head_budgets,
}
