"""What is compared: the full cache, or settings of eviction, written as a short text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import POLICIES, DGEConfig

FULL = "full"
# A prompt is read once for all arms, so nothing of it has to come back after a cut; the cache keeps its size. The draft
# is the paper's, so that an arm's name means the same whatever the defaults of DGEConfig are.
_DEFAULTS = {"new_turn": "reprefill", "elastic": False, "draft_tokens": 2, "draft_pooling": "none"}
_NOT_HERE = {"policy", "elastic", "strict", "head_budgets"}
_SHORT = {"k": "draft_tokens"}


@dataclass(frozen=True)
class Arm:
    """A name and settings; `config` is None for the full cache."""

    name: str
    config: DGEConfig | None

    @property
    def sums(self) -> bool:
        """Whether the arm needs the attention of the whole prompt, which is summed while the prompt is read."""
        return self.config is not None and self.config.policy == "h2o" and self.config.scores != "draft"


class _NotBool(ValueError):
    pass


def _fields() -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(DGEConfig) if field.name not in _NOT_HERE}
    return {**fields, "head_budgets": "uniform"}


def _value(name: str, text: str) -> Any:
    """Read a value as the type that the field has; raises ValueError."""
    default = _fields()[name]
    if name == "refresh":
        return text if text == "auto" else int(text)
    if name == "park_limit":
        return int(text)
    if name == "budget":
        return float(text) if "." in text else int(text)
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise _NotBool
        return text == "true"
    if isinstance(default, float):
        return float(text)
    if isinstance(default, int):
        return int(text)
    return text


def parse_arm(text: str, budget: int | float | None = None) -> Arm:
    """Read an arm.

    The grammar is ``full``, or ``POLICY`` or ``POLICY:NAME=VALUE,NAME=VALUE,...``. POLICY is one of snapkv, pyramidkv,
    h2o, streamingllm, or dge, which is another name of snapkv. The names are the fields of `DGEConfig`, and k for
    draft_tokens.

    Parameters
    ----------
    text
        The arm.
    budget
        Taken where the text names none.

    Raises
    ------
    ValueError
        The message quotes the part that is wrong.

    Examples
    --------
    >>> parse_arm("snapkv:k=1,scores=policy,budget=128").name
    'snapkv:k=1,scores=policy,budget=128'
    >>> parse_arm("dge", budget=64).config.budget
    64
    """
    policy, colon, rest = text.strip().partition(":")
    if policy == FULL:
        if colon:
            raise ValueError(f'arm "{text}": full has no settings, so "{rest}" means nothing')
        return Arm(FULL, None)
    if policy not in (*POLICIES, "dge"):
        raise ValueError(f'arm "{text}": "{policy}" is none of {", ".join((FULL, "dge", *POLICIES))}')
    settings: dict[str, Any] = {"policy": "snapkv" if policy == "dge" else policy}
    if colon and not rest:
        raise ValueError(f'arm "{text}": nothing follows the colon')
    for part in rest.split(",") if rest else []:
        short, equals, value = part.strip().partition("=")
        name = _SHORT.get(short, short)
        if not equals or not value:
            raise ValueError(f'arm "{text}": "{part}" is not of the form NAME=VALUE')
        if name not in _fields():
            raise ValueError(f'arm "{text}": no setting "{short}"; they are k, {", ".join(_fields())}')
        if name in settings:
            raise ValueError(f'arm "{text}": "{short}" is there twice')
        try:
            settings[name] = _value(name, value)
        except _NotBool:
            raise ValueError(f'arm "{text}": "{part}": {value} is neither true nor false') from None
        except ValueError:
            raise ValueError(f'arm "{text}": "{part}": {value} is not a number') from None
    if policy == "dge" and settings.get("scores") == "policy":
        raise ValueError(f'arm "{text}": "scores=policy" is not dge; write snapkv')
    if budget is not None:
        settings.setdefault("budget", budget)
    try:
        config = DGEConfig(**{**_DEFAULTS, **settings})
    except ValueError as error:
        raise ValueError(f'arm "{text}": {error}') from None
    return Arm(_name(config), config)


def _name(config: DGEConfig) -> str:
    """Write settings in the one form that stands for them: k, what is not the default, the budget."""
    parts = [f"k={config.draft_tokens}"]
    for name, default in _fields().items():
        value = getattr(config, name)
        if name not in ("draft_tokens", "budget") and value != _DEFAULTS.get(name, default):
            parts.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    return f"{config.policy}:{','.join(parts)},budget={config.budget}"


def parse_arms(texts: Iterable[str], budgets: Sequence[int | float] = ()) -> list[Arm]:
    """Read arms. Those without a budget of their own are taken once per budget, smallest budget of the list first.

    Returns
    -------
    list of Arm
        Without duplicates, the full cache first.

    Raises
    ------
    ValueError
        As `parse_arm`.
    """
    arms: dict[str, Arm] = {}
    texts = list(texts)
    for budget in budgets or (None,):
        for text in texts:
            arm = parse_arm(text, budget)
            arms.setdefault(arm.name, arm)
    return sorted(arms.values(), key=lambda arm: arm.config is not None)
