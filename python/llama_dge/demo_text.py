"""A document for the demo: the chronicle of an invented town, made of many small facts, always the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_PEOPLE = (
    "Aldous Wren", "Marta Quill", "Josiah Penhallow", "Edith Marrow", "Tobias Fenn", "Clemence Hart", "Rufus Calder",
    "Agnes Thorne", "Silas Brook", "Winifred Oakes", "Gideon Lark", "Harriet Sloe", "Barnaby Reed", "Lettice Moor",
    "Ambrose Vane", "Dorcas Field", "Jasper Holt", "Mabel Rook", "Nathaniel Crane", "Phoebe Ashdown", "Walter Finch",
    "Isolde Gray", "Humphrey Dale", "Sabina Weir", "Crispin Yates", "Ursula Stone", "Leopold Tarn", "Millicent Birch",
)  # fmt: skip
_TRADES = (
    "miller", "cooper", "chandler", "weaver", "saddler", "potter", "apothecary", "wheelwright", "baker", "dyer",
    "glazier", "shepherd", "cartwright", "ropemaker", "beekeeper", "tanner", "clockmaker", "schoolmaster",
    "ferryman",
)  # fmt: skip
_PLACES = (
    "Candle Lane", "the Old Bridge", "Gull Street", "the upper meadow", "the market cross", "Saint Odo's churchyard",
    "Pike Row", "the tithe barn", "the east gate", "Larkspur Hill", "the mill pond", "Tanner's Yard",
    "the long orchard",
)  # fmt: skip
_GOODS = (
    "barley", "wool", "blue cloth", "candles", "honey", "apples", "copper pans", "salt fish", "oak planks", "lamp oil",
    "rye bread", "goat cheese", "hemp rope", "roof slates", "dried pears", "goose feathers", "paper", "cider",
)  # fmt: skip
_EVENTS = (
    "{person}, the {trade}, moved from {place} to {place2} and sold {number} barrels of {goods} before the first snow.",
    "At {place} the {trade} {person} found a cracked bell, which the parish sold for {number} shillings.",
    "The council paid {person} {number} shillings to mend the wall at {place}.",
    "A flood carried {number} sheep past {place}, and {person} brought most of them back with a borrowed boat.",
    "{person} opened a stall near {place}, where {goods} cost {number} pence a pound.",
    "In the spring {person} married {person2}, and {number} guests danced at {place} until morning.",
    "{person} wrote that the {trade} owed the town {number} baskets of {goods}.",
    "Travellers from the coast traded {goods} for {goods2} at {place}, and {person} kept the tally.",
    "The {trade} {person} planted {number} plum trees behind {place}.",
    "A fire began in a shed at {place}, but {person} and {person2} put it out with {number} buckets of water.",
    "{person} taught {number} children to read that winter, in a room above {place}.",
    "The harvest of {goods} was poor, and {person} lent the town {number} sacks of seed.",
    "{person} and the {trade} {person2} quarrelled over a fence at {place} and made peace at the autumn fair.",
    "Snow lay at {place} for {number} days, and {goods} had to be brought in by sledge.",
    "The bridge toll was set at {number} pence for a cart of {goods}, by the advice of {person}.",
    "{person} built a house of grey stone beside {place}, with {number} windows and a red door.",
    "The {trade} from the next valley offered {goods} to {person}, who bought {number} loads.",
    "{person} counted {number} swans on the river below {place}.",
    "In June the {trade} {person} gave a feast at {place} for everyone over sixty.",
)
_OPENINGS = (
    "The year {year} began quietly.", "Of {year} the clerk noted this.", "Much happened in {year}.",
    "{year} is remembered for its weather.", "The book has one page for {year}.", "In {year} the town grew a little.",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """The beginning of a sentence of the document, which asks for its end, and that end."""

    question: str
    answer: str

    @property
    def sentence(self) -> str:
        """The sentence as it stands in the document."""
        return f"{self.question} {self.answer}."


#: Facts of the document, in the order in which they appear. The answers are longer than a draft of two tokens, which
#: comes from the full cache: their ends have to be read from what the cut left.
FACTS = (
    Fact("The blacksmith Orlan Pask named his three horses", "Juniper, Comet and Saffron"),
    Fact("The lighthouse keeper Bettany Crowe kept in her trunk", "a brass telescope, two maps and a jar of plums"),
    Fact("Widow Hanley's parrot could say only the words", "rain before supper"),
    Fact("The mayor's silver key was found by a boy named", "Peregrine Tull of Gander Street"),
    Fact("The ship that brought the organ to the town was called", "the Marigold of Tamsin Bay"),
    Fact("The painter Lucan Dree mixed his favourite colour from", "walnut oil and crushed shells"),
)


def _choices(seed: int) -> Iterator[int]:
    # a linear congruential generator; Python's own may change from version to version
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def chronicle(n_years: int = 22) -> str:
    """Return the document.

    Parameters
    ----------
    n_years
        Number of paragraphs, each of about 115 tokens.

    Returns
    -------
    str
        English prose with every sentence of `FACTS` in it, spread evenly.
    """
    random = _choices(7)

    def pick(options: tuple[str, ...], other_than: str = "") -> str:
        while True:
            choice = options[next(random) % len(options)]
            if choice != other_than:
                return choice

    after = {(2 * i + 1) * n_years // (2 * len(FACTS)): fact for i, fact in enumerate(FACTS)}
    paragraphs = ["The Chronicle of Hollin Ford"]
    event = 0
    for i in range(n_years):
        sentences = [_OPENINGS[i % len(_OPENINGS)].format(year=1702 + i)]
        for _ in range(4):
            person, place, goods = pick(_PEOPLE), pick(_PLACES), pick(_GOODS)
            sentence = _EVENTS[event % len(_EVENTS)].format(
                person=person,
                person2=pick(_PEOPLE, person),
                trade=pick(_TRADES),
                place=place,
                place2=pick(_PLACES, place),
                goods=goods,
                goods2=pick(_GOODS, goods),
                number=3 + next(random) % 90,
            )
            sentences.append(sentence[0].upper() + sentence[1:])
            event += 1
        if i in after:
            sentences.insert(3, after[i].sentence)
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)
