"""Messages that are read while they are generated, in the formats of known models."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.native.chat_templates import CHATML, demo
from tests.native.test_chat_formats import ASKED, TOOLS
from tests.native.test_message_parser import TEXTS

from paceline.chat import (
    ChatFormat,
    ChatOptions,
    MessageDelta,
    MessageParser,
    MessageStream,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    is_thinking_open,
)
from paceline.errors import ChatParseError, Closed, InvalidParams, PacelineError, TemplateError

Prompt = Callable[..., RenderedPrompt]
CALL_AFTER_THINKING = (
    "<|channel|>analysis<|message|>Hmx<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Kx"}'
)
PROSE = 'Is 1 < 2, and <b>bold</b>? [x] {y} `<think` "q" Grüße.\n\n'


@pytest.fixture
def prompt_of(llama_cpp_source: Path) -> Prompt:
    """Return a function from a template's name to a prompt in it."""

    def make(name: str, **options: object) -> RenderedPrompt:
        source = (llama_cpp_source / "models" / "templates" / f"{name}.jinja").read_text()
        return ChatFormat(demo(), source).render(ASKED, options=ChatOptions(**{"tools": TOOLS, **options}))  # type: ignore[arg-type]

    return make


def joined(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """Return the message that a client makes of deltas."""
    content = reasoning = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning_content
        if (one := delta.tool_call) is not None:
            if one.index == len(calls):
                calls.append(ToolCall(one.name, one.arguments, one.id))
            else:
                last = calls[one.index]
                assert not one.name and not (one.id and last.id)
                calls[one.index] = ToolCall(last.name, last.arguments + one.arguments, last.id or one.id)
    return ParsedMessage(content, reasoning, tuple(calls))


def pieces(text: str, longest: int, seed: int) -> list[str]:
    """Cut a text anywhere."""
    draw = random.Random(seed)
    found = []
    while text:
        length = draw.randint(1, longest)
        found.append(text[:length])
        text = text[length:]
    return found


@pytest.mark.parametrize("longest", [1, 4, 30])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_streamed_is_what_is_parsed_at_the_end(prompt_of: Prompt, name: str, longest: int) -> None:
    """Wherever the text is cut: within tags, names, arguments and characters of JSON."""
    prompt = prompt_of(name)
    for seed in range(5):
        stream = MessageStream(prompt)
        deltas = [delta for piece in pieces(TEXTS[name], longest, seed) for delta in stream.feed(piece)]
        rest, whole = stream.finish()
        assert whole == MessageParser(prompt).parse(TEXTS[name]) == joined([*deltas, *rest])
        assert stream.warning is None


@pytest.mark.parametrize("longest", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen-Qwen3-0.6B", "<think>\nTry max</think>\n\nHello x.<tool_call>\n{call}\n</tool_call>"),
        ("Qwen-Qwen3-0.6B", "<think>\nbox</think>xx x\nx"),
        ("google-gemma-4-31B-it", "<|channel>thought\nFix<channel|>Hello there"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]Fix[/THINK]Hello there x"),
        ("deepseek-ai-DeepSeek-V3.2", "Fix</think>Hello there"),
        (
            "openai-gpt-oss-120b",
            "<|channel|>analysis<|message|>Fix<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        ),
        ("openai-gpt-oss-120b", CALL_AFTER_THINKING),
    ],
)
def test_letters_of_the_parsers_own_probe_change_nothing(prompt_of: Prompt, name: str, text: str, longest: int) -> None:
    """Thinking, content and arguments that end in x, without blanks before an end tag."""
    prompt = prompt_of(name)
    text = text.replace("{call}", '{"name": "weather", "arguments": {"city": "x"}}')
    for seed in range(5):
        stream = MessageStream(prompt)
        deltas = [delta for piece in pieces(text, longest, seed) for delta in stream.feed(piece)]
        rest, whole = stream.finish()
        assert stream.warning is None
        assert whole == MessageParser(prompt).parse(text) == joined([*deltas, *rest])


def test_wrong_pieces_are_refused_and_the_message_goes_on(prompt_of: Prompt) -> None:
    """A lone surrogate, no text, and text after the end."""
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    deltas = stream.feed("Hello")
    for wrong in ("\ud800", 5, None):
        with pytest.raises(InvalidParams, match="text"):
            stream.feed(wrong)  # type: ignore[arg-type]
    assert stream.feed("") == []
    deltas += stream.feed(" you.")
    rest, whole = stream.finish()
    assert joined([*deltas, *rest]) == whole == ParsedMessage("Hello you.")
    for again in (stream.finish, lambda: stream.feed("x")):
        with pytest.raises(Closed, match="has ended"):
            again()


def test_content_goes_through_as_it_comes(prompt_of: Prompt) -> None:
    """Also if it has characters of tags: no more than the beginning of a tag and blanks are held back."""
    for options in ({}, {"tools": None}):
        stream, received, text = MessageStream(prompt_of("Qwen-Qwen3-0.6B", **options)), "", PROSE * 20
        for end, piece in enumerate(text, 1):
            received += "".join(delta.content for delta in stream.feed(piece))
            assert end - len(received) <= 15
        rest, whole = stream.finish()
        assert received + "".join(delta.content for delta in rest) == whole.content
        assert whole.content.strip() == text.strip()


def test_thinking_goes_through_as_it_comes(prompt_of: Prompt) -> None:
    """Until its end, after which the content follows."""
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    text = f"<think>\n{PROSE.replace('`<think`', '') * 10}</think>\n\nIt rains."
    deltas = [delta for piece in text for delta in stream.feed(piece)]
    assert sum(bool(delta.reasoning_content) for delta in deltas) > 200
    rest, whole = stream.finish()
    assert joined([*deltas, *rest]) == whole
    assert (whole.content, whole.reasoning_content.count("Grüße")) == ("It rains.", 10)


def test_long_texts_are_parsed_in_proportion(prompt_of: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither long content nor long arguments are read again with every piece."""
    num_parsed = 0
    plain = MessageParser.parse

    def counted(self: MessageParser, text: str, *, is_partial: bool = False) -> ParsedMessage:
        nonlocal num_parsed
        num_parsed += len(text)
        return plain(self, text, is_partial=is_partial)

    monkeypatch.setattr(MessageParser, "parse", counted)
    arguments = "word " * 6000
    call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{arguments}"}}}}\n</tool_call>'
    for text, most in ((PROSE * 600, 2), (call, 80)):
        num_parsed = 0
        stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
        deltas = [delta for piece in pieces(text, 8, 1) for delta in stream.feed(piece)]
        rest, whole = stream.finish()
        assert joined([*deltas, *rest]) == whole
        assert num_parsed <= (most * len(text)) + 2**18
    assert len(whole.tool_calls[0].arguments) > 30_000


def test_text_that_is_not_of_the_format_is_the_content(prompt_of: Prompt) -> None:
    """Nothing that was generated is lost, and the reason is said."""
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    deltas = [delta for piece in text for delta in stream.feed(piece)]
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest]) == ParsedMessage(text)
    assert stream.warning is not None and "does not match the expected" in str(stream.warning)
    assert stream.text == text


def test_what_follows_before_a_text_goes_wrong_is_kept(prompt_of: Prompt) -> None:
    """Streamed parts stay, and the rest is content as generated; the whole message equals the streamed parts."""
    text = '<think>\nHm\n</think>\n\nSee <tool_call>\n{"name": "other", "arguments": {}}'
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    deltas = [delta for piece in text for delta in stream.feed(piece)]
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest])
    assert whole.reasoning_content.strip() == "Hm"
    assert whole.content.split() == text[text.index("See") :].split()
    assert stream.warning is not None


def test_a_call_that_the_parser_skips_is_the_content(prompt_of: Prompt) -> None:
    """One format reads a call without a name as nothing at all."""
    stream = MessageStream(prompt_of("Qwen3-Coder"))
    deltas = stream.feed("<tool_call>x</tool_call>")
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest]) == ParsedMessage("<tool_call>x</tool_call>")
    assert stream.warning is not None and "found no message" in str(stream.warning)


def test_a_format_without_thinking_and_tools_streams_everything() -> None:
    """From the first character, with blanks in their places."""
    text = "  a <think>b</think>\n <tool_call> "
    stream = MessageStream(ChatFormat(demo(), CHATML).render(ASKED))
    deltas = [delta for piece in text for delta in stream.feed(piece)]
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest]) == ParsedMessage(text)
    assert MessageStream(RenderedPrompt("")).finish() == ([], ParsedMessage())


def test_texts_of_markers_in_any_order_end_in_a_message(llama_cpp_source: Path) -> None:
    """In every format: no piece raises, and a text that is not of the format is lost nowhere."""
    draw = random.Random(5)
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        has_tools = chat.capabilities["supports_tools"] or chat.capabilities["supports_tool_calls"]
        prompt = chat.render(ASKED, options=ChatOptions(tools=TOOLS if has_tools else None))
        markers = [*prompt.preserved_tokens, *prompt.thinking_ends, *(trigger.value for trigger in prompt.triggers)]
        words = [
            *markers,
            prompt.thinking_start,
            "weather",
            '{"city": "Oslo"}',
            "</tool_call>",
            "\n",
            "Hello.",
            "<",
            "[",
        ]
        for seed in range(8):
            text = "".join(draw.choices(words, k=draw.randint(1, 8)))
            stream = MessageStream(prompt)
            deltas = [delta for piece in pieces(text, 5, seed) for delta in stream.feed(piece)]
            rest, whole = stream.finish()
            if stream.warning is None:
                assert whole == MessageParser(prompt).parse(text), path.stem
            else:
                assert whole == joined([*deltas, *rest]), path.stem
                assert "".join(text.split()).endswith("".join(whole.content.split())[-5:]), (path.stem, text, whole)


@pytest.mark.parametrize("begun", ["Once upon", "Once upon "])
@pytest.mark.parametrize("generated", ["", " a", " a time.\n\nThen"])
def test_what_the_prompt_has_of_a_message_is_no_part_of_it(llama_cpp_source: Path, begun: str, generated: str) -> None:
    """In every format that can continue one: neither of the deltas nor of the whole."""
    num_tried = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
        try:
            prompt = chat.render(talk, continue_final_message=True)
        except TemplateError:
            continue
        num_tried += 1
        stream = MessageStream(prompt)
        deltas = [delta for piece in generated for delta in stream.feed(piece)]
        rest, whole = stream.finish()
        assert joined([*deltas, *rest]) == whole, path.stem
        assert (whole.content, whole.reasoning_content) == (generated, ""), path.stem
    assert num_tried > 50


@pytest.mark.parametrize(
    ("pieces_of_text", "content"),
    [
        (["Let me look. <tool_call>", "\noops"], "Let me look. <tool_call>\noops"),
        (["Let me", " look.", "\n", "<tool_call>", "\n{oops", " no call"], "Let me look.\n<tool_call>\n{oops no call"),
        (["<think>\nhm", "</think>\n\nok", "<tool_call>", "\nbad"], "ok<tool_call>\nbad"),
        (["<think>\nhm</think>\n\nok<tool_call>", "\nbad"], "ok<tool_call>\nbad"),
    ],
)
def test_what_was_sent_is_not_sent_again_where_the_text_goes_wrong(
    prompt_of: Prompt, pieces_of_text: list[str], content: str
) -> None:
    """Whether the parser had read it or it went through."""
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    deltas = [delta for piece in pieces_of_text for delta in stream.feed(piece)]
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest])
    assert whole.content.strip() == content
    assert whole.reasoning_content.strip() in ("", "hm")
    assert stream.warning is not None


@pytest.mark.parametrize("name", ["Apriel-1.6-15b-Thinker-fixed", "poolside-Laguna-S-2.1"])
def test_what_was_read_of_a_prompt_is_not_taken_from_a_text_that_goes_wrong(prompt_of: Prompt, name: str) -> None:
    """Thinking in the content begins with the prompt's part of it, which is no part of the generated text."""
    text = "Let me look.<tool_calls>[oops<tool_call>oops"
    stream = MessageStream(prompt_of(name, reasoning_format="none"))
    deltas = [delta for piece in (text[:20], text[20:]) for delta in stream.feed(piece)]
    rest, whole = stream.finish()
    assert whole == joined([*deltas, *rest])
    assert whole.content.count("Let me look.") == 1
    assert whole.content.endswith("oops")


@pytest.mark.parametrize("text", ["<think>\n", '<tool_call>\n{"na', "\n", "<tool_c"])
def test_marks_that_are_cut_are_no_content(prompt_of: Prompt, text: str) -> None:
    """They are the beginning of a valid message, and no reason to warn."""
    for is_whole in (False, True):
        stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"), is_whole=is_whole)
        deltas = stream.feed(text)
        rest, whole = stream.finish(is_cut=True)
        assert (joined([*deltas, *rest]).content.strip(), whole.content.strip()) == ("", "")
        assert stream.warning is None
    wrong = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    wrong.feed("<tool_call>\nno call, and cut")
    assert wrong.finish(is_cut=True)[1].content == "<tool_call>\nno call, and cut"
    assert wrong.warning is not None


def test_half_a_call_at_the_end_is_content(prompt_of: Prompt) -> None:
    """With a warning: its arguments are no JSON. A cut call is the beginning of a call, and recognised as one."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kö'
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"), is_whole=True)
    stream.feed(text)
    assert stream.finish() == ([MessageDelta(text)], ParsedMessage(text))
    assert stream.warning is not None and "within the arguments" in str(stream.warning)
    cut = MessageStream(prompt_of("Qwen-Qwen3-0.6B"), is_whole=True)
    cut.feed(text)
    _, message = cut.finish(is_cut=True)
    assert (cut.warning, len(message.tool_calls), message.has_whole_calls) == (None, 1, False)
    streamed = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    deltas = [delta for piece in text for delta in streamed.feed(piece)]
    rest, message = streamed.finish()
    assert joined([*deltas, *rest]) == message
    assert (message.content, message.has_whole_calls) == (text, False)


def test_a_call_that_the_parser_loses_is_content(prompt_of: Prompt) -> None:
    """One format drops a call with a wrong end, and says nothing."""
    text = "Wait.\n<tool_call>\n<function=weather>\n<parameter=city>\nKoeln\n</parameter>\n</tool_call>"
    whole = MessageStream(prompt_of("Qwen3-Coder"), is_whole=True)
    whole.feed(text)
    assert whole.finish()[1] == ParsedMessage(text)
    streamed = MessageStream(prompt_of("Qwen3-Coder"))
    deltas = [delta for piece in text for delta in streamed.feed(piece)]
    rest, message = streamed.finish()
    assert joined([*deltas, *rest]) == message
    assert (message.content.split(), message.has_whole_calls) == (text.split(), False)
    assert whole.warning is not None and streamed.warning is not None


def test_long_blanks_take_time_in_proportion(prompt_of: Prompt) -> None:
    """They are held back until text follows, and not looked through again with every piece."""
    stream = MessageStream(prompt_of("Qwen-Qwen3-0.6B"))
    blanks = "\n \t" * 20_000
    assert joined(stream.feed("Hm")).content == "Hm"
    started = time.perf_counter()
    for at in range(0, len(blanks), 3):
        assert stream.feed(blanks[at : at + 3]) == []
        assert len(stream._held) < 512
    assert time.perf_counter() - started < 60
    deltas = stream.feed("x")
    rest, whole = stream.finish()
    assert "Hm" + joined([*deltas, *rest]).content == whole.content == f"Hm{blanks}x"


NUM_READABLE = 45


def spelt(chat: ChatFormat, prompt: RenderedPrompt) -> str | None:
    """Return a call in the template's spelling in the conversation; None if its parser does not read it so."""
    made = {"name": "weather", "arguments": '{"city": "Köln"}'}
    calls = [{"id": "123456789", "type": "function", "function": made}]
    talk = [*ASKED, {"role": "assistant", "content": "Wait.", "tool_calls": calls}]
    try:
        whole = chat.render(talk, options=ChatOptions(tools=TOOLS), add_generation_prompt=False).text
    except PacelineError:
        return None
    begun = next(
        (n for n, (item, other) in enumerate(zip(prompt.text, whole, strict=False)) if item != other), len(prompt.text)
    )
    text = (f"Hm.{prompt.thinking_ends[0]}" if is_thinking_open(prompt) else "") + whole[begun:]
    parser = MessageParser(prompt)
    for end in range(len(text), max(0, len(text) - 40), -1):
        with suppress(ChatParseError):
            message = parser.parse(text[:end])
            if len(message.tool_calls) == 1 and message.has_whole_calls:
                return text[:end]
    return None


def test_calls_of_every_format_are_read_wherever_they_are_cut(llama_cpp_source: Path) -> None:
    """The streamed parts are the whole; a cut text has no mark of a call in the content, and is no reason to warn."""
    num_read = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        if not (chat.capabilities["supports_tools"] or chat.capabilities["supports_tool_calls"]):
            continue
        prompt = chat.render(ASKED, options=ChatOptions(tools=TOOLS))
        text = spelt(chat, prompt)
        num_read += text is not None
        for end in range(1, len(text or "") + 1, 1 if path.stem in TEXTS else 7):
            cut = (text or "")[:end]
            stream, at_once = MessageStream(prompt), MessageStream(prompt, is_whole=True)
            deltas = [delta for piece in pieces(cut, 9, end) for delta in stream.feed(piece)]
            at_once.feed(cut)
            rest, message = stream.finish(is_cut=True)
            assert message == joined([*deltas, *rest]) == at_once.finish(is_cut=True)[1], (path.stem, cut)
            assert stream.warning is None and at_once.warning is None, (path.stem, cut)
    assert num_read >= NUM_READABLE
