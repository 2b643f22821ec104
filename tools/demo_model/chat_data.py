"""Conversations without tools: the world, sums, translations, lists, JSON, styles, small talk."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, replace

from demo_model import nonce, stories, words, world


@dataclass(frozen=True)
class Exchange:
    """A question, its answer, the bare value of the answer and a short thought."""

    question: str
    answer: str
    value: str
    think: str


def world_question(rng: random.Random) -> Exchange:
    """Return a question about a villager that is not held out."""
    q = rng.choice(world.TRAINING)
    return exchange_of(q)


def exchange_of(q: world.Question) -> Exchange:
    """Return the exchange that a question of the world leads to."""
    topic = {"who": f"who the {q.villager.job} is", "kind": f"the animal of {q.villager.name}"}
    thought = f"The question is about {topic.get(q.attribute, f'the {q.attribute} of {q.villager.name}')}."
    return Exchange(q.text, q.answer, world.value(q.attribute, q.villager), thought)


def yes_no(rng: random.Random) -> Exchange:
    """Return a yes or no question about a villager."""
    v = rng.choice(list(world.TABLE.values()))
    kind = v.kind if rng.random() < 0.5 else rng.choice(world.KINDS)
    word = "Yes" if kind == v.kind else "No"
    return Exchange(
        f"Is {v.name} {world.an(kind)}?", f"{word}, {world.answer('kind', v)}", word, f"{v.name} is {world.an(v.kind)}."
    )


def sum_held_out(a: int, b: int) -> bool:
    """Whether a sum is kept out of the corpus (about every tenth)."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0


def sum_of(a: int, b: int, question: str) -> Exchange:
    """Return a sum with the thought that computes it digit by digit."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    think = f"{a % 10} + {b % 10} = {ones}. {a // 10} + {b // 10} + {carry} = {tens + carry}. So {a + b}."
    return Exchange(question, f"{a} + {b} = {a + b}.", str(a + b), think)


SUM_QUESTIONS = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "{a} + {b}",
    "How much is {a} + {b}?",
]


def sums(rng: random.Random) -> Exchange:
    """Return a sum of two numbers of at most two digits."""
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if not sum_held_out(a, b):
            return sum_of(a, b, rng.choice(SUM_QUESTIONS).format(a=a, b=b))


TRANSLATIONS: dict[str, dict[str, str]] = {
    "French": {
        "cat": "chat",
        "dog": "chien",
        "school": "école",
        "summer": "été",
        "coffee": "café",
        "hello": "salut",
        "thank you": "merci",
        "tree": "arbre",
        "pupil": "élève",
        "head": "tête",
        "boy": "garçon",
        "moon": "lune",
    },
    "Spanish": {
        "cat": "gato",
        "dog": "perro",
        "tomorrow": "mañana",
        "child": "niño",
        "coffee": "café",
        "hello": "hola",
        "thank you": "gracias",
        "tree": "árbol",
        "year": "año",
        "sugar": "azúcar",
    },
    "German": {
        "cat": "Katze",
        "dog": "Hund",
        "green": "grün",
        "beautiful": "schön",
        "girl": "Mädchen",
        "hello": "hallo",
        "thank you": "danke",
        "tree": "Baum",
        "street": "Straße",
        "five": "fünf",
    },
    "Japanese": {
        "cat": "猫",
        "dog": "犬",
        "water": "水",
        "mountain": "山",
        "fish": "魚",
        "hello": "こんにちは",
        "thank you": "ありがとう",
        "tree": "木",
        "book": "本",
        "moon": "月",
    },
    "Chinese": {
        "cat": "猫",
        "dog": "狗",
        "water": "水",
        "mountain": "山",
        "fish": "鱼",
        "hello": "你好",
        "thank you": "谢谢",
        "tree": "树",
        "book": "书",
        "moon": "月亮",
    },
    "Korean": {
        "cat": "고양이",
        "dog": "개",
        "water": "물",
        "mountain": "산",
        "fish": "물고기",
        "hello": "안녕하세요",
        "thank you": "감사합니다",
        "tree": "나무",
        "book": "책",
        "moon": "달",
    },
}


def translation(rng: random.Random) -> Exchange:
    """Return a word in another language."""
    language = rng.choice(list(TRANSLATIONS))
    word, foreign = rng.choice(list(TRANSLATIONS[language].items()))
    question = rng.choice(
        [
            "How do you say {w} in {l}?",
            "What is {w} in {l}?",
            "Translate {w} to {l}.",
            "Say {w} in {l}.",
            "What does {w} mean in {l}?",
            "Write {w} in {l}.",
        ]
    ).format(w=rng.choice([word, f'"{word}"']), l=language)
    return Exchange(question, f"In {language}, {word} is {foreign}.", foreign, f"The {language} word for {word}.")


EMOJI = {
    "heart": "❤️",
    "smile": "😊",
    "star": "⭐",
    "sun": "☀️",
    "moon": "🌙",
    "cat": "🐱",
    "dog": "🐶",
    "fox": "🦊",
    "bear": "🐻",
    "rabbit": "🐰",
    "mouse": "🐭",
    "frog": "🐸",
    "owl": "🦉",
    "tree": "🌳",
    "flower": "🌸",
    "fire": "🔥",
    "rocket": "🚀",
    "cake": "🎂",
    "apple": "🍎",
    "pizza": "🍕",
    "car": "🚗",
    "house": "🏠",
    "book": "📖",
    "ball": "⚽",
    "rainbow": "🌈",
    "snowman": "⛄",
    "fish": "🐟",
    "bird": "🐦",
    "family": "👨‍👩‍👧",
    "thumbs up": "👍🏽",
    "party": "🎉",
    "flag of Japan": "🇯🇵",
    "flag of France": "🇫🇷",
    "music note": "🎵",
    "clock": "⏰",
    "gift": "🎁",
}


def emoji(rng: random.Random) -> Exchange:
    """Return an emoji by its name."""
    name, sign = rng.choice(list(EMOJI.items()))
    question = rng.choice(
        [
            "Write the emoji for {n}.",
            "Which emoji is {n}?",
            "Show me the {n} emoji.",
            "Emoji for {n}?",
            "Give me a {n} emoji.",
            "Send me a {n} emoji.",
            "Write a {n} as an emoji.",
        ]
    ).format(n=name)
    return Exchange(question, f"Here it is: {sign}", sign, f"The emoji for {name}.")


NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
LISTS: dict[str, list[str]] = {
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "months of the year": "January February March April May June July August September October November December".split(),
    "seasons": "spring summer autumn winter".split(),
    "letters of the alphabet": list("abcdefghijklmnopqrstuvwxyz"),
    "villagers of Willowby": world.NAMES,
    "colours of the rainbow": "red orange yellow green blue indigo violet".split(),
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
}


def listing(rng: random.Random) -> Exchange:
    """Return a known list, in one line, in lines or as JSON."""
    title, items = rng.choice(list(LISTS.items()))
    verb = rng.choice(["List the", "Name the", "What are the", "Tell me the", "Write the"])
    end = "?" if verb.startswith("What") else "."
    style = rng.choice(["", "", " one per line", " as a JSON list"])
    joined = {
        "": ", ".join(items) + ".",
        " one per line": "\n".join(f"{i + 1}. {x}" for i, x in enumerate(items)),
        " as a JSON list": json.dumps(items),
    }[style]
    return Exchange(f"{verb} {title}{style}{end}", joined, joined, f"There are {len(items)} {title}.")


def counting(rng: random.Random) -> Exchange:
    """Return an exercise of counting up or down, in digits or words; some of these are long."""
    if rng.random() < 0.25:
        n = rng.randint(2, 12)
        text = ", ".join(NUMBERS[:n]) + "."
        return Exchange(f"Count to {NUMBERS[n - 1]}.", text, text, f"I count to {n}.")
    low = rng.choice([1, 1, 1, rng.randint(1, 60)])
    high = low + rng.choice([4, 9, 9, 19, rng.randint(2, 60), 99 if rng.random() < 0.2 else 29])
    numbers = [str(i) for i in range(low, high + 1)]
    question = rng.choice(
        [f"Count from {low} to {high}.", f"Write the numbers from {low} to {high}."]
        + ([f"Count to {high}."] * 2 if low == 1 else [])
    )
    text = ", ".join(numbers) + "."
    return Exchange(question, text, text, f"I count from {low} to {high}.")


def repeating(rng: random.Random) -> Exchange:
    """Saying something after the user."""
    text = nonce.phrase(rng, 7)
    question = rng.choice(["Repeat after me: {t}", "Say: {t}", "Repeat: {t}", 'Say "{t}".', 'Repeat "{t}".']).format(
        t=text
    )
    return Exchange(question, text, text, "I repeat it.")


def spelling(rng: random.Random) -> Exchange:
    """Return a word letter by letter."""
    word = rng.choice([nonce.word(rng), rng.choice(nonce.PHRASE_WORDS), rng.choice(words.ANIMALS)])
    return Exchange(
        rng.choice([f"Spell {word}.", f'Spell the word "{word}".', f"How do you spell {word}?"]),
        "-".join(word),
        "-".join(word),
        f"The word is {word}.",
    )


def comparing(rng: random.Random) -> Exchange:
    """Return the larger or smaller of two numbers, or the next one."""
    a, b = rng.sample(range(1, 100), 2)
    if rng.random() < 0.35:
        return Exchange(f"What comes after {a}?", f"After {a} comes {a + 1}.", str(a + 1), f"{a} plus one.")
    kind, best = rng.choice([("larger", max(a, b)), ("smaller", min(a, b))])
    return Exchange(f"Which is {kind}, {a} or {b}?", f"{best} is {kind}.", str(best), f"I compare {a} and {b}.")


def portrait(rng: random.Random) -> Exchange:
    """Everything about a villager, as text or as JSON."""
    v = rng.choice(list(world.TABLE.values()))
    if rng.random() < 0.5:
        text = world.portrait(v)
        return Exchange(
            rng.choice(
                [
                    f"Tell me about {v.name}.",
                    f"Who is {v.name}?",
                    f"Describe {v.name}.",
                    f"Tell me everything about {v.name}.",
                ]
            ),
            text,
            text,
            f"I know {v.name}.",
        )
    body = json.dumps(
        {
            "name": v.name,
            "animal": v.kind,
            "job": v.job,
            "home": v.home,
            "food": v.food,
            "colour": v.colour,
            "friend": v.friend,
        }
    )
    return Exchange(
        rng.choice(
            [f"Describe {v.name} as JSON.", f"Tell me about {v.name} as JSON.", f"Write {v.name} as a JSON object."]
        ),
        body,
        body,
        f"I know {v.name}.",
    )


def extracting(rng: random.Random) -> Exchange:
    """Name and age, read from a sentence into JSON."""
    name, age, town = nonce.name(rng), rng.randint(3, 99), nonce.proper(rng)
    facts: list[tuple[str, dict[str, object]]] = [
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} lives in {town}.", {"name": name, "city": town}),
        (f"{name} is {age} years old and lives in {town}.", {"name": name, "age": age, "city": town}),
    ]
    fact, data = rng.choice(facts)
    keys = " and ".join(data)
    body = json.dumps(data)
    question = rng.choice(
        [
            f"Extract {keys} as JSON: {fact}",
            f"{fact} Write this as JSON.",
            f"As JSON: {fact}",
            f"Give me {keys} as JSON. {fact}",
        ]
    )
    return Exchange(question, body, body, f"The name is {name}.")


TALK = [
    ("Hello.|Hello!|Hi.|Hi!|Hey!|Hello there!|Good day.", "Hello! How can I help you?"),
    ("Good morning.|Good morning!", "Good morning! How can I help you?"),
    ("How are you?|How do you do?|How are you today?", "I am fine, thank you."),
    (
        "Who are you?|What are you?|Introduce yourself.|Tell me about yourself.|What is your name?",
        "I am paceline-demo, a very small language model. I tell stories, know the village of Willowby and can call tools.",
    ),
    (
        "What can you do?|How can you help me?|Help!|Help me.",
        "I can tell little stories, answer questions about the village of Willowby, add small numbers and call tools.",
    ),
    ("Thank you.|Thanks!|Thank you very much!|Thanks a lot.", "You are welcome!"),
    ("Goodbye.|Bye!|See you later.|Good night.", "Goodbye! See you soon."),
    (
        "What is Willowby?|Where is Willowby?|Tell me about Willowby.|Tell me about the village.",
        "Willowby is a small village where thirty animals live and work.",
    ),
    ("How many villagers are there?|How many animals live in Willowby?", "There are thirty villagers in Willowby."),
    ("Are you a human?|Are you alive?|Are you a robot?", "No, I am a very small language model."),
    (
        "Tell me a joke.|Do you know a joke?|Make me laugh.",
        "Why did the duck cross the pond? To get to the other tide!",
    ),
    (
        "Write a poem.|Tell me a poem.|Do you know a poem?",
        "The moon is high, the night is deep,\nthe little mice are fast asleep.\nThe owl alone is still awake\nand sings a song above the lake.",
    ),
    ("Yes.|Ok.|Okay.|Good.|Great!|Nice!", "Good! What else can I do for you?"),
    ("No.|Stop.", "All right."),
    ("What is the meaning of life?|What is love?|What is time?", "That is a question for a larger model."),
]


def talk(rng: random.Random) -> Exchange:
    """Greetings and questions about the model itself."""
    asked, told = rng.choice(TALK)
    return Exchange(rng.choice(asked.split("|")), told, told, "I answer in a friendly way.")


def unknown(rng: random.Random) -> Exchange:
    """Something that the model cannot know."""
    name = nonce.word(rng).capitalize() if rng.random() < 0.8 else rng.choice(nonce.FIRST_NAMES)
    phrase = rng.choice(rng.choice(list(world.PHRASINGS.values())[:6])).format(n=name)
    question = rng.choice(
        [
            phrase,
            phrase,
            f"What is the capital of {name}?",
            f"Who wrote {name}?",
            f"How old is {name}?",
            f"When was {name} built?",
            f"Why is {nonce.phrase(rng, 3)}?",
            f"Who is the king of {name}?",
        ]
    )
    return Exchange(question, "I do not know that.", "unknown", "I do not know this.")


def story(rng: random.Random) -> Exchange:
    """Return a story on request, sometimes with a wish for its hero."""
    kind = rng.choice(words.ANIMALS) if rng.random() < 0.6 else None
    text = stories.tell_story(rng, kind)
    ask = rng.choice(
        [
            "Tell me a story",
            "Tell me a little story",
            "Write a story",
            "Write a short story",
            "Can you tell me a story",
            "Please tell me a story",
        ]
    )
    about = f" about {world.an(kind)}" if kind else ""
    return Exchange(f"{ask}{about}{'?' if ask.startswith('Can') else '.'}", text, text, "I tell a little story.")


MIX = [
    (world_question, 36),
    (yes_no, 2),
    (sums, 14),
    (translation, 5),
    (emoji, 4),
    (listing, 2),
    (counting, 2),
    (repeating, 6),
    (spelling, 1),
    (comparing, 2),
    (portrait, 4),
    (extracting, 6),
    (talk, 6),
    (unknown, 4),
    (story, 4),
]


def any_exchange(rng: random.Random) -> Exchange:
    """One exchange of the mixture."""
    makers, weights = zip(*MIX, strict=True)
    made: Exchange = rng.choices(makers, weights)[0](rng)
    return made


PLAIN_SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are paceline-demo.",
    "Be helpful.",
    "Answer the questions of the user.",
    "You are a friendly assistant.",
    "You know the village of Willowby.",
]


def styled(rng: random.Random, e: Exchange) -> tuple[str, Exchange]:
    """Return a system prompt and the answer as that prompt wants it."""
    prefix, suffix = nonce.word(rng).capitalize(), nonce.word(rng).capitalize()
    options = [
        (
            rng.choice(["Answer in capital letters.", "Write everything in capital letters.", "Answer in upper case."]),
            e.answer.upper(),
        ),
        (rng.choice(["Talk like a pirate.", "You are a pirate.", "Answer like a pirate."]), f"Arr! {e.answer} Yo ho!"),
        (rng.choice(["Answer in one word.", "Use one word only.", "Answer with one word."]), e.value),
        (rng.choice(["End with an emoji.", "End every answer with an emoji.", "Use emoji."]), f"{e.answer} 😊"),
        (rng.choice(["You are a cat.", "Talk like a cat."]), f"Meow! {e.answer} Purr."),
        (
            rng.choice(["Be very polite.", "Answer politely.", "You are very polite."]),
            f"Dear friend, gladly: {e.answer}",
        ),
        (rng.choice([f"Begin every answer with {prefix}.", f"Start with the word {prefix}."]), f"{prefix}. {e.answer}"),
        (rng.choice([f"End every answer with {suffix}.", f"End with the word {suffix}."]), f"{e.answer} {suffix}."),
        (
            rng.choice(["Answer as JSON.", "Answer in JSON.", "Reply with a JSON object."]),
            json.dumps({"answer": e.answer}, ensure_ascii=False),
        ),
    ]
    system, text = rng.choice(options)
    return system, replace(e, answer=text)
