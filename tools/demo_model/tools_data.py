"""Tool conversations: tools offered in the system turn, calls, results and answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_model import nonce
from demo_model.fmt import Call, Chat, Json, Message
from demo_model.places import CITIES

Values = dict[str, Any]
Draw = Callable[[random.Random], Any]

LANGUAGES = "French Spanish German Italian Japanese Chinese Korean Dutch Polish Greek".split()
ROOMS = ["kitchen", "bedroom", "bathroom", "living room", "garage", "hall", "office", "garden", "cellar"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ITEMS = "lamp chair table book phone bike camera jacket shoe guitar clock bottle pillow mirror".split()


def city(rng: random.Random) -> str:
    """Return a city of the corpus, or a made-up one, so that the name must be copied."""
    return rng.choice(CITIES) if rng.random() < 0.35 else nonce.proper(rng)


def _item(rng: random.Random) -> str:
    return rng.choice(ITEMS) if rng.random() < 0.4 else nonce.word(rng)


def _pick(*options: Any) -> Draw:
    return lambda rng: rng.choice(options)


def _number(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def _path(rng: random.Random) -> str:
    return f"{nonce.word(rng)}.{rng.choice(['txt', 'md', 'csv', 'py', 'json'])}"


@dataclass(frozen=True)
class Param:
    """One parameter: the names it may have, its JSON type and how a value is drawn."""

    names: tuple[str, ...]
    kind: str
    draw: Draw
    about: str


@dataclass(frozen=True)
class Family:
    """Tools that do the same thing under different names."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[Param, ...]
    questions: tuple[str, ...]
    result: tuple[str, ...]
    answer: str
    extra: dict[str, Draw]


def _family(
    names: str, about: str, params: list[Param], questions: str, result: str, answer: str, **extra: Draw
) -> Family:
    """Return a family from lists written as text, separated by bars."""
    return Family(
        tuple(names.split()),
        tuple(about.split("|")),
        tuple(params),
        tuple(questions.split("|")),
        tuple(result.split("||")),
        answer,
        extra,
    )


_CITY = Param(("city", "city", "location", "place", "town"), "string", city, "The city")
_A = Param(("a", "a", "x", "first"), "integer", _number(1, 999), "The first number")
_B = Param(("b", "b", "y", "second"), "integer", _number(1, 999), "The second number")
_ROOM = Param(("room", "room", "place"), "string", _pick(*ROOMS), "The room")
_SKY = _pick("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear", "stormy")

FAMILIES: list[Family] = [
    _family(
        "get_weather get_weather weather check_weather get_current_weather weather_now current_weather",
        "Get the weather in a city|Get the current weather|Weather for a place|Tells the weather",
        [_CITY],
        "What is the weather in {0}?|What's the weather in {0}?|How is the weather in {0} today?"
        "|Tell me the weather in {0}.|Is it raining in {0}?|What is the weather like in {0}?"
        "|How warm is it in {0}?|Weather in {0}, please.|Check the weather in {0}."
        "|What is the weather in {0} right now?|What is the temperature in {0}?",
        '{{"temperature": {t}, "condition": "{s}"}}||{{"city": "{0}", "temperature": {t}, "condition": "{s}"}}'
        '||{{"temp_c": {t}, "sky": "{s}"}}||{{"condition": "{s}", "temperature": {t}}}||{s}, {t} degrees',
        "It is {s} and {t} degrees in {0}.",
        t=_number(-9, 38),
        s=_SKY,
    ),
    _family(
        "get_time get_time current_time time_in clock get_current_time",
        "Get the time in a city|Tells the local time|Current time of a place",
        [_CITY],
        "What time is it in {0}?|Tell me the time in {0}.|What is the time in {0}?|How late is it in {0}?"
        "|What is the local time in {0}?",
        '{{"time": "{t}"}}||{{"city": "{0}", "time": "{t}"}}||{t}',
        "It is {t} in {0}.",
        t=_clock,
    ),
    _family(
        "add add add_numbers sum plus",
        "Add two numbers|Adds two integers|The sum of two numbers",
        [_A, _B],
        "What is {0} + {1}?|Add {0} and {1}.|What is {0} plus {1}?|Please add {0} and {1}."
        "|What is the sum of {0} and {1}?|Use the tool to add {0} and {1}.",
        '{{"result": {r}}}||{{"sum": {r}}}||{r}',
        "The result is {r}.",
        r=_number(2, 1998),
    ),
    _family(
        "multiply multiply times product",
        "Multiply two numbers|The product of two numbers",
        [_A, _B],
        "What is {0} times {1}?|Multiply {0} by {1}.|What is {0} * {1}?|What is the product of {0} and {1}?",
        '{{"result": {r}}}||{{"product": {r}}}||{r}',
        "The result is {r}.",
        r=_number(2, 99999),
    ),
    _family(
        "subtract subtract minus difference",
        "Subtract two numbers|The difference of two numbers",
        [_A, _B],
        "What is {0} - {1}?|Subtract {1} from {0}.|What is {0} minus {1}?",
        '{{"result": {r}}}||{r}',
        "The result is {r}.",
        r=_number(-998, 998),
    ),
    _family(
        "calculator calculate calc evaluate",
        "Evaluate an expression|Calculates|A calculator",
        [
            Param(
                ("expression", "expr", "formula"),
                "string",
                lambda g: f"{g.randint(1, 99)} {g.choice('+-*/')} {g.randint(1, 99)}",
                "The expression",
            )
        ],
        "What is {0}?|Calculate {0}.|How much is {0}?|Compute {0}.|Evaluate {0}.",
        '{{"result": {r}}}||{r}',
        "The result is {r}.",
        r=_number(0, 9801),
    ),
    _family(
        "set_timer set_timer start_timer timer",
        "Set a timer|Starts a timer",
        [Param(("minutes", "minutes", "duration", "time"), "integer", _number(1, 120), "How many minutes")],
        "Set a timer for {0} minutes.|Start a timer for {0} minutes.|Wake me up in {0} minutes."
        "|Please set a {0} minute timer.",
        '{{"status": "ok"}}||{{"ok": true}}||ok',
        "I have set a timer for {0} minutes.",
    ),
    _family(
        "search search web_search search_web find lookup",
        "Search the web|Finds pages|Searches for a text",
        [Param(("query", "query", "q", "text"), "string", nonce.phrase, "What to search for")],
        "Search for {0}.|Search the web for {0}.|Look up {0}.|Find {0}.|Please search for {0}.",
        '{{"results": ["{r}"]}}||{{"result": "{r}"}}||{r}',
        "I found this: {r}.",
        r=nonce.phrase,
    ),
    _family(
        "send_message send_message message text_to send_sms",
        "Send a message|Sends a text to a person",
        [
            Param(("to", "to", "recipient", "person", "name"), "string", nonce.name, "The person"),
            Param(("text", "text", "message", "body"), "string", nonce.phrase, "The text"),
        ],
        'Send {0} the message "{1}".|Tell {0}: {1}.|Write to {0}: {1}.|Send a message to {0}: {1}.',
        '{{"status": "sent"}}||{{"ok": true}}||sent',
        "I have sent the message to {0}.",
    ),
    _family(
        "translate translate translate_text translator",
        "Translate a text|Translates text to a language",
        [
            Param(("text", "text", "phrase", "input"), "string", nonce.phrase, "The text"),
            Param(("language", "language", "target", "to"), "string", _pick(*LANGUAGES), "The language"),
        ],
        'Translate "{0}" to {1}.|Translate {0} into {1}.|How do you say "{0}" in {1}?|Say "{0}" in {1}.',
        '{{"translation": "{r}"}}||{{"text": "{r}"}}||{r}',
        'In {1}, it is "{r}".',
        r=nonce.phrase,
    ),
    _family(
        "add_note add_note save_note note remember",
        "Save a note|Writes a note",
        [Param(("text", "text", "note", "content"), "string", nonce.phrase, "The note")],
        "Note: {0}.|Save a note: {0}.|Write down: {0}.|Make a note: {0}.",
        '{{"status": "saved"}}||{{"ok": true}}||saved',
        "I have saved the note.",
    ),
    _family(
        "play_song play_music play start_music",
        "Play a song|Plays music",
        [Param(("title", "song", "track", "title"), "string", nonce.phrase, "The song")],
        'Play "{0}".|Play the song {0}.|Please play {0}.|I want to hear {0}.',
        '{{"status": "playing"}}||{{"ok": true}}||playing',
        'I am playing "{0}".',
    ),
    _family(
        "get_price get_price price_of check_price",
        "Get the price of a thing|Tells a price",
        [Param(("item", "item", "product", "thing"), "string", _item, "The product")],
        "How much is a {0}?|What is the price of a {0}?|What does a {0} cost?|Tell me the price of a {0}.",
        '{{"price": {r}}}||{{"item": "{0}", "price": {r}}}||{r}',
        "A {0} costs {r} dollars.",
        r=_number(1, 500),
    ),
    _family(
        "switch_light set_light light turn_light",
        "Switch a light|Turns a light on or off",
        [_ROOM, Param(("state", "state", "mode"), "string", _pick("on", "off"), "on or off")],
        "Turn {1} the light in the {0}.|Switch {1} the light in the {0}.|Turn the {0} light {1}."
        "|Light {1} in the {0}, please.",
        '{{"status": "ok"}}||{{"ok": true}}||done',
        "The light in the {0} is {1} now.",
    ),
    _family(
        "set_temperature heat set_heating thermostat",
        "Set the temperature of a room|Sets the heating",
        [_ROOM, Param(("degrees", "degrees", "temperature", "value"), "integer", _number(12, 28), "Degrees")],
        "Set the {0} to {1} degrees.|Heat the {0} to {1} degrees.|Make it {1} degrees in the {0}.",
        '{{"status": "ok"}}||{{"ok": true}}||done',
        "The {0} is set to {1} degrees.",
    ),
    _family(
        "roll_dice roll dice throw_dice",
        "Roll a die|Throws a die",
        [Param(("sides", "sides", "faces", "n"), "integer", _pick(4, 6, 8, 10, 12, 20, 100), "Sides")],
        "Roll a die with {0} sides.|Throw a {0} sided die.|Roll a {0} sided die.|Roll a d{0}.",
        '{{"result": {r}}}||{{"roll": {r}}}||{r}',
        "The die shows {r}.",
        r=_number(1, 20),
    ),
    _family(
        "get_distance distance how_far route",
        "Distance between two cities|How far two places are apart",
        [
            Param(("from", "origin", "start"), "string", city, "From"),
            Param(("to", "destination", "end"), "string", city, "To"),
        ],
        "How far is it from {0} to {1}?|What is the distance from {0} to {1}?|Distance from {0} to {1}?",
        '{{"km": {r}}}||{{"distance": {r}}}||{r}',
        "It is {r} km from {0} to {1}.",
        r=_number(10, 9999),
    ),
    _family(
        "add_event create_event calendar_add schedule",
        "Add an event to the calendar|Plans an event",
        [
            Param(("title", "title", "name", "event"), "string", nonce.phrase, "The title"),
            Param(("day", "day", "date"), "string", _pick(*DAYS), "The day"),
        ],
        'Add "{0}" on {1}.|Plan {0} for {1}.|Put {0} into my calendar on {1}.|Schedule "{0}" for {1}.',
        '{{"status": "ok"}}||{{"ok": true}}||added',
        "I have added it on {1}.",
    ),
    _family(
        "read_file read_file open_file cat_file",
        "Read a file|Returns the text of a file",
        [Param(("path", "path", "file", "filename"), "string", _path, "The file")],
        "Read the file {0}.|What is in {0}?|Show me {0}.|Open {0}.",
        '{{"content": "{r}"}}||{r}',
        "The file {0} says: {r}",
        r=nonce.phrase,
    ),
    _family(
        "get_date today get_today current_date",
        "Get the date of today|Tells the date",
        [],
        "What is the date today?|What day is it?|Which date is it today?|Tell me the date.",
        '{{"date": "{r}"}}||{r}',
        "Today is {r}.",
        r=lambda g: f"20{g.randint(20, 39)}-{g.randint(1, 12):02d}-{g.randint(1, 28):02d}",
    ),
    _family(
        "get_population population people_in",
        "How many people live in a city|The population of a place",
        [_CITY],
        "How many people live in {0}?|What is the population of {0}?|How big is {0}?",
        '{{"population": {r}}}||{r}',
        "{r} people live in {0}.",
        r=_number(1000, 9999999),
    ),
    _family(
        "define define_word dictionary meaning",
        "Look up a word|Explains a word",
        [Param(("word", "word", "term"), "string", nonce.word, "The word")],
        'What does "{0}" mean?|Define {0}.|Explain the word {0}.|What is the meaning of {0}?',
        '{{"definition": "{r}"}}||{r}',
        'The word "{0}" means: {r}.',
        r=nonce.phrase,
    ),
    _family(
        "get_user find_user user_info get_person",
        "Look up a person|Data of a person",
        [Param(("name", "name", "user", "person"), "string", nonce.name, "The name")],
        "How old is {0}?|Look up {0}.|Who is {0}?|Find the user {0}.|Tell me about {0}.",
        '{{"name": "{0}", "age": {r}}}||{{"age": {r}}}',
        "{0} is {r} years old.",
        r=_number(5, 99),
    ),
]


@dataclass(frozen=True)
class Use:
    """One use of one tool: the question, the call, the result, the answer."""

    question: str
    call: Call
    result: str
    answer: str


def _schema(rng: random.Random, chosen: list[tuple[str, Param]]) -> Json:
    described, titled = rng.random() < 0.5, rng.random() < 0.15
    properties: Json = {}
    for name, param in chosen:
        spec: Json = {"type": param.kind if rng.random() < 0.9 or param.kind == "string" else "number"}
        if described:
            spec["description"] = param.about
        if titled:
            spec["title"] = name.capitalize()
        properties[name] = spec
    schema: Json = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = [name for name, _ in chosen]
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    return schema


def _sorted(value: Any) -> Any:
    """Return the value with its keys in order, as some template engines write it."""
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def describe(rng: random.Random, name: str, about: str, chosen: list[tuple[str, Param]]) -> Json:
    """Return the JSON description of a tool, with the small differences that clients have."""
    function: Json = {"name": name}
    if rng.random() < 0.9:
        function["description"] = about + rng.choice(["", "", "."])
    function["parameters"] = _schema(rng, chosen)
    tool: Json = {"type": "function", "function": function}
    result: Json = _sorted(tool) if rng.random() < 0.3 else tool
    return result


def _param_names(rng: random.Random, family: Family) -> list[tuple[str, Param]]:
    while True:
        chosen = [(rng.choice(p.names), p) for p in family.params]
        if len({n for n, _ in chosen}) == len(chosen):
            return chosen


@dataclass(frozen=True)
class Offer:
    """A tool as one conversation offers it: its family, and the names it has there."""

    family: Family
    tool: Json
    params: tuple[tuple[str, Param], ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.tool["function"]["name"])

    def use(self, rng: random.Random, draw_city: Draw | None = None) -> Use:
        """Draw one use of the tool."""
        family = self.family
        values = [draw_city(rng) if draw_city and p.draw is city else p.draw(rng) for _, p in self.params]
        extra = {key: draw(rng) for key, draw in family.extra.items()}
        return Use(
            question=rng.choice(family.questions).format(*values),
            call=Call(self.name, {n: v for (n, _), v in zip(self.params, values, strict=True)}),
            result=rng.choice(family.result).format(*values, **extra),
            answer=family.answer.format(*values, **extra),
        )


def offer(rng: random.Random, family: Family) -> Offer:
    """Offer a tool of a family under a random name of the family."""
    chosen = _param_names(rng, family)
    name = rng.choice(family.names)
    if rng.random() < 0.1 and family in FAMILIES:
        name = f"{nonce.word(rng)}_{name}" if rng.random() < 0.5 else f"{name}_{nonce.word(rng)}"
    return Offer(family, describe(rng, name, rng.choice(family.about), chosen), tuple(chosen))


def unknown_family(rng: random.Random) -> Family:
    """Return a tool that was never seen before: its name is in the question."""
    name = f"{rng.choice(['get', 'make', 'run', 'do', 'find', 'check', 'open'])}_{nonce.word(rng)}"
    kinds: list[tuple[str, Draw]] = [("string", nonce.word), ("integer", _number(0, 999)), ("string", nonce.phrase)]
    chosen = rng.sample(kinds, rng.choice([1, 1, 2]))
    params = [
        # The digit keeps two made-up names apart.
        Param((nonce.word(rng) + (str(i) if i else ""),), kind, draw, "A value")
        for i, (kind, draw) in enumerate(chosen)
    ]
    said = " and ".join(f"{p.names[0]} {{{i}}}" for i, p in enumerate(params))
    questions = "|".join(f"{start} {name} with {said}." for start in ("Use", "Call", "Please use", "Run"))
    reply: Draw = nonce.word if rng.random() < 0.5 else _number(0, 9999)
    about = nonce.phrase(rng).capitalize()
    return _family(name, about, params, questions, '{{"result": "{r}"}}', "The result is {r}.", r=reply)


def any_offer(rng: random.Random) -> Offer:
    """Return a tool of a known family, more often of common families, or an unknown tool."""
    if rng.random() < 0.1:
        return offer(rng, unknown_family(rng))
    if rng.random() < 0.4:
        return offer(rng, rng.choice(FAMILIES[:7]))
    return offer(rng, rng.choice(FAMILIES))


# These answer the same questions; they are not offered side by side.
_ARITHMETIC = {"add", "subtract", "multiply"}
_PERSON = {"search", "get_user", "get_population", "define"}


def _clash(a: Offer, b: Offer) -> bool:
    if a.name == b.name or a.family == b.family:
        return True
    heads = {a.family.names[0], b.family.names[0]}
    return heads <= _PERSON or ("calculator" in heads and bool(heads & _ARITHMETIC))


def offers(rng: random.Random, count: int, first: Offer | None = None) -> list[Offer]:
    """Tools that can be told apart, in any order."""
    out = [first or any_offer(rng)]
    while len(out) < count:
        other = any_offer(rng)
        if not any(_clash(other, o) for o in out):
            out.append(other)
    rng.shuffle(out)
    return out


SYSTEMS = [
    "",
    "",
    "",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Use the tools when needed.",
    "You are a helpful assistant with tools.",
    "Be brief.",
]


def system_turn(rng: random.Random) -> list[Message]:
    """Return a system message that changes nothing, or none."""
    system = rng.choice(SYSTEMS)
    return [Message("system", system)] if system else []


def round_of(use: Use, thinking: bool) -> list[Message]:
    """Question, call, result and answer."""
    think = (f"I should call {use.call.name}.", "I have the result.") if thinking else (None, None)
    return [
        Message("user", use.question),
        Message("assistant", think=think[0], calls=(use.call,)),
        Message("tool", use.result),
        Message("assistant", use.answer, think=think[1]),
    ]


def tool_chat(
    rng: random.Random, thinking: bool = False, draw_city: Draw | None = None, rounds: int = 1
) -> tuple[Chat, Use]:
    """Return a tool conversation of some rounds, and the use of its last round."""
    offered = offers(rng, rng.choice([1, 1, 2, 2, 3, 4] if rounds < 3 else [1, 2]))
    uses = [rng.choice(offered).use(rng, draw_city) for _ in range(rounds)]
    messages = system_turn(rng)
    for use in uses:
        messages += round_of(use, thinking)
    return Chat(messages, [o.tool for o in offered]), uses[-1]
