"""Settings as the library sees them: its defaults, ranges, policies, and what it refuses."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _bindings
from ._bindings import lib

if TYPE_CHECKING:
    from .config import DGEConfig, Policy

logger = logging.getLogger(__name__)

_Params = _bindings.struct("params")
_SelectCallback = _bindings.callback("select_callback")

#: Settings whose names are an enum's, with its values.
ENUMS = {name: _bindings.enum(name) for name in ("scores", "pooling", "layer_budgets", "head_budgets", "park")}
RECALL_AUTO = _bindings.constant("RECALL_AUTO")


@dataclass(frozen=True)
class PolicyInfo:
    """What the library knows of one of its policies.

    Parameters
    ----------
    name
        For `DGEConfig.policy`.
    summary
        One sentence.
    paper
        arXiv number.
    scorer
        What its own score is made of: "none", "last", "window" or "sums".
    auto_scores
        What ``scores="auto"`` stands for: "draft", "policy" or "both".
    """

    name: str
    summary: str
    paper: str
    scorer: str
    auto_scores: str


def _listed(get: Any, struct: str) -> Iterator[dict[str, Any]]:
    info = _bindings.struct(struct)()
    index = 0
    while get(index, ctypes.byref(info)):
        yield _bindings.values(info)
        index += 1


def _name_of(enum: str, value: int) -> str:
    return {number: name for name, number in _bindings.enum(enum).items()}[value]


def policies() -> dict[str, PolicyInfo]:
    """Return the library's policies by name, ascending."""
    return {
        info["name"]: PolicyInfo(
            **{
                **info,
                "scorer": _name_of("scorer", info["scorer"]),
                "auto_scores": _name_of("scores", info["auto_scores"]),
            }
        )
        for info in _listed(lib.get_policy, "policy_info")
    }


def ranges() -> dict[str, tuple[int | float, int | float]]:
    """Return the least and the greatest value of each number among the settings."""
    types = dict(_Params._fields_)
    return {
        info["name"]: (info["least"], info["most"])
        if types[info["name"]] is ctypes.c_float
        else (int(info["least"]), int(info["most"]))
        for info in _listed(lib.get_field, "field_info")
    }


#: The library's policies by name.
POLICIES = policies()
#: The least and the greatest value of each number among the settings, as the library states them.
RANGES = ranges()


def defaults() -> dict[str, Any]:
    """Return the library's default settings, with names for numbers that have one."""
    params = lib.default_params()
    values = _bindings.values(params)
    for name, kind in _Params._fields_:
        if kind is ctypes.c_float:
            values[name] = float(f"{values[name]:.6g}")  # 0.9, not the double beside the float
    return {**values, **{name: _name_of(name, values[name]) for name in ENUMS}}


def to_c(config: DGEConfig, callback: Any = None) -> Any:
    """Return ``struct llama_dge_params``; `callback` calls a policy of one's own, and is made where it is missing."""
    params = lib.default_params()
    if isinstance(config.policy, str):
        params.policy = config.policy.encode()
    else:
        params.policy = None
        params.select = callback or select_callback(config.policy)
    for name in ENUMS.keys() - {"head_budgets", "park"}:
        setattr(params, name, ENUMS[name][getattr(config, name)])
    for name in ("kernel_size", "draft_tokens", "window", "sinks", "recall_mass", "recall_async"):
        setattr(params, name, getattr(config, name))
    if isinstance(config.budget, float):
        params.budget_share = config.budget
    else:
        params.budget = config.budget
    if isinstance(config.head_budgets, str):
        params.head_budgets = ENUMS["head_budgets"][config.head_budgets]
    else:
        entries = [n for heads in config.head_budgets for n in heads]
        params.head_budgets = ENUMS["head_budgets"]["table"]
        params.table = (ctypes.c_int32 * len(entries))(*entries)
        params.n_table = len(entries)
    params.park = ENUMS["park"][config.parks]
    if config.parks == "disk":
        params.park_dir = os.fsencode(park_dir(config))
    params.park_limit = config.park_limit or 0
    params.recall = RECALL_AUTO if isinstance(config.recall, str) else config.recall
    return params


def park_dir(config: DGEConfig) -> str:
    """Return the folder of host copies on disk."""
    return config.park_dir if config.park_dir is not None else tempfile.gettempdir()


def check_park_dir(config: DGEConfig) -> None:
    """Raise ValueError where host copies on disk cannot be written."""
    if config.parks != "disk":
        return
    folder = park_dir(config)
    if not os.path.isdir(folder):
        raise ValueError(f"park_dir={folder!r}: there is no such folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"park_dir={folder!r}: no file can be created there: {error.strerror}") from error


def refusal(config: DGEConfig) -> str | None:
    """Return why the library refuses settings: a sentence that names the field, its value and what is allowed."""
    reason = ctypes.create_string_buffer(512)
    status = lib.check_params(ctypes.byref(to_c(config)), reason, len(reason))
    return reason.value.decode("utf-8", "replace") if status < 0 else None


def least_budget(config: DGEConfig) -> int:
    """Return the least `budget` that the other settings allow."""
    return int(lib.least_budget(ctypes.byref(to_c(config))))


def select_callback(policy: Policy) -> Any:
    """Return the C function that calls a policy's ``select``.

    Its attribute ``interrupt`` is a KeyboardInterrupt, or its like, that came during a call.
    """

    def call(_: Any, layer: int, n_head: int, n_past: int, n: int, scores: Any, rows: Any, n_rows: Any) -> int:
        try:
            given = np.ctypeslib.as_array(scores, (n_head, n_past)).copy()
            chosen = policy.select(given, n, layer)
            if len(chosen) != n_head:
                raise ValueError(f"{len(chosen)} arrays of entries for {n_head} heads")
            for head, array in enumerate(chosen):
                values = np.sort(np.asarray(array))
                if values.ndim != 1 or len(values) > n_past or (len(values) and values.dtype.kind not in "iu"):
                    raise ValueError(f"head {head}: at most {n_past} ints are expected, got {array!r}")
                if len(values) and not 0 <= int(values[0]) <= int(values[-1]) < n_past:
                    raise ValueError(f"head {head}: entries must be in 0 .. {n_past - 1}, got {array!r}")
                n_rows[head] = len(values)
                np.ctypeslib.as_array(rows, (n_head, n_past))[head, : len(values)] = values
        except BaseException as error:  # an exception cannot cross the library; the eviction is refused instead
            if not isinstance(error, Exception):
                callback.interrupt = error
                return 1
            logger.exception("the policy %r failed in layer %d, so nothing is evicted", policy, layer)
            return 1
        return 0

    callback: Any = _SelectCallback(call)
    callback.interrupt = None
    return callback
