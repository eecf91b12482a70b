"""Facts in a long text, and questions for them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .prompts import Prompt, Prompter, n_common
from .texts import Haystack, code_list, facts, filler, haystack, numbers, sentences_of

KINDS = ("numbers", "facts", "codes", "together")
# a prompt's last tokens are read once per arm, so they are not among those that prompts share
_ROOM = 16
_INSTRUCTION = "Answer in one full sentence."
_TOGETHER = "Answer {n} questions, each in one full sentence."


@dataclass(frozen=True)
class NeedleTask:
    """Which texts are made, and what is asked.

    Parameters
    ----------
    kinds
        "numbers", secret numbers of people; "facts", of all sorts; both in filler. "codes": nothing but codes.
        "together": all secret numbers of a text are asked for at once, so that a long answer needs one after the other.
    lengths
        Tokens of a prompt, about.
    n_facts
        Facts in one text, spread evenly; each is asked for. Of "codes", so many lines are asked for.
    depths
        With one fact: a text is made for each place, 0 the beginning, 1 the end.
    seeds
        Texts per kind, length and depth.
    paraphrase
        Which of three ways to ask, from 0; None takes turns.
    text
        Filler; by default it is made up.
    """

    kinds: Sequence[str] = ("numbers",)
    lengths: Sequence[int] = (1024,)
    n_facts: int = 12
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    seeds: Sequence[int] = (1,)
    paraphrase: int | None = None
    text: str | None = None


def needle_prompts(task: NeedleTask, prompter: Prompter) -> Iterator[list[Prompt]]:
    """Yield the questions for one text after the other, shortest texts first.

    Raises
    ------
    ValueError
        An unknown kind, or facts that do not fit into a text.
    """
    unknown = sorted(set(task.kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"kind {unknown[0]}: must be one of {', '.join(KINDS)}")
    for length in task.lengths:
        for kind in task.kinds:
            single = task.n_facts == 1 and kind in ("numbers", "facts")
            for seed in task.seeds:
                for depth in task.depths if single else (None,):
                    yield _questions(task, kind, length, seed, depth, prompter)


def _questions(
    task: NeedleTask, kind: str, length: int, seed: int, depth: float | None, prompter: Prompter
) -> list[Prompt]:
    # what stands around the text has about 50 tokens
    stack = _text(task, kind, length - 50, random.Random(f"{kind} {length} {seed} {depth}"), depth, prompter)
    asked: Sequence[int] = range(len(stack.needles))
    if kind == "codes":
        n = min(task.n_facts, len(stack.needles))
        asked = range(len(stack.needles) // (2 * n), len(stack.needles), -(-len(stack.needles) // n))
        if len(asked) < n:
            asked = [(2 * i + 1) * len(stack.needles) // (2 * n) for i in range(n)]
    if kind == "together":
        return [_together(task, stack, length, seed, prompter)]
    made = []
    for i in asked:
        needle = stack.needles[i]
        way = (i + seed) % len(needle.questions) if task.paraphrase is None else task.paraphrase
        if prompter.chat:
            tokens = prompter.tokens(f"{stack.text}\n\n{needle.questions[way]} {_INSTRUCTION}")
        else:
            tokens = prompter.plain(f"{stack.text}\n\n{needle.opening}")
        made.append((i, way, needle, tokens))
    shared = n_common([tokens for *_, tokens in made])
    place = "" if depth is None else f"/depth{depth:g}"
    return [
        Prompt(
            task="needle",
            set=kind,
            id=f"{kind}/{length}/n{task.n_facts}/seed{seed}{place}/{i}",
            tokens=tuple(tokens),
            expected=(needle.answer,),
            info={
                "length": length,
                "depth": round(stack.depths[i], 4),
                "seed": seed,
                "n_facts": task.n_facts,
                "paraphrase": way,
                "style": "chat" if prompter.chat else "completion",
            },
            shared=min(shared, min(len(tokens) for *_, tokens in made) - _ROOM),
        )
        for i, way, needle, tokens in made
    ]


def _together(task: NeedleTask, stack: Haystack, length: int, seed: int, prompter: Prompter) -> Prompt:
    # asked in another way, small models stop after the first answer
    way = task.paraphrase or 0
    if prompter.chat:
        questions = " ".join(needle.questions[way] for needle in stack.needles)
        instruction = _TOGETHER.format(n=len(stack.needles))
        tokens = prompter.tokens(f"{stack.text}\n\n{instruction} {questions}")
    else:
        raise ValueError('kind together: asks questions, which needs a chat template and --style "chat" or "auto"')
    return Prompt(
        task="needle",
        set="together",
        id=f"together/{length}/n{task.n_facts}/seed{seed}",
        tokens=tuple(tokens),
        expected=tuple(needle.answer for needle in stack.needles),
        info={
            "length": length,
            "depth": None,
            "seed": seed,
            "n_facts": task.n_facts,
            "paraphrase": way,
            "style": "chat",
        },
    )


def _text(
    task: NeedleTask, kind: str, n_tokens: int, rng: random.Random, depth: float | None, prompter: Prompter
) -> Haystack:
    if kind == "codes":
        return code_list(rng, n_tokens, prompter.count)
    needles = (facts if kind == "facts" else numbers)(rng, task.n_facts)
    n = len(needles)
    depths = [(i + 0.5) / n for i in range(n)] if depth is None else [depth] * n
    prose = filler(rng) if task.text is None else sentences_of(task.text, rng)
    return haystack(needles, depths, prose, n_tokens, prompter.count)


def hit(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected numbers and words that are in the answer, as whole words."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.lower())  # 12,345
    words = "".join(c if c.isalnum() else " " for c in plain).split()
    return sum(want.lower() in words for want in expected) / len(expected)
