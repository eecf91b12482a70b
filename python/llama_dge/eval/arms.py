"""What is compared: the full cache, or settings of eviction, written as a short text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import POLICIES, PRESETS, RENAMED, DGEConfig

FULL = "full"
#: What an arm may start from: a preset, or a policy as published, evicted at the end of prefill by its own score.
STARTS: Mapping[str, Mapping[str, Any]] = {
    **PRESETS,
    **{policy: {"policy": policy, "draft_tokens": 1, "scores": "policy"} for policy in POLICIES},
}
# DGE as published is what the paper calls so
_OTHER_NAMES = {"dge": "paper"}
# one prompt serves all arms, so none restores it, and the cache keeps its size
_SHARED = {"new_turn": "reprefill", "elastic": False}
_FIELDS = tuple(
    field.name for field in dataclasses.fields(DGEConfig) if field.name not in ("policy", "elastic", "strict")
)
_SHORT = {"k": "draft_tokens"}


def needs_sums(config: DGEConfig) -> bool:
    """Return whether settings need the attention of the whole prompt, which is summed during prefill."""
    known = POLICIES.get(config.policy) if isinstance(config.policy, str) else None
    return known is not None and known.scorer == "sums" and config.ranks_by != "draft"


@dataclass(frozen=True)
class Arm:
    """A name and settings; `config` is None for the full cache."""

    name: str
    config: DGEConfig | None

    @property
    def sums(self) -> bool:
        """Whether the arm needs the attention of the whole prompt, which is summed during prefill."""
        return self.config is not None and needs_sums(self.config)


def parse_arm(text: str, budget: int | float | None = None) -> Arm:
    """Read an arm.

    The grammar is ``full``, or ``START`` or ``START:NAME=VALUE,NAME=VALUE,...``. START is a preset ("default", "paper",
    which is also called "dge", "recall") or a policy, which means the policy as published: k = 1, scores="policy". The
    names are the fields of `DGEConfig`, and k for draft_tokens.

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
    >>> parse_arm("snapkv:scores=policy,k=4,budget=128").name
    'snapkv:k=4,budget=128'
    >>> parse_arm("dge", budget=64).name
    'paper:budget=64'
    """
    start, colon, rest = text.strip().partition(":")
    if start == FULL:
        if colon:
            raise ValueError(f'arm "{text}": full has no settings, so "{rest}" means nothing')
        return Arm(FULL, None)
    start = _OTHER_NAMES.get(start, start)
    if start not in STARTS:
        raise ValueError(f'arm "{text}": "{start}" is none of {", ".join((FULL, *_OTHER_NAMES, *STARTS))}')
    if colon and not rest:
        raise ValueError(f'arm "{text}": nothing follows the colon')
    settings = _settings(text, rest)
    if budget is not None:
        settings.setdefault("budget", budget)
    try:
        config = _config(start, settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f'arm "{text}": {error}') from None
    return Arm(_name(config), config)


def _settings(text: str, rest: str) -> dict[str, Any]:
    """Read what follows the colon; raises ValueError."""
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        short, equals, value = part.strip().partition("=")
        name = _SHORT.get(short, short)
        if not equals or not value:
            raise ValueError(f'arm "{text}": "{part}" is not of the form NAME=VALUE')
        if name in RENAMED:
            raise ValueError(f'arm "{text}": "{name}" is called {RENAMED[name]}')
        if name not in _FIELDS:
            raise ValueError(f'arm "{text}": no setting "{short}"; they are k, {", ".join(_FIELDS)}')
        if name in settings:
            raise ValueError(f'arm "{text}": "{short}" is there twice')
        try:
            settings[name] = DGEConfig.parse(name, value)
        except ValueError as error:
            raise ValueError(f'arm "{text}": {error}') from None
    return settings


def _config(start: str, settings: Mapping[str, Any]) -> DGEConfig:
    """Make the settings that a start and changes of it stand for; equal ones compare equal. Raises as `DGEConfig`."""
    base = dict(STARTS[start])
    if settings.get("recall") and "scores" not in settings:
        base.pop("scores", None)  # the latest queries rank then
    config = DGEConfig(**{**_SHARED, **base, **settings})
    return dataclasses.replace(config, scores="auto" if config.recall else config.ranks_by)


def _name(config: DGEConfig) -> str:
    """Write settings in the one form that stands for them: the nearest start, what differs from it, the budget."""
    names: list[list[str]] = []
    for start in STARTS:
        base = _config(start, {})
        if base.policy != config.policy:
            continue
        changed = [name for name in _FIELDS if getattr(config, name) != getattr(base, name) and name != "budget"]
        if config.recall and "scores" in changed:
            changed.remove("scores")
        changed.sort(key=lambda name: name != "draft_tokens")
        names.append([start, *(f"{_written(name)}={_text(getattr(config, name))}" for name in changed)])
    # of two that are as near, one by which the same scores rank
    start, *parts = min(names, key=lambda parts: (len(parts), f"scores={config.scores}" in parts))
    return f"{start}:{','.join([*parts, f'budget={config.budget}'])}"


def _written(name: str) -> str:
    return next((short for short, field in _SHORT.items() if field == name), name)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def without_budget(name: str) -> str:
    """Return an arm's name without its budget."""
    return re.sub("[:,]budget=[^,]*$", "", name)


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
