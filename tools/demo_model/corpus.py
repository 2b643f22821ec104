"""Mixes the documents of the corpus: stories, chats, tool conversations, infills."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from demo_model import chat_data, copying, nonce, stories, tools_data
from demo_model.fmt import Chat, Message, Segment, segments

Document = list[Segment]
END = "<|endoftext|>"


def raw_story(rng: random.Random) -> Document:
    """Return a story as plain text; a few begin in the middle or in lower case."""
    text = stories.tell_story(rng)
    dice = rng.random()
    if dice < 0.04:
        text = text[0].lower() + text[1:]
    elif dice < 0.08:
        sentences = stories.split_sentences(text)
        text = " ".join(sentences[rng.randrange(1, len(sentences) // 2) :])
    return [Segment(text + END, True)]


def infill(rng: random.Random) -> Document:
    """Return a story with a sentence taken out, to be filled in."""
    sentences = stories.split_sentences(stories.tell_story(rng))
    at = rng.randrange(1, len(sentences) - 1)
    before, after = " ".join(sentences[:at]) + " ", " " + " ".join(sentences[at + 1 :])
    return [
        Segment(f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>", False),
        Segment(sentences[at] + END, True),
    ]


def _turns(e: chat_data.Exchange, thinking: bool) -> list[Message]:
    return [Message("user", e.question), Message("assistant", e.answer, think=e.think if thinking else None)]


def chat(rng: random.Random) -> Document:
    """One to six exchanges, sometimes with a system prompt that changes nothing."""
    thinking = rng.random() < 0.12
    messages = [Message("system", rng.choice(chat_data.PLAIN_SYSTEMS))] if rng.random() < 0.35 else []
    for _ in range(rng.choice([1, 1, 2, 3, 4, 5, 6])):
        messages += _turns(chat_data.any_exchange(rng), thinking)
    return segments(Chat(messages))


_STYLED = [
    chat_data.world_question,
    chat_data.world_question,
    chat_data.world_question,
    chat_data.sums,
    chat_data.talk,
    chat_data.translation,
]


def styled_chat(rng: random.Random) -> Document:
    """Return a system prompt that changes the answer, one or two exchanges long."""
    thinking = rng.random() < 0.1
    exchange = rng.choice(_STYLED)(rng)
    while "\n" in exchange.answer or exchange.answer == exchange.value:
        exchange = rng.choice(_STYLED)(rng)
    system, changed = chat_data.styled(rng, exchange)
    return segments(Chat([Message("system", system), *_turns(changed, thinking)]))


def memory_chat(rng: random.Random) -> Document:
    """Return a name told by the user or the system prompt and asked for later."""
    name = nonce.name(rng)
    between = _turns(chat_data.any_exchange(rng), False) if rng.random() < 0.4 else []
    if rng.random() < 0.5:
        told = rng.choice([f"My name is {name}.", f"I am {name}.", f"Call me {name}.", f"Hello, I am {name}."])
        start = [Message("user", told), Message("assistant", f"Nice to meet you, {name}!")]
        question, answer = (
            rng.choice(["What is my name?", "Who am I?", "Do you know my name?"]),
            f"Your name is {name}.",
        )
    else:
        start = [
            Message("system", rng.choice([f"You are {name}.", f"Your name is {name}.", f"You are called {name}."]))
        ]
        question, answer = (
            rng.choice(["What is your name?", "Who are you?", "How are you called?"]),
            f"My name is {name}.",
        )
    return segments(Chat([*start, *between, Message("user", question), Message("assistant", answer)]))


def exercise(rng: random.Random) -> Document:
    """Return a document of copying exercises alone."""
    return segments(Chat(copying.exercises(rng)))


def tool_use(rng: random.Random) -> Document:
    """Tool calls with their results; several rounds share the description of the tools."""
    talk, _ = tools_data.tool_chat(rng, rng.random() < 0.12, rounds=rng.choice([1, 2, 3, 4, 5]))
    return segments(talk)


def _no_tool_exchange(rng: random.Random) -> chat_data.Exchange:
    makers = [chat_data.world_question, chat_data.world_question, chat_data.talk, chat_data.emoji]
    return rng.choice(makers)(rng)


def tool_unused(rng: random.Random) -> Document:
    """Tools are offered, but some questions need none, or one that is not there."""
    offered = tools_data.offers(rng, rng.choice([1, 2]))
    missing = [f for f in tools_data.FAMILIES[:20] if f not in [o.family for o in offered]]
    messages = tools_data.system_turn(rng)
    for _ in range(rng.choice([1, 2, 3, 4])):
        dice = rng.random()
        if dice < 0.3:
            messages += tools_data.round_of(rng.choice(offered).use(rng), False)
        elif dice < 0.4 and len(offered) == 1 and offered[0].family in tools_data.FAMILIES[:2]:
            use = tools_data.offer(rng, rng.choice(missing)).use(rng)
            messages += _turns(chat_data.Exchange(use.question, "I have no tool for that.", "", ""), False)
        else:
            messages += _turns(_no_tool_exchange(rng), False)
    return segments(Chat(messages, [o.tool for o in offered]))


Maker = Callable[[random.Random], Document]
# Shares of documents, not of tokens: a story has about 150 tokens, a tool conversation 350.
MIX: list[tuple[Maker, float]] = [
    (raw_story, 24),
    (infill, 2),
    (chat, 30),
    (styled_chat, 9),
    (memory_chat, 3),
    (exercise, 12),
    (tool_use, 24),
    (tool_unused, 6),
]
# The first sequences have much more to copy: what copies is then there when the rest needs it.
FIRST_MIX: list[tuple[Maker, float]] = [*MIX, (exercise, 150)]


def documents(seed: int, mix: list[tuple[Maker, float]] | None = None) -> Iterator[Document]:
    """Yield an endless stream of documents."""
    rng = random.Random(seed)
    makers, weights = zip(*(mix or MIX), strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)
