"""Constraints in an engine: choices that end when they are complete, that fail alone, and that go on elsewhere."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.constraints import TokenTable
from paceline.errors import GrammarError, InvalidParams, InvalidType, SamplingError
from paceline.params import SamplingParams
from paceline.streaming import FinishReason
from paceline.testing import FakeBackend, FakeEngine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDLESS = {"ignore_eos": True, "max_tokens": 200}


def outcome(prompt: str = "x", engine: FakeEngine | None = None, **options: Any) -> tuple[str, Any]:
    """Return the text and the last chunk of a request."""
    engine = engine or FakeEngine()
    channel = engine.submit(prompt, **options)
    engine.run()
    chunks = list(channel)
    return "".join(chunk.text for chunk in chunks), chunks[-1]


@pytest.mark.parametrize("prompt", ["a", "b", "c"])
def test_a_schema_is_satisfied_and_ends_the_choice(prompt: str) -> None:
    """The text ends with STOP as soon as nothing may follow, although the model's own end is banned."""
    text, last = outcome(prompt, json_schema=PERSON, **ENDLESS)
    jsonschema.validate(json.loads(text), PERSON)
    assert last.finish_reason is FinishReason.STOP
    assert last.stop is None


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"choice": ("yes", "no")}, ("yes", "no")),
        ({"regex": "[ab]{3}"}, None),
        ({"lark": 'start: "a" | "b" "c"'}, ("a", "bc")),
    ],
)
def test_every_kind_of_constraint_ends_with_stop(options: dict[str, Any], texts: tuple[str, ...] | None) -> None:
    """Whatever min_tokens says."""
    text, last = outcome(**options, min_tokens=100, **ENDLESS)
    assert texts is None or text in texts
    assert texts or (len(text) == 3 and set(text) <= set("ab"))
    assert last.finish_reason is FinishReason.STOP


def test_a_text_that_may_end_ends_where_bans_leave_nothing() -> None:
    """STOP and no error, without another token; if the text may not end, an error."""
    text, last = outcome(regex="a+", allowed_token_ids=(ord("a"), ord("b")), ignore_eos=True, max_tokens=3)
    assert (text, last.finish_reason) == ("aaa", FinishReason.LENGTH)
    text, last = outcome(regex="a(b[0-9])?", allowed_token_ids=(ord("a"),), ignore_eos=True)
    assert (text, last.finish_reason) == ("a", FinishReason.STOP)
    text, last = outcome(regex="ab", allowed_token_ids=(ord("a"),))
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, SamplingError)


def test_the_last_token_that_completes_the_text_is_a_stop() -> None:
    """Also if it is the last token allowed by max_tokens."""
    text, last = outcome(choice=("yes",), max_tokens=3)
    assert (text, last.finish_reason) == ("yes", FinishReason.STOP)


def test_tenants_share_no_compiled_grammar() -> None:
    """Nor do requests with another salt."""
    engine = FakeEngine()
    compiled = []
    for owner in ({"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "c"}):
        engine.submit("x", json_schema=PERSON, **owner, **ENDLESS)
        compiled.append(engine.backend._compiler.num_compiled)
    assert compiled == [1, 1, 2, 3]
    engine.run()


def test_stop_strings_still_end_a_text() -> None:
    """Before the constraint does."""
    text, last = outcome(regex="abcdef", stop=("de",))
    assert (text, last.finish_reason, last.stop) == ("abc", FinishReason.STOP, "de")


def test_choices_follow_copies_of_their_own() -> None:
    """Each of n choices is whole, with logprobs for each token."""
    engine = FakeEngine()
    channel = engine.submit("x", json_schema=PERSON, n=3, temperature=1, seed=5, logprobs=1, **ENDLESS)
    engine.run()
    texts = ["", "", ""]
    for chunk in channel:
        texts[chunk.choice] += chunk.text
        assert len(chunk.logprobs) == len(chunk.token_ids)
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_a_constrained_choice_is_the_same_alone_and_in_a_crowd() -> None:
    """Others do not change it, and it does not change them."""
    alone = outcome("a", json_schema=PERSON, **ENDLESS)[0]
    plain = outcome("b", max_tokens=30)[0]
    engine = FakeEngine()
    channels = [engine.submit("a", json_schema=PERSON, **ENDLESS), engine.submit("b", max_tokens=30)] * 1
    channels += [engine.submit(str(n), choice=("yes", "no")) for n in range(6)]
    engine.run()
    texts = ["".join(chunk.text for chunk in channel) for channel in channels]
    assert texts[:2] == [alone, plain]


def test_a_preempted_choice_goes_on_where_it_was() -> None:
    """Its constraint stays with the sequence while its cells are taken."""
    crowded = FakeEngine(backend=FakeBackend(num_cells=48, num_seq_ids=8), host_cache_bytes=0)
    options: dict[str, Any] = {"regex": "[a-f]{25}", **ENDLESS}
    alone = [outcome(prompt * 10, **options)[0] for prompt in "abc"]
    channels = [crowded.submit(prompt * 10, **options) for prompt in "abc"]
    crowded.run()
    assert ["".join(chunk.text for chunk in channel) for channel in channels] == alone


def test_a_resumed_sampler_goes_on_where_the_other_was() -> None:
    """As after a crash of the worker: the tokens alone bring it there."""
    backend = FakeBackend()
    params = SamplingParams(json_schema=PERSON, temperature=0, ignore_eos=True)
    (whole,) = backend.make_samplers(params, [])
    tokens, done = [], False
    while not done:
        one, done = whole.draw_constrained(len(tokens))
        assert one is not None
        tokens.append(one)
    (resumed,) = backend.make_samplers(params, [])
    backend.resume_sampler(resumed, tokens[:7], None)
    assert [resumed.draw_constrained(at)[0] for at in range(7, len(tokens))] == tokens[7:]


class Own:
    """A constraint of a user's own: an even number of bytes of the letter a, at most `most`."""

    def __init__(self, most: int = 4, fails_at: int | None = None) -> None:
        self.most, self.fails_at, self.count = most, fails_at, 0

    def fill_mask(self, words: Any) -> bool:
        words.fill(0)
        words[ord("a") >> 5] = np.uint32(1 << (ord("a") & 31))
        return True

    def accept(self, token_id: int) -> None:
        assert token_id == ord("a")
        self.count += 1
        if self.count == self.fails_at:
            raise ZeroDivisionError("of the user's own")

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self.count == self.most

    @property
    def may_end(self) -> bool:
        return self.count % 2 == 0

    def copy(self) -> Own:
        copied = Own(self.most, self.fails_at)
        copied.count = self.count
        return copied


def make_own(table: TokenTable) -> Own:
    assert table.eog_ids == {256}
    return Own(6)


@pytest.mark.parametrize(
    ("constraint", "text"), [(Own(), "aaaa"), (make_own, "a" * 6), (f"{__name__}:make_own", "a" * 6), (Own, None)]
)
def test_a_constraint_of_a_users_own(constraint: Any, text: str | None) -> None:
    """An object, a function or the name of one; an object serves many requests."""
    if text is None:
        with pytest.raises(TypeError):  # a class is called with the vocabulary, which this one cannot use
            outcome(constraint=Own, n="x")
        return
    for _ in range(2):
        found, last = outcome(constraint=constraint)
        assert (found, last.finish_reason) == (text, FinishReason.STOP)


def test_a_constraint_that_raises_fails_alone() -> None:
    """Its own choice ends with an error that names the exception; others go on."""
    engine = FakeEngine()
    failing, fine = engine.submit("a", constraint=Own(9, fails_at=3)), engine.submit("b", constraint=Own())
    engine.run()
    *_, last = failing
    assert last.finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError: of the user's own" in str(last.error)
    assert "".join(chunk.text for chunk in fine) == "aaaa"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"regex": "(a"}, GrammarError, "regex: .*unclosed group"),
        ({"regex": "(a)\\1"}, GrammarError, "regex: .*backreferences"),
        ({"lark": "start: nothing"}, GrammarError, 'lark: .*unknown name: "nothing"'),
        ({"lark": 'start: %json {"not": {}}'}, GrammarError, "json_schema: #/not"),
        ({"lark": "start: %json {"}, GrammarError, "the text after %json is not a JSON schema"),
        ({"json_schema": False}, GrammarError, "#: false allows no value"),
        ({"json_schema": {"properties": {"a/b": {"not": {}}}}}, GrammarError, "#/properties/a~1b/not"),
        (
            {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
            GrammarError,
            "no text satisfies",
        ),
        ({"json_schema": {"$ref": "http://example.com/a.json"}}, GrammarError, r"#/\$ref: .*not present"),
        ({"choice": ("a",) * 2, "regex": "a"}, InvalidParams, "regex and choice exclude"),
        ({"lark": "a", "constraint": Own()}, InvalidParams, "lark and constraint exclude"),
        ({"constraint": "nowhere"}, InvalidParams, "module:attr"),
        ({"constraint": 5}, InvalidType, "constraint must be"),
        ({"constraint": lambda _: object()}, InvalidType, "object has no fill_mask"),
        ({"thinking": {"start": "<t>"}}, InvalidParams, "thinking.ends"),
        ({"thinking": {"ends": ["</t>"]}}, InvalidParams, "thinking.start"),
        ({"thinking": {"ends": ["</t>"], "beginning": 1}}, InvalidType, "beginning"),
        ({"thinking": {"start": "<t>", "ends": ["</t>"], "budget": -1}}, InvalidParams, "thinking.budget"),
        ({"thinking": "yes"}, InvalidType, "thinking"),
    ],
)
def test_values_that_cannot_be_followed_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Before the request is queued, by its name and place; the engine goes on."""
    engine = FakeEngine()
    with pytest.raises(error, match=message):
        engine.submit("x", **options)
    assert outcome(engine=engine, choice=("yes",))[0] == "yes"


def test_thinking_is_free_and_counts_tokens() -> None:
    """At the budget the message and the end come, then tokens of the schema."""
    thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 5, "message": "!"}
    text, last = outcome(choice=("yes", "no"), thinking=thinking, **ENDLESS)
    thought, _, rest = text.partition("!</t>")
    assert len(thought.encode()) >= 5
    assert rest.strip() in ("yes", "no")
    assert last.finish_reason is FinishReason.STOP
