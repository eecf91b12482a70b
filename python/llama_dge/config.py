"""Settings of Draft-Guided Eviction."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

POLICIES = ("snapkv", "pyramidkv", "h2o", "streamingllm")
SCORES = ("draft", "policy", "both")
DRAFT_POOLINGS = ("none", "max", "avg")
POOLINGS = ("max", "avg")
LAYER_BUDGETS = ("exact", "reference")
HEAD_BUDGETS = ("uniform", "adaptive")
NEW_TURNS = ("restore", "append", "reprefill")
PARKS = ("ram", "disk", "off")

# far above any context, far below what could overflow an int32 sum in the library
MAX_ROWS = 2**24


@runtime_checkable
class Policy(Protocol):
    """A choice of rows of your own, for `DGEConfig.policy`.

    Examples
    --------
    >>> class LastRows:
    ...     def select(self, scores, n_rows, layer):
    ...         n_head_kv, n_past = scores.shape
    ...         return [np.arange(n_past - n_rows, n_past)] * n_head_kv
    >>> DGEConfig(policy=LastRows(), budget=64).budget
    64
    """

    def select(self, scores: npt.NDArray[np.float32], n_rows: int, layer: int) -> Sequence[npt.ArrayLike]:
        """Choose the rows of one layer. Called on the host, once per layer, in the middle of a decode.

        Parameters
        ----------
        scores : ndarray of float32, shape [n_head_kv, n_past]
            Scores of the rows in front of the window, as `scores`, `pooling` and `draft_pooling` make them; higher
            means keep. A copy.
        n_rows
            Rows per head that the budget allows.
        layer
            Layer of the model.

        Returns
        -------
        sequence of n_head_kv int arrays
            Rows to keep per head, in 0 .. n_past - 1, without duplicates; heads may differ in their number.
            An exception, or rows out of range, leaves the cache uncut; `dge_stats.error` tells.
        """
        ...


def _is_int(value: object) -> bool:
    # bool is an int in Python, but True rows are a mistake
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class DGEConfig:
    """Settings of Draft-Guided Eviction (DGE).

    The prompt is evaluated as always and the first `draft_tokens` tokens of the answer are decoded on the full cache.
    Then the cache is cut once, in place: every layer and KV head keeps `budget` rows of the prompt, and decoding goes
    on over those. The method is due to Kang and Yoo, "When to Evict, Not What to Keep: Draft-Guided Eviction for
    Training-Free KV-Cache Compression", https://arxiv.org/abs/2609.33334. Defaults are not the paper's settings but
    those that our own figures speak for (docs/results.md).

    Parameters
    ----------
    policy
        "snapkv": the rows with the highest scores stay (arXiv 2404.14469). "pyramidkv": the same with more rows in the
        first layers than in the last (2406.02069). "h2o": with ``scores="policy"`` or "both", the rows with the most
        attention from the whole prompt, which is summed while the prompt is evaluated and slows that down (2306.14048);
        with "draft" or `refresh` it keeps what "snapkv" keeps. "streamingllm": the first
        `sinks` and the last rows stay, whatever their scores (2309.17453). Or an object with a method ``select``, see
        `Policy`.
    scores
        What ranks the rows. "draft" (DGE): the attention that the first `draft_tokens` tokens of the answer pay to
        them. "policy" (DGE-W in the paper): the policy's own score, of the last `window` tokens of the prompt; with
        "h2o" that of all of them.
        "both": the sum of the two, each pooled and normalised.
    draft_pooling
        Smoothing of the draft's scores over neighbouring rows: "none" (the paper), "max" (the default: it found nearly
        twice as many facts, see docs/results.md) or "avg". With
        ``scores="both"`` or `refresh`, "none" means the same as `pooling`.
    budget
        Rows per layer and KV head that are left of the prompt, the window included. An int counts rows; a float in
        (0, 1] is a share of the prompt. A prompt that is not longer is not cut; with `refresh`, prompt and answer
        together have to be longer. Without `refresh` the draft's rows are not counted.
    draft_tokens
        Tokens of the answer before the cut (k; 2 in the paper, which found about half of the facts that 8 finds). 1
        cuts at the end of the prefill; with ``scores="policy"`` that is the bare policy.
    window
        Rows at the end of the prompt that always stay; also SnapKV's observation window.
    kernel_size
        Rows that pooling spans; odd.
    pooling
        Pooling of the policy's own score: "max" or "avg".
    sinks
        First rows of the prompt that always stay under "streamingllm".
    layer_budgets
        Of "pyramidkv". "exact": the mean over the layers is the budget. "reference": the published integers, which
        leave more rows than the budget, for comparison.
    head_budgets
        "uniform": all heads of a layer keep the same number of rows. "adaptive": they share the layer's rows by where
        its best scores are (Ada-KV, 2407.11550). Or ints, shape [n_layer, n_head_kv]: the rows of each layer that is
        cut and KV head, window included, instead of `budget`. Attention skips what a head does not keep, but cells are
        allotted for the head with the most.
    new_turn
        What a later prompt that builds on a cut one does. "restore": the parked rows are put back, what came after them
        is evaluated again, and all goes on as if nothing had been cut; then it is cut anew. Where nothing is parked
        that fits, it is evaluated from its start. "append": its new part is evaluated on the rows that are left: fast,
        but what was evicted stays lost, and there is no second cut. "reprefill": it is evaluated from its start, as
        "restore" does with ``park="off"``.
    park
        Where the rows of before the cut wait for ``new_turn="restore"``: "ram", host memory; "disk", a file that is
        removed when it is of no use any more; "off", nowhere. On a computer whose cache is in host memory anyway, "ram"
        keeps what the cut frees.
    park_dir
        Folder of the files, by default the system's for temporary files.
    park_limit
        Bytes that may be parked; a prompt that needs more is not cut. None: no limit.
    refresh
        0: one cut for good, DGE as published. n: after the cut, the rows are chosen again every n tokens from all rows,
        which are parked, by the attention of the last `window` tokens, pooled (`scores` does not count). Rows of the
        answer compete as those of the prompt do, so `budget` rows are attended however long the answer is. "auto":
        after every token it looks how much of the last token's attention the rows at hold, and chooses only when that
        is less than `refresh_mass` of what they held when they were chosen, and after 8 tokens in any case. Needs
        ``park="ram"``.
    refresh_mass
        Share in (0, 1] for ``refresh="auto"``.
    refresh_overlap
        True: a thread chooses while decoding goes on with the rows of the choice before, so each choice takes effect
        one choice later. Not with a policy of your own.
    elastic
        True: the buffers of the cache begin small, grow with use up to n_ctx, and shrink after a cut. False: they are
        allocated for n_ctx once and for all, as llama.cpp does.
    strict
        True: raise ValueError for a model that cannot be cut. False: warn once and run it without eviction.

    Raises
    ------
    ValueError
        A value is out of range; the message names the field, the value and what is allowed.

    Examples
    --------
    >>> DGEConfig(budget=512, draft_tokens=4).budget
    512
    """

    policy: str | Policy = "snapkv"
    scores: str = "draft"
    draft_pooling: str = "max"
    budget: int | float = 1024
    draft_tokens: int = 8
    window: int = 8
    kernel_size: int = 7
    pooling: str = "max"
    sinks: int = 4
    layer_budgets: str = "exact"
    head_budgets: str | Sequence[Sequence[int]] = "uniform"
    new_turn: str = "restore"
    park: str = "ram"
    park_dir: str | None = None
    park_limit: int | None = None
    refresh: int | str = 0
    refresh_mass: float = 0.9
    refresh_overlap: bool = False
    elastic: bool = True
    strict: bool = True

    def __post_init__(self) -> None:
        # a class has the method, too, but it is an instance that can be called
        if isinstance(self.policy, (str, type)) or not isinstance(self.policy, Policy):
            self._check_choice("policy", POLICIES, other=", or an object with a method select(scores, n_rows, layer)")
        self._check_choice("scores", SCORES)
        self._check_choice("draft_pooling", DRAFT_POOLINGS)
        self._check_choice("pooling", POOLINGS)
        self._check_choice("layer_budgets", LAYER_BUDGETS)
        self._check_choice("new_turn", NEW_TURNS)
        self._check_park()

        self._check_rows("draft_tokens", 1)
        self._check_rows("window", 1)
        self._check_rows("kernel_size", 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size}: must be odd")
        self._check_rows("sinks", 0)
        for field in ("refresh_overlap", "elastic", "strict"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be True or False")
        self._check_refresh()
        self._check_head_budgets()
        self._check_budget()

    @property
    def parks(self) -> str:
        """Where rows are parked: `park`, or "off" where no setting needs them."""
        return self.park if self.new_turn == "restore" or self.refresh else "off"

    def _check_refresh(self) -> None:
        value = self.refresh
        if value != "auto" and not _is_int(value):
            raise ValueError(f'refresh={value!r}: must be a number of tokens, 0 for never, or "auto"')
        if _is_int(value):
            self._check_rows("refresh", 0)
        mass = self.refresh_mass
        if isinstance(mass, bool) or not isinstance(mass, numbers.Real) or not 0.0 < float(mass) <= 1.0:
            raise ValueError(f"refresh_mass={mass!r}: must be a share in (0, 1]")
        object.__setattr__(self, "refresh_mass", float(mass))
        if self.refresh_overlap and not isinstance(self.policy, str):
            raise ValueError("refresh_overlap: a policy of your own cannot be called from the thread that chooses")
        if not self.refresh:
            return
        if self.park != "ram":
            raise ValueError(
                f'refresh={value!r}: needs park="ram", not "{self.park}": the parked rows are read each time'
            )
        if self.scores != "draft":
            raise ValueError(
                f'scores="{self.scores}": with refresh={value!r} the attention of the last tokens ranks the rows'
            )

    def _check_park(self) -> None:
        self._check_choice("park", PARKS)
        if self.park_dir is not None:
            if not isinstance(self.park_dir, (str, os.PathLike)):
                raise ValueError(f"park_dir={self.park_dir!r}: must be the path of a folder, or None")
            object.__setattr__(self, "park_dir", os.fspath(self.park_dir))
        limit = self.park_limit
        if limit is not None:
            if not _is_int(limit) or not 1 <= int(limit) < 2**62:
                raise ValueError(f"park_limit={limit!r}: must be a number of bytes from 1 on, or None")
            object.__setattr__(self, "park_limit", int(limit))

    def _check_head_budgets(self) -> None:
        value = self.head_budgets
        if isinstance(value, str):
            self._check_choice("head_budgets", HEAD_BUDGETS, other=", or ints of shape [n_layer, n_head_kv]")
            if value == "adaptive" and (self.policy == "streamingllm" or not isinstance(self.policy, str)):
                raise ValueError(
                    'head_budgets="adaptive": needs a policy that ranks by scores: "snapkv", "pyramidkv" or "h2o"'
                )
            return
        try:
            rows = [[int(n) for n in layer if _is_int(n)] for layer in value]
            complete = all(len(new) == len(old) for new, old in zip(rows, value))
        except TypeError:
            complete = False
        if not complete or not rows or not all(rows):
            raise ValueError(
                f'head_budgets={value!r}: must be "uniform", "adaptive", or ints of shape [n_layer, n_head_kv]'
            )
        if not isinstance(self.policy, str):
            raise ValueError("head_budgets: a policy of your own decides the rows of each head itself")
        least = self.window + (self.sinks if self.policy == "streamingllm" else 0)
        smallest, largest = min(map(min, rows)), max(map(max, rows))
        if smallest < least or largest > MAX_ROWS:
            raise ValueError(
                f"head_budgets: the rows of a head are {smallest} .. {largest}, and must be in {least} .. {MAX_ROWS}: "
                "they include the window (and the sinks)"
            )
        # tuples, so that equal settings are equal and the object stays hashable and can be pickled
        object.__setattr__(self, "head_budgets", tuple(map(tuple, rows)))

    def _check_budget(self) -> None:
        budget = self.budget
        if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
            raise ValueError(
                f"budget={budget!r}: must be an int >= 1 (rows) or a float in (0, 1] (share of the prompt)"
            )
        if not isinstance(budget, numbers.Integral):
            share = float(budget)
            if math.isnan(share) or not 0.0 < share <= 1.0:
                raise ValueError(
                    f"budget={budget!r}: a float is a share of the prompt and must be in (0, 1]; rows are an int"
                )
            object.__setattr__(self, "budget", share)
            return
        self._check_rows("budget", 1)
        if self.window > self.budget:
            raise ValueError(
                f"window={self.window}: must be at most budget={self.budget}, because the budget includes the window"
            )
        if self.policy == "streamingllm" and self.sinks + self.window > self.budget:
            raise ValueError(
                f"sinks={self.sinks}: sinks + window={self.window} must be at most budget={self.budget} "
                'with policy="streamingllm"'
            )

    def _check_choice(self, field: str, allowed: Sequence[str], other: str = "") -> None:
        value = getattr(self, field)
        choices = " or ".join(f'"{choice}"' for choice in allowed)
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{field}={value!r}: must be {choices}{other}")

    def _check_rows(self, field: str, least: int) -> None:
        value = getattr(self, field)
        if not _is_int(value) or not least <= int(value) <= MAX_ROWS:
            raise ValueError(f"{field}={value!r}: must be an int in {least} .. {MAX_ROWS}")
        object.__setattr__(self, field, int(value))  # NumPy's integers too

    @classmethod
    def from_any(cls, value: Any) -> DGEConfig | None:
        """Make settings of what the ``dge`` parameter of `Llama` takes.

        Parameters
        ----------
        value
            True for the defaults, a dict of fields, a DGEConfig, or None or False for no eviction.

        Returns
        -------
        DGEConfig or None
            None where eviction is off.

        Raises
        ------
        TypeError
            Another type, or a dict with a key that is not a field.
        ValueError
            As the constructor.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            fields = [field.name for field in dataclasses.fields(cls)]
            unknown = [repr(key) for key in value if key not in fields]
            if unknown:
                raise TypeError(f"dge: unknown setting {', '.join(unknown)}; allowed are {', '.join(fields)}")
            return cls(**value)
        raise TypeError(f"dge={value!r}: must be True, False, None, a dict or a DGEConfig")
