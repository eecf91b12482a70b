"""Settings of Draft-Guided Eviction."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

POLICIES = ("snapkv", "streamingllm")
SCORES = ("draft", "policy", "both")
DRAFT_POOLINGS = ("none", "max", "avg")
POOLINGS = ("max", "avg")
NEW_TURNS = ("reprefill", "append")

# far above any context, far below what could overflow an int32 sum in the library
MAX_ROWS = 2**28


@dataclass(frozen=True)
class DGEConfig:
    """Settings of Draft-Guided Eviction (DGE).

    The prompt is evaluated as always and the first `draft_tokens` tokens of the answer are decoded on the full cache.
    Then the cache is cut once, in place: every layer and KV head keeps `budget` rows of the prompt, and decoding goes
    on over those. The method is due to Kang and Yoo, "When to Evict, Not What to Keep: Draft-Guided Eviction for
    Training-Free KV-Cache Compression", https://arxiv.org/abs/2609.33334.

    Parameters
    ----------
    policy
        "snapkv": the rows with the highest scores stay. "streamingllm": the first `sinks` and the last rows stay,
        whatever their scores.
    scores
        What ranks the rows. "draft" (DGE): the attention that the first `draft_tokens` tokens of the answer pay to
        them. "policy" (DGE-W in the paper): the policy's own score, from the last `window` tokens of the prompt.
        "both": the sum of the two, each pooled and normalised.
    draft_pooling
        Smoothing of the draft's scores over neighbouring rows: "none" (the paper), "max" or "avg". With
        ``scores="both"``, "none" means the same as `pooling`.
    budget
        Rows per layer and KV head that are left of the prompt, the window included. An int counts rows; a float in
        (0, 1] is a share of the prompt. A prompt that is not longer is not cut.
    draft_tokens
        Tokens of the answer before the cut (k in the paper). 1 cuts at the end of the prefill, as the bare policy does.
    window
        Rows at the end of the prompt that always stay; also SnapKV's observation window.
    kernel_size
        Rows that pooling spans; odd.
    pooling
        Pooling of the policy's own score: "max" or "avg".
    sinks
        First rows of the prompt that always stay under "streamingllm".
    layer_budgets, head_budgets
        Only "exact" and "uniform": every layer and head keeps the same number of rows.
    new_turn
        What a later prompt that builds on a cut one does. "reprefill": it is evaluated from its start, so nothing is
        lost, and is cut anew. "append": its new part is evaluated on the rows that are left: fast, but what was evicted
        stays lost, and there is no second cut.
    strict
        True: raise ValueError for a model that cannot be cut. False: warn once and run it without eviction.

    Raises
    ------
    ValueError
        A value is out of range; the message names the field, the value and what is allowed.
    NotImplementedError
        A setting that is planned and does not exist yet.

    Examples
    --------
    >>> DGEConfig(budget=512, draft_tokens=4).budget
    512
    """

    policy: str = "snapkv"
    scores: str = "draft"
    draft_pooling: str = "none"
    budget: int | float = 1024
    draft_tokens: int = 2
    window: int = 8
    kernel_size: int = 7
    pooling: str = "max"
    sinks: int = 4
    layer_budgets: str = "exact"
    head_budgets: str = "uniform"
    new_turn: str = "reprefill"
    strict: bool = True

    def __post_init__(self) -> None:
        self._check_choice("policy", POLICIES, planned=("h2o", "pyramidkv"))
        self._check_choice("scores", SCORES)
        self._check_choice("draft_pooling", DRAFT_POOLINGS)
        self._check_choice("pooling", POOLINGS)
        self._check_choice("layer_budgets", ("exact",), planned=("reference",))
        if isinstance(self.head_budgets, (list, tuple, np.ndarray)):
            raise NotImplementedError('head_budgets: an array is not implemented yet; "uniform" works')
        self._check_choice("head_budgets", ("uniform",), planned=("adaptive",))
        self._check_choice("new_turn", NEW_TURNS, planned=("restore",))

        self._check_rows("draft_tokens", 1)
        self._check_rows("window", 1)
        self._check_rows("kernel_size", 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size}: must be odd")
        self._check_rows("sinks", 0)
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict={self.strict!r}: must be True or False")
        self._check_budget()

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

    def _check_choice(self, field: str, allowed: Sequence[str], planned: Sequence[str] = ()) -> None:
        value = getattr(self, field)
        choices = " or ".join(f'"{choice}"' for choice in allowed)
        if isinstance(value, str) and value in planned:
            works = f"{choices} works" if len(allowed) == 1 else f"{choices} work"
            raise NotImplementedError(f'{field}="{value}" is not implemented yet; {works}')
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{field}={value!r}: must be {choices}")

    def _check_rows(self, field: str, least: int) -> None:
        value = getattr(self, field)
        # bool is an int in Python, but True rows are a mistake
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= MAX_ROWS:
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
        ValueError, NotImplementedError
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
