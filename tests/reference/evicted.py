"""A sequence that is evicted, for tests of what may be done with it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .forward import Reference
from .policies import Settings
from .scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

N_PROMPT = 120
SETTINGS = Settings(budget=32, draft_tokens=3)
N_BEFORE = N_PROMPT + 2
TOKENS = tokens_of(N_BEFORE + 40, 0)


def evicted_reference(zoo: Zoo, kept: Any, n_after: int = 5) -> Reference:
    """The same sequence in the reference."""
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_BEFORE])
    reference.mask_all_but(kept)
    for token in TOKENS[N_BEFORE : N_BEFORE + n_after]:
        reference.step([token])
    return reference
