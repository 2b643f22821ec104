"""Chat templates: their renderings, compared with Jinja itself, and their limits."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
from tests.native.chat_templates import CHATML, HEADERS, SYSTEM, TALK, TEMPLATES, TURNS, Messages, demo, text_of

from paceline.chat import ChatFormat, RenderedPrompt, next_turn
from paceline.demo import demo_model_path
from paceline.errors import InvalidParams, TemplateError, Unsupported
from paceline.runtime import Model
from paceline.runtime.model import RemoteModel

TinyModels = Callable[..., Path]


@pytest.fixture(scope="module")
def with_bos(tiny_models: TinyModels) -> Model:
    """Return a vocabulary that puts <|bos|> in front of a text and has ChatML's control tokens."""
    return Model.load(tiny_models("llama"), vocab_only=True)


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks generated text for training and renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def compiled(source: str) -> jinja2.Template:
    """Return a template as the transformers library compiles it."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda spelling: f"{dt.datetime.now():{spelling}}"  # noqa: DTZ005
    return environment.from_string(source)


def by_jinja(chat: ChatFormat, messages: Messages, *, generate: bool, **variables: Any) -> str:
    """Return the same text as the transformers library would make it."""
    values = {"bos_token": chat.bos, "eos_token": chat.eos, "add_generation_prompt": generate, **variables}
    return compiled(chat.source).render(messages=messages, **values)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_jinja_does(name: str, generate: bool) -> None:
    """Five kinds of template and the demo model's own, with and without a generation prompt."""
    chat = ChatFormat(demo(), TEMPLATES[name])
    for messages in (TALK, TALK[:1], SYSTEM + TALK):
        if name == "turns" and messages[0]["role"] == "system":
            continue
        rendered = chat.render(messages, add_generation_prompt=generate, kwargs={"date_string": "1 May 2026"})
        wanted = by_jinja(chat, messages, generate=generate, date_string="1 May 2026", enable_thinking=True)
        assert rendered.text == wanted


def test_the_templates_of_known_models_render_as_jinja_does(llama_cpp_source: Path) -> None:
    """Seventy templates that llama.cpp comes with, each with an earlier message that contains reasoning."""
    paths = sorted((llama_cpp_source / "models" / "templates").glob("*.jinja"))
    assert len(paths) > 60
    for path in paths:
        chat = ChatFormat(demo(), path.read_text())
        for talk in (TALK, TALK[:1], SYSTEM + TALK):
            if talk[0]["role"] == "system" and not chat.capabilities["supports_system_role"]:
                continue
            is_stripped = "StepFun" in path.name  # its contents lose white space around them
            messages = [{**item, "content": item["content"].strip()} for item in talk] if is_stripped else talk
            variables = {"date_string": "1 May 2026", "datetime": "May 1 2026", "functions": "none"}
            while True:
                day = dt.datetime.now().date()  # noqa: DTZ005 - some templates tell it
                rendered = chat.render(messages, kwargs=variables)
                wanted = by_jinja(chat, messages, generate=True, enable_thinking=True, **variables)
                if day == dt.datetime.now().date():  # noqa: DTZ005
                    break
            assert rendered.text == wanted, path.name


def test_ends_that_models_spell_out_are_stops() -> None:
    """Two families of models write the end of a turn as text at times."""
    assert ChatFormat(demo(), "{# laguna_glm_thinking #}{{ 1 }}").render(TALK).stops == ("</assistant>",)
    assert ChatFormat(demo(), "<role>ASSISTANT</role><arg_key>{{ 1 }}").render(TALK).stops == ("<|role_end|>",)
    assert ChatFormat(demo()).render(TALK).stops == ()


def test_a_system_message_that_a_template_refuses_goes_into_the_next_message() -> None:
    """No word of it is lost."""
    chat = ChatFormat(demo(), TURNS)
    merged = [{"role": "user", "content": SYSTEM[0]["content"] + "\n" + TALK[0]["content"]}, *TALK[1:]]
    assert not chat.capabilities["supports_system_role"]
    assert chat.render(SYSTEM + TALK).text == by_jinja(chat, merged, generate=True)
    with pytest.raises(TemplateError, match="has no system messages, and there is no other message"):
        chat.render(SYSTEM)


def test_a_developer_is_the_system_to_most_templates() -> None:
    """OpenAI's newer name for it becomes the name that templates know."""
    chat = ChatFormat(demo(), CHATML)
    assert chat.render([{"role": "developer", "content": "x"}]).text.startswith("<|im_start|>system\nx")
    other = ChatFormat(demo(), CHATML + "{# <|channel|> #}")
    assert other.render([{"role": "developer", "content": "x"}]).text.startswith("<|im_start|>developer\nx")


def test_parts_of_a_content_are_joined_where_a_template_wants_texts() -> None:
    """A line break stands between them, as with llama-server."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (
        ChatFormat(demo(), CHATML)
        .render([{"role": "user", "content": parts}])
        .text.startswith("<|im_start|>user\none\ntwo<|im_end|>")
    )


def test_templates_that_want_parts_get_them() -> None:
    """A text becomes a list of one part, a list stays one."""
    template = "{% for m in messages %}{% for p in m.content %}<{{ p['text'] }}>{% endfor %}{% endfor %}"
    chat = ChatFormat(demo(), template)
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert chat.render([{"role": "user", "content": "a"}, {"role": "user", "content": parts}]).text == "<a><b><c>"


def test_an_assistant_message_can_be_continued() -> None:
    """The prompt ends with the last message, and the model goes on from its end."""
    chat = ChatFormat(demo(), HEADERS)
    talk = [*TALK[:1], {"role": "assistant", "content": "About 384"}]
    rendered = chat.render(talk, continue_final_message=True)
    assert rendered.text == chat.render(TALK[:1]).text + "About 384"
    assert rendered.text[slice(*rendered.inputs[-1])] == "About 384"
    parts = [{"type": "text", "text": "About 384"}]
    assert chat.render([*TALK[:1], {"role": "assistant", "content": parts}], continue_final_message=True) == rendered
    for last in ({"role": "user", "content": "x"}, {"role": "assistant", "content": " "}):
        with pytest.raises(InvalidParams, match="continue_final_message needs a last message of the role assistant"):
            chat.render([*TALK[:1], last], continue_final_message=True)
    plain = ChatFormat(demo(), "{{ messages[0].content }}|").render(talk, continue_final_message=True)
    assert (plain.text, plain.inputs) == (f"{TALK[0]['content']}|About 384", ((0, 23), (24, 33)))


def test_bos_is_left_to_the_vocabulary_that_adds_it(with_bos: Model) -> None:
    """A prompt begins with one bos, whether template, vocabulary or both want it."""
    bos = with_bos.tokenizer.bos
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        chat = ChatFormat(with_bos, template)
        rendered = chat.render([{"role": "user", "content": "hello"}])
        assert (chat.bos, rendered.text) == ("<|bos|>", "hello")
        assert chat.encode(rendered) == [bos, *with_bos.tokenizer.encode("hello", add_special=False)]
    kept = ChatFormat(demo(), "{{ bos_token }}{{ messages[0].content }}")
    assert not demo().tokenizer.add_bos
    assert kept.encode(kept.render([{"role": "user", "content": "x"}]))[0] == demo().tokenizer.bos


def test_a_turn_renders_as_its_messages_do() -> None:
    """`next_turn` decides how the prompt ends, and `render_turn` leaves its messages as they are."""
    chat = ChatFormat(demo(), HEADERS)
    talk = [*TALK[:1], {"role": "assistant", "content": [{"type": "text", "text": "About 384"}]}]
    turn = next_turn(talk, prefills=True)
    assert chat.render_turn(turn) == chat.render(talk, continue_final_message=True)
    assert turn == next_turn(talk, prefills=True)
    assert chat.render_turn(next_turn(TALK, generates=False)) == chat.render(TALK, add_generation_prompt=False)


def test_variables_reach_the_template() -> None:
    """Whatever JSON knows, by name."""
    kwargs = {"a": 1, "b": 2.5, "c": True, "d": None, "e": [1, "x"], "f": {"g": "h"}, "ü": "ö", "big": 2**63 - 1}
    template = "{{ a + 1 }} {{ b }} {{ c }} {{ d is none }} {{ e[1] }} {{ f.g }} {{ e|length }} {{ big }}"
    assert text_of(template, **kwargs) == "2 2.5 True True x h 2 9223372036854775807"
    assert text_of("{{ 'on' if enable_thinking else 'off' }}") == "on"
    assert text_of("{{ 'on' if enable_thinking else 'off' }}", enable_thinking=False) == "off"


def test_templates_know_the_day() -> None:
    """Templates have strftime_now and, as with llama-server, date_string."""
    before = dt.datetime.now()  # noqa: DTZ005 - local time is meant
    rendered = text_of("{{ strftime_now('%Y-%m-%d') }} {{ date_string }}")
    after = dt.datetime.now()  # noqa: DTZ005
    assert rendered in {f"{day:%Y-%m-%d} {day:%d %b %Y}" for day in (before, after)}


def test_a_model_without_a_template_raises(vocabulary: Model) -> None:
    """Nothing is made up for it, and the way out is named."""
    with pytest.raises(Unsupported, match=r"has no chat template; give one as chat_template="):
        ChatFormat(vocabulary)
    assert ChatFormat(vocabulary, "chatml").render(TALK[:1]).text == (
        "<|im_start|>user\n  How far is the moon?\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_remote_model_has_its_chat_template_here() -> None:
    """The front of a server knows only the vocabulary."""
    model = RemoteModel.load(demo_model_path(), vocab_only=True)
    assert ChatFormat(model).render(TALK) == ChatFormat(demo()).render(TALK)
    assert ChatFormat(model).source == demo().chat_template()


def test_a_format_outlives_its_model() -> None:
    """It keeps its own objects."""
    model = Model.load(demo_model_path(), vocab_only=True)
    chat = ChatFormat(model, CHATML)
    model.close()
    assert len(chat.encode(chat.render(TALK))) > 20


def test_two_hundred_threads_render_at_once() -> None:
    """One format serves all threads, each with messages and variables of its own, and refusals on the way."""
    chat = ChatFormat(
        demo(),
        "{% macro say(x) %}<{{ x }}>{% endmacro %}" + HEADERS + "{{ say(who) }}{{ strftime_now('') if who == 13 }}",
    )
    barrier = threading.Barrier(200)

    def render(number: int) -> RenderedPrompt | str:
        barrier.wait()
        try:
            return chat.render([{"role": "user", "content": f"I am {number}"}], kwargs={"who": number})
        except TemplateError as error:
            return str(error)

    with ThreadPoolExecutor(200) as pool:
        rendered = list(pool.map(render, range(200)))
    assert isinstance(rendered[13], str) and "strftime_now" in rendered[13]
    for number, prompt in enumerate(rendered):
        if number != 13:
            assert isinstance(prompt, RenderedPrompt)
            assert f"I am {number}<|eot_id|>" in prompt.text and prompt.text.endswith(f"<{number}>")


def test_other_threads_run_while_a_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GIL is given away: a thread that counts gets on during long renderings, not only between them."""
    interval = sys.getswitchinterval()
    chat = ChatFormat(demo(), "{% for i in range(20000) %}{{ i }}{% endfor %}")
    ended = threading.Event()
    counted = 0

    def render() -> None:
        try:
            for _ in range(2):
                chat.render(TALK)
        finally:
            ended.set()

    sys.setswitchinterval(1000)  # a thread that holds the GIL is not asked for it
    try:
        thread = threading.Thread(target=render)
        thread.start()
        while not ended.wait(0.0001):
            counted += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counted > 2


def test_texts_that_are_cut_within_a_character_become_text_again() -> None:
    """llama.cpp cuts by bytes; the rest of a character is shown as U+FFFD."""
    assert text_of("{{ messages[0].content[:1] }}", "é") == "\ufffd"


def test_line_ends_of_windows_are_line_breaks() -> None:
    """They are line breaks as in Jinja, in linear time."""
    assert text_of("{{ 'a' }}\r\nb\rc" + "\r\n" * 200_000 + "d") == "a\nb\nc" + "\n" * 200_000 + "d"
