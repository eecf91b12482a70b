"""Runs prompts through arms and writes the rows that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .arms import Arm
from .engine import Engine, Stop
from .prompts import Prompt
from .results import Results, row_of

Score = Callable[[str, Prompt], float]
Report = Callable[[str], None]


def run_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    results: Results,
    *,
    about: dict[str, Any],
    max_tokens: Callable[[Prompt], int],
    kl_tokens: int,
    score: Score | None,
    stop: Callable[[Prompt], Stop | None] = lambda prompt: None,
    report: Report = lambda line: None,
) -> int:
    """Run what is missing in a file of results.

    Parameters
    ----------
    engine
        Of the model.
    prompts
        In an order in which neighbours share their beginnings.
    arms
        What each prompt is answered with.
    results
        Where rows go.
    about
        What is the same in all rows; "model_sha256" must be among it.
    max_tokens
        Length of a prompt's answer.
    kl_tokens
        As for `Engine.run`.
    score
        Judges an answer; None: nothing is right or wrong.
    stop
        What ends a prompt's answer early.
    report
        Told how far it is.

    Returns
    -------
    int
        Rows that were added.
    """
    n_added = 0
    start = time.monotonic()
    prompts = list({(prompt.task, prompt.id, prompt.sha256): prompt for prompt in prompts}.values())
    told = [{**about, "limits": {"max_tokens": max_tokens(prompt), "kl_tokens": kl_tokens}} for prompt in prompts]
    wanted = [[arm for arm in arms if not results.has(prompt, arm.name, of)] for prompt, of in zip(prompts, told)]
    n_missing = sum(map(len, wanted))
    for prompt, of, missing in zip(prompts, told, wanted):
        if not missing:
            continue
        for result in engine.run(
            prompt.tokens,
            missing,
            max_tokens=max_tokens(prompt),
            kl_tokens=kl_tokens,
            shared=prompt.shared,
            stop=stop(prompt),
        ):
            value = draft = None
            if score is not None:
                value = score(result.text, prompt)
                before = result.tokens[: result.n_before_eviction] if result.evicted else result.tokens
                draft = score(engine.answer_text(before), prompt)
            results.add(row_of(prompt, result, score=value, score_draft=draft, about=of))
            n_added += 1
            seconds = time.monotonic() - start
            left = seconds / n_added * (n_missing - n_added)
            report(f"{n_added:,} of {n_missing:,} answers, {seconds:,.0f} s, {left:,.0f} s left: {prompt.id}")
    return n_added
