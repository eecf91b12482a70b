"""A sequence that is cut, for tests of what may be done with it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .forward import Reference
from .policies import Settings
from .scenario import tokens_of

if TYPE_CHECKING:
    from conftest import Zoo

N_PROMPT = 120
SETTINGS = Settings(budget=32, draft_tokens=3)
N_CUT = N_PROMPT + 2
TOKENS = tokens_of(N_CUT + 40, 0)


def cut_reference(zoo: Zoo, kept: Any, n_after: int = 5) -> Reference:
    """The same sequence in the reference."""
    reference = Reference(zoo["g2"].weights)
    reference.run(TOKENS[:N_CUT])
    reference.mask_all_but(kept)
    for token in TOKENS[N_CUT : N_CUT + n_after]:
        reference.step([token])
    return reference
