"""Few cases in which every pair of settings occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """All pairs of (name, value) in a case."""
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def covering_set(
    factors: Mapping[str, Sequence[Any]], valid: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> list[Case]:
    """Cases such that each pair of values of two factors occurs in one at least; the same for the same factors.

    Parameters
    ----------
    factors
        The values of each factor, hashable.
    valid
        Whether a case, or a part of one, may occur. A pair that is not valid by itself need not be covered.
    """
    names = sorted(factors)
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if valid({a: x, b: y})
    }
    cases: list[Case] = []
    while wanted:
        # start from a pair that is still missing, then give each other factor the value that covers most
        case: Case = dict(min(wanted, key=repr))
        for name in sorted(factors, key=lambda n: -len(factors[n])):
            if name in case:
                continue
            options = [{**case, name: value} for value in factors[name]]
            best = [option for option in options if valid(option)]
            # equal gains: take turns, so that values are used evenly
            turn = len(cases) % max(len(best), 1)
            case = max(best[turn:] + best[:turn], key=lambda option: len(pairs_of(option) & wanted))
        cases.append(case)
        wanted -= pairs_of(case)
    return cases
