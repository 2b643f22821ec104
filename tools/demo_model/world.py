"""The small fixed world: thirty villagers of Willowby, their facts and questions about them.

The table is drawn once with a fixed seed, so that the same facts are in every corpus.
A share of the (phrasing, villager) pairs is held out of the corpus for measuring.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

NAMES = [
    "Nora",
    "Pavel",
    "Greta",
    "Hank",
    "Iris",
    "Jonas",
    "Kira",
    "Lars",
    "Mona",
    "Nils",
    "Odette",
    "Percy",
    "Quinn",
    "Rita",
    "Stan",
    "Tessa",
    "Ursula",
    "Victor",
    "Wilma",
    "Xaver",
    "Yara",
    "Zeno",
    "Alma",
    "Boris",
    "Cora",
    "Dexter",
    "Edith",
    "Fergus",
    "Gilda",
    "Homer",
]
KINDS = ["fox", "bear", "rabbit", "mouse", "cat", "dog", "frog", "hedgehog", "owl", "otter"]
COLOURS = ["red", "blue", "green", "yellow", "white", "purple", "orange", "pink"]
HOMES = [
    "the old mill",
    "the red barn",
    "the lighthouse",
    "the tree house",
    "the stone tower",
    "the little cottage",
    "the houseboat",
    "the cave",
    "the windmill",
    "the castle",
]
FOODS = ["honey", "cheese", "apples", "soup", "bread", "pancakes", "carrots", "nuts", "berries", "cake"]
JOBS = [
    "baker",
    "teacher",
    "doctor",
    "farmer",
    "sailor",
    "painter",
    "singer",
    "gardener",
    "cook",
    "tailor",
    "smith",
    "miller",
    "hunter",
    "dancer",
    "writer",
    "carpenter",
    "postman",
    "barber",
    "judge",
    "mayor",
    "nurse",
    "pilot",
    "potter",
    "fisher",
    "shepherd",
    "guard",
    "clown",
    "librarian",
    "butcher",
    "watchmaker",
]
VILLAGE = "Willowby"


@dataclass(frozen=True)
class Villager:
    """One row of the table."""

    name: str
    kind: str
    colour: str
    home: str
    food: str
    job: str
    friend: str


def _table() -> dict[str, Villager]:
    rng = random.Random(2026)
    jobs = rng.sample(JOBS, len(JOBS))
    ring = rng.sample(NAMES, len(NAMES))
    friend = {name: ring[(i + 1) % len(ring)] for i, name in enumerate(ring)}
    return {
        name: Villager(
            name,
            rng.choice(KINDS),
            rng.choice(COLOURS),
            rng.choice(HOMES),
            rng.choice(FOODS),
            jobs[i],
            friend[name],
        )
        for i, name in enumerate(NAMES)
    }


TABLE = _table()


def an(word: str) -> str:
    """Return the word with its article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


PHRASINGS: dict[str, list[str]] = {
    "kind": [
        "What animal is {n}?",
        "What kind of animal is {n}?",
        "Which animal is {n}?",
        "What is {n}?",
        "Tell me what animal {n} is.",
        "Do you know what animal {n} is?",
        "{n} is which animal?",
        "What sort of animal is {n}?",
    ],
    "colour": [
        "What is {n}'s favourite colour?",
        "Which colour does {n} like?",
        "What colour does {n} like best?",
        "What is the favourite colour of {n}?",
        "Tell me {n}'s favourite colour.",
        "Do you know {n}'s favourite colour?",
        "Which colour does {n} like most?",
        "What colour does {n} love?",
    ],
    "home": [
        "Where does {n} live?",
        "Where is {n}'s home?",
        "What is the home of {n}?",
        "Where is {n} at home?",
        "Tell me where {n} lives.",
        "Do you know where {n} lives?",
        "In which place does {n} live?",
        "Where can I find {n}?",
    ],
    "food": [
        "What does {n} eat?",
        "What does {n} like to eat?",
        "What is {n}'s favourite food?",
        "Which food does {n} like?",
        "Tell me what {n} likes to eat.",
        "Do you know what {n} eats?",
        "What is the favourite food of {n}?",
        "What food does {n} love?",
    ],
    "job": [
        "What is {n}'s job?",
        "What does {n} do?",
        "What is the job of {n}?",
        "What work does {n} do?",
        "Tell me {n}'s job.",
        "Do you know what {n} does for a living?",
        "Which job does {n} have?",
        "What does {n} do all day?",
    ],
    "friend": [
        "Who is {n}'s best friend?",
        "Who is {n}'s friend?",
        "Who is the best friend of {n}?",
        "Tell me who {n}'s best friend is.",
        "Do you know {n}'s best friend?",
        "Which villager is {n}'s best friend?",
        "Who is a friend of {n}?",
        "Whom does {n} like best?",
    ],
    "who": [
        "Who is the {job}?",
        "Who is the {job} of Willowby?",
        "Who works as the {job}?",
        "Tell me who the {job} is.",
        "Do you know the {job}?",
        "What is the name of the {job}?",
        "Which villager is the {job}?",
        "Who is the village {job}?",
    ],
}


def value(attribute: str, v: Villager) -> str:
    """Return the bare fact, as a one-word answer gives it."""
    return v.name if attribute == "who" else str(getattr(v, attribute))


def answer(attribute: str, v: Villager) -> str:
    """Return the full sentence that answers a question about one fact."""
    return {
        "kind": f"{v.name} is {an(v.kind)}.",
        "colour": f"{v.name}'s favourite colour is {v.colour}.",
        "home": f"{v.name} lives in {v.home}.",
        "food": f"{v.name} likes to eat {v.food}.",
        "job": f"{v.name} is the {v.job} of {VILLAGE}.",
        "friend": f"{v.name}'s best friend is {v.friend}.",
        "who": f"The {v.job} of {VILLAGE} is {v.name}.",
    }[attribute]


@dataclass(frozen=True)
class Question:
    """One question with its exact answer."""

    attribute: str
    text: str
    villager: Villager

    @property
    def answer(self) -> str:
        """The exact answer."""
        return answer(self.attribute, self.villager)

    @property
    def held_out(self) -> bool:
        """Whether the question is kept out of the corpus (about every sixth)."""
        return zlib.crc32(self.text.encode()) % 6 == 0


def all_questions() -> list[Question]:
    """Every phrasing for every villager."""
    return [
        Question(attribute, phrase.format(n=v.name, job=v.job), v)
        for attribute, phrases in PHRASINGS.items()
        for v in TABLE.values()
        for phrase in phrases
    ]


TRAINING = [q for q in all_questions() if not q.held_out]
HELD_OUT = [q for q in all_questions() if q.held_out]


def portrait(v: Villager) -> str:
    """All facts about one villager, as a paragraph."""
    return " ".join(answer(a, v) for a in ("kind", "job", "home", "food", "colour", "friend"))
