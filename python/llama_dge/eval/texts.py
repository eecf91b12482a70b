"""Texts with facts in them, made from a seed: filler prose, and sentences that a question asks for."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], int]

_NAMES = (
    "Alice", "Boris", "Carmen", "Dmitri", "Esther", "Farid", "Greta", "Hiro", "Ingrid", "Jamal", "Katya", "Lorenzo",
    "Miriam", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Stefan", "Tamara", "Ulrich", "Vera", "Wanda", "Yusuf",
)  # fmt: skip
_ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "eager", "frosty", "golden", "hollow", "iron", "jolly", "keen", "lonely",
    "mellow", "narrow", "olive", "proud", "quiet", "rapid", "silver", "tender", "upper", "violet", "wild", "young",
)  # fmt: skip
_NOUNS = (
    "anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
    "ladder", "meadow", "needle", "orchard", "pillow", "quarry", "ribbon", "saddle", "temple", "umbrella", "valley",
    "window", "yard",
)  # fmt: skip
_TOWNS = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Dublin", "Vienna", "Cairo", "Lima", "Riga", "Sofia", "Perth")
_FOODS = ("cherries", "walnuts", "pancakes", "lentils", "oysters", "figs", "dumplings", "olives", "pretzels", "mangoes")
_ANIMALS = ("parrot", "hedgehog", "donkey", "tortoise", "falcon", "rabbit", "goat", "lizard", "swan", "badger")
_COLOURS = ("turquoise", "crimson", "lavender", "orange", "maroon", "beige", "emerald", "ivory", "magenta", "charcoal")
_MONTHS = ("February", "March", "April", "June", "July", "August", "September", "October", "November", "December")
_METALS = ("copper", "zinc", "nickel", "tin", "platinum", "titanium", "bronze", "brass", "lead", "cobalt")
_TOOLS = ("hammer", "compass", "telescope", "shovel", "trumpet", "lantern", "violin", "anvil", "sextant", "loom")

# sentence, whose end is the answer; words to choose from; three ways to ask
_FACTS: tuple[tuple[str, tuple[str, ...], tuple[str, str, str]], ...] = (
    ("The baker's daughter moved to the city of", _TOWNS,
     ("To which city did the baker's daughter move?", "Where did the daughter of the baker move to?",
      "Name the city that the baker's daughter went to live in.")),
    ("The favourite food of the lighthouse keeper is", _FOODS,
     ("What is the favourite food of the lighthouse keeper?", "Which food does the lighthouse keeper like best?",
      "Name what the lighthouse keeper most likes to eat.")),
    ("The animal that lives in the mayor's office is a", _ANIMALS,
     ("Which animal lives in the mayor's office?", "What kind of animal does the mayor keep in the office?",
      "Name the animal in the office of the mayor.")),
    ("The old chapel's front door is painted", _COLOURS,
     ("What colour is the front door of the old chapel?", "In which colour is the old chapel's front door painted?",
      "Name the colour of the old chapel's front door.")),
    ("The village regatta is always held in", _MONTHS,
     ("In which month is the village regatta held?", "When in the year does the village regatta take place?",
      "Name the month of the village regatta.")),
    ("The statue of the fisherman is made of", _METALS,
     ("Of which metal is the statue of the fisherman made?", "What is the fisherman's statue made of?",
      "Name the material of the statue of the fisherman.")),
    ("The object hidden under the stage of the theatre is a", _TOOLS,
     ("What is hidden under the stage of the theatre?", "Which object lies hidden under the theatre's stage?",
      "Name the thing that is hidden under the theatre's stage.")),
    ("The twin brother of the postmaster is called", _NAMES,
     ("What is the twin brother of the postmaster called?", "What is the name of the postmaster's twin brother?",
      "Name the twin brother of the postmaster.")),
    ("The submarine of Captain Holm was built in the town of", _TOWNS,
     ("In which town was Captain Holm's submarine built?", "Where was the submarine of Captain Holm built?",
      "Name the town where Captain Holm's submarine was built.")),
    ("The hospital kitchen ran out of", _FOODS,
     ("What did the hospital kitchen run out of?", "Which food was used up in the hospital kitchen?",
      "Name the food that the hospital kitchen ran out of.")),
    ("The new flag of the chess club is", _COLOURS,
     ("What colour is the new flag of the chess club?", "Which colour has the chess club's new flag?",
      "Name the colour of the chess club's new flag.")),
    ("The astronomer's lost notebook was found by a child named", _NAMES,
     ("Who found the astronomer's lost notebook?", "What is the name of the child who found the astronomer's notebook?",
      "Name the child who found the lost notebook of the astronomer.")),
)  # fmt: skip

# filler without names, numbers, colours or anything that a question asks for
_SUBJECTS = (
    "The path along the hedge", "A slow rain", "The wind from the hills", "An empty cart", "The smell of wet grass",
    "The long afternoon", "A row of poplars", "The sound of distant bells", "The light over the fields",
    "Every stone of the wall", "The stream behind the houses", "A thin layer of mist", "The talk of the neighbours",
    "The last warmth of the day", "A narrow flight of steps", "The silence of the early hours",
)  # fmt: skip
_VERBS = (
    "seemed to follow", "slowly gave way to", "had little in common with", "always reminded people of",
    "was nothing compared with", "went on as quietly as", "led the eye towards", "made them forget", "came before",
    "lasted longer than", "belonged, in a way, to", "hid most of", "could not be told apart from", "softened",
)  # fmt: skip
_OBJECTS = (
    "the slope beyond the barns", "what everybody had expected", "the gentle noise of the leaves",
    "the shadows under the roof", "a season that would not end", "the habits of the people there",
    "the clouds above the ridge", "a story half remembered", "the steady work of the mill",
    "the corners where nobody went", "the flat land near the shore", "a mood that no one explained",
    "the weeds between the tracks", "the patience of the animals",
)  # fmt: skip
_ENDS = (
    "", ", and nobody minded", ", as it had for as long as anyone knew", ", though it hardly mattered",
    ", at least in that part of the country", ", or so it was said", ", which was how they liked it",
    ", until the evening came", ", without any hurry", ", and then it was over",
)  # fmt: skip


# sentences that are too long for what is left of a text, before it is left short
_MAX_PASSED = 100


@dataclass(frozen=True)
class Needle:
    """A fact: its sentence is `opening` and `answer`; one of `questions` asks for it."""

    opening: str
    answer: str
    questions: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The sentence as it stands in the text."""
        return f"{self.opening} {self.answer}."


@dataclass(frozen=True)
class Haystack:
    """A text and what it says, each with its place as a share of the text's tokens."""

    text: str
    needles: tuple[Needle, ...]
    depths: tuple[float, ...]


def numbers(rng: random.Random, n: int) -> list[Needle]:
    """Make secret numbers of people."""
    if not 1 <= n <= len(_NAMES):
        raise ValueError(f"{n} secret numbers: there are names for 1 .. {len(_NAMES)}")
    return [
        Needle(
            f"The secret number for {name} is",
            str(rng.randrange(10000, 100000)),
            (
                f"What is the secret number for {name}?",
                f"Which secret number belongs to {name}?",
                f"Tell me {name}'s secret number.",
            ),
        )
        for name in rng.sample(_NAMES, n)
    ]


def facts(rng: random.Random, n: int) -> list[Needle]:
    """Make facts that have nothing in common."""
    if not 1 <= n <= len(_FACTS):
        raise ValueError(f"{n} facts: there are 1 .. {len(_FACTS)}")
    used: set[str] = set()
    made = []
    for opening, words, questions in rng.sample(_FACTS, n):
        answer = rng.choice([word for word in words if word not in used])
        used.add(answer)
        made.append(Needle(opening, answer, questions))
    return made


def codes(rng: random.Random, n: int) -> list[Needle]:
    """Make lines with a code for a word."""
    most = len(_ADJECTIVES) * len(_NOUNS)
    if not 1 <= n <= most:
        raise ValueError(f"{n} codes: there are words for 1 .. {most}")
    words = [f"{_ADJECTIVES[i // len(_NOUNS)]} {_NOUNS[i % len(_NOUNS)]}" for i in rng.sample(range(most), n)]
    return [
        Needle(
            f"The code for {word} is",
            str(rng.randrange(1000, 10000)),
            (f"What is the code for {word}?", f"Which code is given for {word}?", f"Tell me the code for {word}."),
        )
        for word in words
    ]


def filler(rng: random.Random) -> Iterator[str]:
    """Yield sentences without end."""
    while True:
        yield f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}{rng.choice(_ENDS)}."


def sentences_of(text: str, rng: random.Random) -> Iterator[str]:
    """Yield the sentences of a text without end, from a place that the seed chooses.

    Raises
    ------
    ValueError
        There is no sentence in it.
    """
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)]
    sentences = [sentence for sentence in sentences if 20 <= len(sentence) <= 600]
    if not sentences:
        raise ValueError("the text has no sentences")
    i = rng.randrange(len(sentences))
    while True:
        yield sentences[i % len(sentences)]
        i += 1


def haystack(
    needles: Sequence[Needle], depths: Sequence[float], prose: Iterator[str], n_tokens: int, count: CountTokens
) -> Haystack:
    """Spread needles over prose.

    Parameters
    ----------
    needles
        What the text says.
    depths
        Where each should stand, ascending, 0: at the beginning, 1: at the end.
    prose
        Sentences of the filler.
    n_tokens
        Length of the text.
    count
        Counts the tokens of a sentence.
    """
    costs = [count(" " + needle.sentence) for needle in needles]
    room = n_tokens - sum(costs)
    if room < 0:
        raise ValueError(f"{len(needles)} facts have {sum(costs)} tokens, which do not fit into {n_tokens}")
    waiting = list(zip(needles, depths, costs))
    parts: list[str] = []
    places: list[int] = []
    n_filler = n_text = n_passed = 0
    while True:
        while waiting and n_filler >= waiting[0][1] * room:
            needle, _, cost = waiting.pop(0)
            parts.append(needle.sentence)
            places.append(n_text)
            n_text += cost
        sentence = next(prose)
        cost = count(" " + sentence)
        if n_filler + cost > room:
            # a table that is taken for a sentence should not end the text early
            n_passed += 1
            if room - n_filler <= room // 10 or n_passed == _MAX_PASSED:
                break
            continue
        parts.append(sentence)
        n_filler += cost
        n_text += cost
    for needle, _, cost in waiting:
        parts.append(needle.sentence)
        places.append(n_text)
        n_text += cost
    paragraphs = [" ".join(parts[i : i + 8]) for i in range(0, len(parts), 8)]
    return Haystack("\n\n".join(paragraphs), tuple(needles), tuple(place / max(1, n_text) for place in places))


def code_list(rng: random.Random, n_tokens: int, count: CountTokens) -> Haystack:
    """Make a text of nothing but codes."""
    needles: list[Needle] = []
    places: list[int] = []
    n_text = 0
    for needle in codes(rng, len(_ADJECTIVES) * len(_NOUNS)):
        cost = count(needle.sentence + "\n")
        if n_text + cost > n_tokens:
            break
        needles.append(needle)
        places.append(n_text)
        n_text += cost
    if not needles:
        raise ValueError(f"not one code fits into {n_tokens} tokens")
    text = "\n".join(needle.sentence for needle in needles)
    return Haystack(text, tuple(needles), tuple(place / max(1, n_text) for place in places))
