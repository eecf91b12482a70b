"""Settings of Draft-Guided Eviction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from . import _checks, _params
from ._params import POLICIES, RANGES, PolicyInfo

__all__ = ["POLICIES", "PRESETS", "RANGES", "RENAMED", "DGEConfig", "Policy", "PolicyInfo"]

SCORES = tuple(_params.ENUMS["scores"])
POOLINGS = tuple(_params.ENUMS["pooling"])
LAYER_BUDGETS = tuple(_params.ENUMS["layer_budgets"])
HEAD_BUDGETS = tuple(name for name in _params.ENUMS["head_budgets"] if name != "table")
PARKS = tuple(_params.ENUMS["park"])
NEW_TURNS = ("restore", "append", "reprefill")

#: Settings by name that differ from the defaults only in what is listed.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "paper": {"draft_tokens": 2, "pooling": "none", "scores": "draft", "recall": 0},
    "recall": {"recall": 4},
}

#: Old names of settings, which are refused with the new one.
RENAMED = {
    "draft_pooling": "pooling",
    "refresh": "recall",
    "refresh_mass": "recall_mass",
    "refresh_overlap": "recall_async",
}
_DEFAULTS = _params.defaults()

_C = TypeVar("_C")


@runtime_checkable
class Policy(Protocol):
    """A selection of your own, for `DGEConfig.policy`.

    Examples
    --------
    >>> class LastEntries:
    ...     def select(self, scores, n_rows, layer):
    ...         n_head_kv, n_past = scores.shape
    ...         return [np.arange(n_past - n_rows, n_past)] * n_head_kv
    >>> DGEConfig(policy=LastEntries(), budget=64).budget
    64
    """

    def select(self, scores: npt.NDArray[np.float32], n_rows: int, layer: int) -> Sequence[npt.ArrayLike]:
        """Select the entries of one layer. Called on the host, once per layer, in the middle of a decode.

        Parameters
        ----------
        scores : ndarray of float32, shape [n_head_kv, n_past]
            Scores of the entries before the observation window, as `scores` and `pooling` make them; higher means
            keep. A copy.
        n_rows
            Entries per head that the budget allows.
        layer
            Layer of the model.

        Returns
        -------
        sequence of n_head_kv int arrays
            Entries to keep per head, in 0 .. n_past - 1, without duplicates; heads may differ in their number.
            An exception, or an entry out of range, leaves the full cache; `dge_stats.error` says so.
        """
        ...


def _option(help: str, *, choices: Sequence[str] | None = None, metavar: str | None = None) -> dict[str, Any]:
    """Return a field's metadata, from which the command line makes an option."""
    return {"help": help, "choices": choices, "metavar": metavar}


def _naming_old_settings(cls: type[_C]) -> type[_C]:
    """Let the constructor name the setting that took the place of an old one."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked(self: _C, *args: Any, **kwargs: Any) -> None:
        for old in RENAMED.keys() & kwargs.keys():
            raise TypeError(f"{old} is called {RENAMED[old]}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_naming_old_settings
@dataclass(frozen=True)
class DGEConfig:
    """Settings of Draft-Guided Eviction (DGE).

    The prompt is evaluated as always and the first `draft_tokens` answer tokens are decoded on the full cache. Then the
    cache is evicted once, in place: each layer and KV head keeps `budget` entries of the prompt, and decoding goes on
    over those. The method is due to Kang and Yoo, "When to Evict, Not What to Keep: Draft-Guided Eviction for
    Training-Free KV-Cache Compression", https://arxiv.org/abs/2609.33334. The defaults are those that our results speak
    for (docs/results.md); ``DGEConfig.preset("paper")`` has the paper's.

    Parameters
    ----------
    policy
        "snapkv": keeps the entries with the highest scores (arXiv 2404.14469). "pyramidkv": the same, with more entries
        in the first layers than in the last (2406.02069). "h2o": keeps the entries with the most attention from the
        whole prompt, which is summed during prefill and slows it down (2306.14048). "streamingllm": keeps the first
        `sinks` entries and the last ones (2309.17453). Or an object with a method ``select``, see `Policy`.
    scores
        What ranks the entries. "auto": the draft for "snapkv" and "pyramidkv", the policy's own score otherwise.
        "draft" (DGE): the attention that the first `draft_tokens` answer tokens pay to them. "policy": the policy's
        own score (DGE-W in the paper): the attention of the last `window` prompt tokens, with "h2o" of all of them.
        "both": the sum of the two, each pooled and normalised. With `recall` the last tokens rank the entries and
        only "auto" or "draft" is accepted.
    pooling
        Smoothing over neighbouring entries of scores that come from few queries, so never of H2O's sums: "none" (the
        paper), "max" or "avg".
    kernel_size
        Entries that pooling spans; odd.
    budget
        Prompt entries kept per layer and KV head, the observation window included. An int counts entries; a float in
        (0, 1] is a share of the prompt. A prompt that is not longer than the budget keeps its full cache. Without
        `recall`, draft tokens are kept besides.
    draft_tokens
        Answer tokens decoded on the full cache before the eviction (k in the paper). 1 evicts at the end of prefill;
        with ``scores="policy"`` that is the bare policy.
    window
        Observation window: last prompt tokens, always kept.
    sinks
        Attention sinks of "streamingllm": first prompt tokens, always kept.
    layer_budgets
        How "pyramidkv" finds the budgets of its layers. "exact": their mean is the budget. "reference": as published,
        which keeps more entries than the budget.
    head_budgets
        "uniform": all heads of a layer keep the same number of entries. "adaptive": they share the layer's entries by
        the scores (Ada-KV, 2407.11550). Or ints, shape [n_layer, n_head_kv]: the entries of each layer and KV head,
        window included, instead of `budget`. Attention skips what a head does not keep, but the cache has cells for the
        head with the most.
    new_turn
        What a later prompt does that begins like an evicted one. "restore": the host copy is put back, what came after
        it is evaluated again, and the longer prompt is evicted anew; without a host copy it is evaluated from its
        start. "append": its new part is evaluated on the kept entries: fast, but evicted entries stay lost, and there
        is no second eviction. "reprefill": it is evaluated from its start.
    park
        Where a copy of the full cache is kept for ``new_turn="restore"`` and `recall`: "ram", host memory; "disk", a
        temporary file, deleted with the copy; "off", nowhere. Where the cache itself is in host memory, "ram" takes as
        much memory as the eviction frees.
    park_dir
        Folder for ``park="disk"``, by default the system's for temporary files. ``~`` is expanded.
    park_limit
        Bytes that all host copies may take; an eviction that would exceed it is refused. None: no limit.
    recall
        0: one eviction, DGE as published. n: entries are selected again from the host copy every n tokens, by the
        attention of the last `window` tokens, pooled. All entries compete, those of the answer as well, so that
        `budget` entries are attended however long the answer is. "auto": after each token the kept set's attention
        mass is estimated, and entries are selected again when it falls below `recall_mass`, after 8 tokens at the
        latest. Needs ``park="ram"``.
    recall_mass
        ``recall="auto"`` selects again when the kept set's attention mass falls below this fraction of its value at the
        last selection.
    recall_async
        True: a thread selects while decoding goes on with the kept set of the selection before, so each selection takes
        effect one later. Not with a policy of your own.
    elastic
        True: the buffers of the cache begin small, grow with use up to n_ctx, and shrink after an eviction. False: they
        are allocated for n_ctx, as llama.cpp does.
    strict
        True: a model that is not supported raises ValueError. False: it runs without eviction, with one warning.

    Raises
    ------
    ValueError
        A value is out of range, or two do not go together; the message names the field, the value and what is allowed.
    TypeError
        An unknown setting, or one that was renamed.

    Examples
    --------
    >>> DGEConfig(budget=512, draft_tokens=4).budget
    512
    >>> DGEConfig.preset("paper", budget=512).draft_tokens
    2
    """

    policy: str | Policy = field(
        default=_DEFAULTS["policy"], metadata=_option("how entries are selected", choices=tuple(POLICIES))
    )
    scores: str = field(default=_DEFAULTS["scores"], metadata=_option("what ranks the entries", choices=SCORES))
    pooling: str = field(
        default=_DEFAULTS["pooling"], metadata=_option("smoothing of scores over neighbours", choices=POOLINGS)
    )
    kernel_size: int = field(
        default=_DEFAULTS["kernel_size"], metadata=_option("entries that pooling spans, odd", metavar="N")
    )
    budget: int | float = field(
        default=_DEFAULTS["budget"],
        metadata=_option("entries kept per layer and KV head; with a point, a share of the prompt", metavar="N"),
    )
    draft_tokens: int = field(
        default=_DEFAULTS["draft_tokens"], metadata=_option("answer tokens before the eviction", metavar="N")
    )
    window: int = field(default=_DEFAULTS["window"], metadata=_option("last prompt tokens, always kept", metavar="N"))
    sinks: int = field(
        default=_DEFAULTS["sinks"], metadata=_option("first prompt tokens that streamingllm keeps", metavar="N")
    )
    layer_budgets: str = field(
        default=_DEFAULTS["layer_budgets"], metadata=_option("rounding of pyramidkv's budgets", choices=LAYER_BUDGETS)
    )
    head_budgets: str | Sequence[Sequence[int]] = field(
        default=_DEFAULTS["head_budgets"],
        metadata=_option("how the heads of a layer share its entries", choices=HEAD_BUDGETS),
    )
    new_turn: str = field(
        default="restore", metadata=_option("what a prompt does that begins like an evicted one", choices=NEW_TURNS)
    )
    park: str = field(default=_DEFAULTS["park"], metadata=_option("where the full cache is copied to", choices=PARKS))
    park_dir: str | None = field(default=None, metadata=_option("folder for the copy on disk", metavar="DIR"))
    park_limit: int | None = field(default=None, metadata=_option("bytes that all copies may take", metavar="N"))
    recall: int | str = field(
        default=_DEFAULTS["recall"],
        metadata=_option('tokens after which entries are selected again, or "auto"; 0: never', metavar="N"),
    )
    recall_mass: float = field(
        default=_DEFAULTS["recall_mass"],
        metadata=_option("fraction of the attention mass below which auto selects again", metavar="X"),
    )
    recall_async: bool = field(
        default=_DEFAULTS["recall_async"], metadata=_option("select on a thread while decoding goes on")
    )
    elastic: bool = field(default=True, metadata=_option("a cache that grows with use and shrinks after an eviction"))
    strict: bool = field(default=True, metadata=_option("refuse a model that is not supported"))

    def __post_init__(self) -> None:
        for name, value in _checks.converted(self).items():
            object.__setattr__(self, name, value)
        refusal = _params.refusal(self)
        if refusal is not None:
            raise ValueError(refusal)

    @property
    def parks(self) -> str:
        """Where the host copy is kept: `park`, or "off" where no setting needs it."""
        return self.park if self.new_turn == "restore" or self.recall else "off"

    @property
    def ranks_by(self) -> str:
        """What ranks the entries, with "auto" resolved: "draft", "policy" or "both"."""
        if self.scores != "auto":
            return self.scores
        return "draft" if self.recall or not isinstance(self.policy, str) else POLICIES[self.policy].auto_scores

    @property
    def least_budget(self) -> int:
        """The least `budget` that the other settings allow."""
        return _params.least_budget(self)

    # other ways to make one

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DGEConfig:
        """Make the settings of a preset.

        Parameters
        ----------
        name
            "default"; "paper": k = 2, no pooling, one eviction; "recall": entries are selected again every 4 tokens.
        **changes
            Settings that differ from the preset.

        Raises
        ------
        ValueError, TypeError
            There is no such preset; else as the constructor.
        """
        if name not in PRESETS:
            names = ", ".join(f'"{preset}"' for preset in PRESETS)
            raise ValueError(f'preset="{name}": must be {names}')
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_any(cls, value: Any) -> DGEConfig | None:
        """Make settings of what the ``dge`` parameter of `Llama` takes.

        Parameters
        ----------
        value
            True for the defaults, the name of a preset, a dict of settings, a DGEConfig, or None or False for no
            eviction.

        Returns
        -------
        DGEConfig or None
            None where eviction is off.

        Raises
        ------
        TypeError
            Another type, or a dict with a key that is no setting.
        ValueError
            As the constructor, or there is no such preset.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, Mapping):
            fields = [setting.name for setting in dataclasses.fields(cls)]
            unknown = [repr(key) for key in value if key not in fields and key not in RENAMED]
            if unknown:
                raise TypeError(f"dge: unknown setting {', '.join(unknown)}; allowed are {', '.join(fields)}")
            return cls(**value)
        raise TypeError(f"dge={value!r}: must be True, False, None, the name of a preset, a dict or a DGEConfig")

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Read a setting from text, as a command line writes it; what the constructor checks is left to it.

        Raises
        ------
        ValueError
            The text is no value of the field's type.
        """
        default = {known.name: known.default for known in dataclasses.fields(cls)}[name]
        kinds: tuple[type, ...] = (str,)
        if name == "budget":
            kinds = (int, float)
        elif name == "recall":
            kinds = (int, str)
        elif name == "park_limit":
            kinds = (int,)
        elif isinstance(default, (bool, int, float)):
            kinds = (type(default),)
        for kind in kinds:
            try:
                return {"true": True, "false": False}[text] if kind is bool else kind(text)
            except (ValueError, KeyError):
                continue
        names = " or ".join({bool: "true or false", int: "an int", float: "a number"}[kind] for kind in kinds)
        raise ValueError(f"{name}={text}: must be {names}")
