"""`paceline chat` as a user runs it, on the demo model: pipes, a terminal, its commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.e2e.commands import COMMAND, ESCAPE, TIMEOUT_S, Terminal, output, paceline_

pytestmark = pytest.mark.native

ASKED = "Hello! Who are you?"
CHAT = ("chat", "-t", "1", "--temperature", "0")


def test_a_pipe_gets_one_reply() -> None:
    """All of stdin is the message; content to stdout, numbers to stderr, no thinking, no escapes."""
    done = paceline_(*CHAT, stdin=f"{ASKED}\n".encode())
    text, numbers = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0
    assert text.startswith("I am paceline-demo") and text.endswith("\n")
    assert "tok/s | prompt " in numbers
    assert "<think>" not in text and ESCAPE not in text + numbers
    assert output(*CHAT, ASKED, "-q") == text == output(*CHAT, "-", stdin=ASKED.encode())


def test_bad_options_are_one_line_and_an_exit_code() -> None:
    """2 for wrong usage, 1 for a file that is no conversation."""
    for args, code, word in (
        (("--temperature", "-1"), 2, "temperature"),
        (("--chat-template", "{% if %}"), 1, "template"),
        (("--load", "none.json"), 1, "none.json"),
        (("--system", "a", "--load", "b"), 2, "--system and --load"),
        (("--reasoning-effort", "\udcff"), 2, "--reasoning-effort"),
    ):
        done = paceline_(*CHAT, *args, stdin=b"Hello!")
        assert done.returncode == code, done.stderr
        assert word in done.stderr.decode() and done.stderr.decode().count("\n") == 1


def test_a_pipe_follows_the_message(tmp_path: Path) -> None:
    """The question, a blank line, the text; so does the text of a file. An empty pipe adds nothing."""
    (tmp_path / "text").write_text("Who are you?\n")
    whole = output(*CHAT, "Hello!\n\nWho are you?", "-q")
    assert output(*CHAT, "Hello!", "-q", stdin=b"Who are you?\n") == whole
    assert output(*CHAT, "-p", "Hello!", "-f", str(tmp_path / "text"), "-q") == whole
    assert output(*CHAT, "Hello!", "-q") != whole


def test_replies_keep_to_constraints(tmp_path: Path) -> None:
    """Of a schema's file, an expression, texts to choose from and a grammar's file."""
    (tmp_path / "schema.json").write_text('{"enum": [17, 18]}')
    (tmp_path / "grammar.gbnf").write_text('root ::= "b" "c"')
    for args, replies in (
        (("-jf", str(tmp_path / "schema.json")), {"17", "18"}),
        (("--json-schema", '{"const": 5}'), {"5"}),
        (("--regex", "[ab]{3}"), {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}),
        (("--grammar-file", str(tmp_path / "grammar.gbnf")), {"bc"}),
    ):
        assert output(*CHAT, ASKED, "-q", *args).strip() in replies


TOOLS = '''
"""Tools."""
import sys
import time
from os.path import join


def weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: The city's English name.
    """
    {body}


def _hidden() -> str:
    """Not public."""


def undocumented() -> str:
    return ""
'''
WEATHER = "What is the weather in Paris?"


def tool_file(folder: Path, body: str = 'return "sunny, 20 degrees"') -> str:
    (folder / "tools.py").write_text(TOOLS.replace("{body}", body))
    return str(folder / "tools.py")


def test_tools_run_without_a_question_for_yes(tmp_path: Path) -> None:
    """The calls and their results go to stderr, the reply to stdout."""
    done = paceline_(*CHAT, WEATHER, "--tools", tool_file(tmp_path), "--yes", "-q")
    assert done.returncode == 0
    assert done.stdout.decode().startswith("It is sunny and 20 degrees in Paris")
    assert done.stderr.decode() == "calls weather(city='Paris')\nweather: sunny, 20 degrees\n"


def test_tools_that_cannot_be_used_are_wrong_usage(tmp_path: Path) -> None:
    """A file that does not run or has no tool; a question without a terminal."""
    for number, (text, words) in enumerate(
        (
            ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
            ("def", "SyntaxError"),
            ("def f():\n    pass", "no public function with a docstring"),
            ("async def f():\n    'Wait.'", "f is async"),
            ("def f(*args):\n    'Add.'", "*args"),
        )
    ):
        (tmp_path / f"{number}.py").write_text(text)
        done = paceline_(*CHAT, "Hello!", "--tools", str(tmp_path / f"{number}.py"), "-y")
        assert done.returncode == 2 and words in done.stderr.decode() and done.stderr.count(b"\n") == 1
    done = subprocess.run(
        [*COMMAND, *CHAT, "Hello!", "--tools", tool_file(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=TIMEOUT_S,
        start_new_session=True,
    )
    assert done.returncode == 2 and b"--yes runs calls unasked" in done.stderr
    assert paceline_(*CHAT, "Hello!", "--tools", str(tmp_path / "none.py"), "-y").returncode == 2


def test_a_question_comes_before_each_call(tmp_path: Path) -> None:
    """No is a result that the model reads, all asks no more; the reply follows in either case."""
    chat = Terminal(*CHAT, "-q", "--tools", tool_file(tmp_path))
    chat.read_until_seen("> $")
    for key, shown in (
        ("n", r"weather: Error: the user did not allow this call\n(.|\n)*\n> $"),
        ("y", r"all\nweather: sunny, 20 degrees\n(.|\n)*It is sunny and 20 degrees in Paris\.\n\n> $"),
        ("a", r"all\nweather: sunny, 20 degrees\n(.|\n)*It is sunny and 20 degrees in Paris\.\n\n> $"),
    ):
        chat.seen = b""
        chat.press("/clear\n")
        chat.read_until_seen("> $")
        chat.press(f"{WEATHER}\n")
        chat.read_until_seen(r"calls weather\(city='Paris'\)\nRun it\? y yes, n no, a yes to all\n")
        chat.press(f"x{key}")
        chat.read_until_seen(shown)
    chat.seen = b""
    chat.press(f"/clear\n{WEATHER}\n")
    chat.read_until_seen(r"It is sunny(.|\n)*> $")
    assert "Run it?" not in chat.plain_text
    chat.press("\x04")
    assert chat.finish() == 0


def test_ctrl_c_at_the_question_and_in_a_call_takes_the_turn_back(tmp_path: Path) -> None:
    """The chat goes on, with the terminal as it was."""
    chat = Terminal(*CHAT, "-q", "--tools", tool_file(tmp_path, 'print("begun", flush=True), time.sleep(60)'))
    mode = chat.mode()
    for key in ("", "y"):
        chat.seen = b""
        chat.press(f"{WEATHER}\n")
        chat.read_until_seen(r"yes to all\n")
        chat.press(key)
        if key:
            chat.read_until_seen("begun")
        chat.interrupt()
        chat.read_until_seen(r"interrupted\n(.|\n)*> $")
    assert "weather is not waited for any more" in chat.plain_text
    chat.seen = b""
    chat.press("/undo\n")
    chat.read_until_seen("there is nothing to take back")
    chat.press("/save none\n")
    chat.read_until_seen("there are no messages to save")
    chat.press("/exit\n")
    assert chat.finish() == 0 and chat.last_mode == mode


def test_a_tool_that_fails_or_exits_is_a_result(tmp_path: Path) -> None:
    """The model reads why, and the chat ends as it would."""
    for body, result in (("raise KeyError(city)", "Error: KeyError: 'Paris'"), ("sys.exit(3)", "SystemExit(3)")):
        done = paceline_(*CHAT, WEATHER, "--tools", tool_file(tmp_path, body), "-y", "-q")
        shown = done.stderr.decode()
        assert done.returncode == 0 and result in shown
        assert all(line.startswith(("calls weather(", "weather: ")) for line in shown.splitlines())


def test_commands_take_back_and_suggest_and_let_paths_be() -> None:
    """/undo, the nearest command, a path at the beginning of a message, and the hint at /clear."""
    chat = Terminal(*CHAT, "-q", "-n", "3", "-c", "256")
    chat.read_until_seen("> $")
    chat.press("/undo\n")
    chat.read_until_seen("there is nothing to take back")
    chat.press("/save none\n")
    chat.read_until_seen("there are no messages to save")
    chat.press("/usr/bin is a folder\n")
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("/undo\n")
    chat.read_until_seen("taken back: /usr/bin is a folder")
    chat.press("/retyr\n")
    chat.read_until_seen(r"no command /retyr; did you mean /retry\?")
    assert "full" not in chat.plain_text
    chat.press(f"{'many words ' * 105}\n")
    chat.read_until_seen(r"the context is \d\d% full; once(.|\n)*/clear\s+begins\s+anew\)\n")
    chat.press("/clear\n/undo\n/exit\n")
    assert chat.finish() == 0


def test_quotes_begin_and_end_a_message_of_several_lines() -> None:
    """Three of them, as in Ollama; a line between them is no command, and quotes around one line are left out."""
    chat = Terminal(*CHAT, "-q", "-n", "3")
    chat.read_until_seen("> $")
    chat.press('"""one\n')
    chat.read_until_seen(r"\.\.\. $")
    chat.press('/clear "two\n')
    chat.read_until_seen(r"\.\.\. $")
    chat.press('three"""\n')
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("/undo\n")
    chat.read_until_seen('taken back: one /clear "two three\n')
    chat.press('"""/bye"""\n')
    chat.read_until_seen(r"cut at the limit(.|\n)*cut at the limit\)\n\n> $")
    chat.press("/undo\n")
    chat.read_until_seen("taken back: /bye\n")
    chat.press("/bye\n")
    assert chat.finish() == 0


def test_parameters_change_within_a_chat() -> None:
    """/set changes the next turns and keeps the conversation; /show shows it; - takes it back."""
    chat = Terminal(*CHAT, "-q", "-n", "60")
    chat.read_until_seen("> $")
    chat.press(f"{ASKED}\n")
    chat.read_until_seen(r"I am paceline-demo[^>]*> $")
    for command, reply in (
        ("/set choice seventeen", r"choice is 'seventeen'\n> $"),
        ("How many?", r"How many\?\n[^>]*seventeen\n\n> $"),
        ("/show", r"model +paceline-demo\n(.|\n)*max_tokens +60\n +temperature +0\.0\n(.|\n)*choice +'seventeen'\n> $"),
        ("/set parameter max_tokens 2", r"max_tokens is 2\n> $"),
        ("/set choice -", r"choice is none\n> $"),
        ("How many?", r"\(cut at the limit\)\n\n> $"),
        ("/set max_tokens -", r"max_tokens is 60\n> $"),
        ("/set temprature 1", r"unknown option 'temprature'; did you mean 'temperature'\?"),
        ("/set num_ctx 1", r"unknown option 'num_ctx'; there are \d+, see docs/guide/sampling.md"),
        ("/set temperature -1", r"temperature must be (.|\n)*not -1\.0"),
        ("/set temperature", r"/set needs a name and a value"),
        ("/undo", r"taken back: How many\?\n> $"),
        ("/?", r"/show  +show the model"),
        ("/stats", r"3 replies with"),
    ):
        chat.press(f"{command}\n")
        chat.read_until_seen(reply)
    chat.press("/bye\n")
    assert chat.finish() == 0


def test_pasted_lines_are_one_message() -> None:
    """As terminals paste them: between two escape sequences."""
    chat = Terminal(*CHAT, "-q", "-n", "3")
    chat.read_until_seen("> $")
    chat.press("\x1b[200~one\ntwo\x1b[201~\n")
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("/undo\n")
    chat.read_until_seen("taken back: one two")
    chat.press("/exit\n")
    assert chat.finish() == 0


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_a_pipe_without_text_is_no_message(stdin: bytes) -> None:
    """The model is not asked to reply to an empty text."""
    done = paceline_(*CHAT, "-n", "3", stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b"") and b"MESSAGE is missing" in done.stderr


def test_the_tab_key_completes_commands_alone() -> None:
    """The slash stays as it is, and paths within a message are left alone."""
    chat = Terminal(*CHAT, "-q", "-n", "3")
    chat.read_until_seen("> $")
    chat.press("/un\t\n")
    chat.read_until_seen(r"there is nothing to take back\n(.|\n)*> $")
    chat.press("see un\t\n")
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("/undo\n")
    chat.read_until_seen("taken back: see un\n")
    chat.press("/exit\n")
    assert chat.finish() == 0


def test_a_chat_on_a_terminal(tmp_path: Path) -> None:
    """Turns, every command, an unknown one, and Ctrl-D at the end."""
    path = tmp_path / "talk.json"
    chat = Terminal(*CHAT, "-n", "40")
    chat.read_until_seen(r"Ctrl-D\s+ends\.\n.*> ")
    chat.press(f"{ASKED}\n")
    chat.read_until_seen(r"I am paceline-demo[^>]*> ")
    chat.press("/stats\n")
    chat.read_until_seen(r"first token after[^>]*1 reply with \d+ tokens in all\n.*> ")
    chat.press("/retry\n")
    chat.read_until_seen(r"/retry\r?\n[^>]*I am paceline-demo[^>]*> ")
    chat.press("/system You are brief.\n")
    chat.press("/system\n")
    chat.read_until_seen(r"/system\r?\n[^>]*You are brief\.\n")
    chat.press(f"/save {path}\n")
    chat.read_until_seen(r"saved 3 messages\s+to\s")
    chat.press(f"/clear\n/load {path}\n")
    chat.read_until_seen(r"loaded 3 messages\s+from\s")
    for command, reply in (
        ("/nothing", "there is no command /nothing"),
        ("/load none.json", r"Error: none.json: No such file or directory\n"),
        ("/save", "needs the name of a file"),
        ("/help", r"Ctrl-C stops a reply\.\n[^>]*> $"),  # Ctrl-D counts at the prompt alone
    ):
        chat.press(f"{command}\n")
        chat.read_until_seen(reply)
    chat.press("\x04")
    assert chat.finish() == 0
    assert [message["role"] for message in json.loads(path.read_text())["messages"]] == ["system", "user", "assistant"]


def test_a_full_context_leaves_old_messages_out_and_says_so() -> None:
    """The chat goes on; the note says how many, and how to begin anew."""
    story = "Please tell me a long story about a fox, an owl and the old king who lived in the wood. " * 2
    chat = Terminal(*CHAT, "-n", "40", "-c", "512")
    chat.read_until_seen(r"Ctrl-D\s+ends\.\n.*> ")
    for turn in range(1, 9):
        chat.press(f"{story}\n")
        chat.read_until_seen(rf"(?s)(?:\n> .*){{{turn}}}\n> $")
    left_out = r"old messages?\s+left\s+out:\s+the\s+context\s+of\s+512\s+tokens\s+is\s+full;\s+/clear"
    begun = re.search(left_out, chat.plain_text)
    assert begun and "% full" not in chat.plain_text[begun.end() :]
    chat.press("\x04")
    assert chat.finish() == 0


def test_a_reply_that_fills_the_context_says_so() -> None:
    """A limit on its length has another reason."""
    done = paceline_(*CHAT, "-c", "512", "--ignore-eos", "Tell me a story", stdin=b"")
    advice = "raise --ctx-size (at most 1024)"
    assert f"(reply cut off: the context of 512 tokens is full; {advice})" in done.stderr.decode()
    done = paceline_(*CHAT, "-c", "512", "-n", "5", "--ignore-eos", "Tell me a story", stdin=b"")
    assert "(cut at the limit)" in done.stderr.decode()
    for command in ("chat", "generate"):
        done = paceline_(command, "word " * 600, "-q", "-c", "512")
        assert done.returncode == 1 and re.search(
            r"\d+ tokens, and the context 512; shorten it, or", done.stderr.decode()
        )
        assert advice in done.stderr.decode()


def test_ctrl_c_stops_the_reply_and_not_the_program(long_model: Path) -> None:
    """The generated text is kept; at the prompt it drops the line; /exit ends."""
    chat = Terminal(*CHAT, "-m", str(long_model), "-c", "32768", "--plain")
    chat.read_until_seen(r"Ctrl-D\s+ends\.\n.*> ")
    chat.press("Tell me a story about a fox.\n")
    chat.read_until_seen("fox\\.\n(.|\n)*\\w\\w")
    chat.interrupt()
    chat.read_until_seen("interrupted\n> $")
    chat.press("half a line")
    chat.read_until_seen("> half a line$")
    chat.interrupt_until_seen("half a line\n+> $")
    chat.press("/stats\n")
    chat.read_until_seen("1 reply with")
    chat.press("/exit\n")
    assert chat.finish() == 0


def test_a_message_can_have_several_lines() -> None:
    """With a backslash at the end of a line; two slashes begin a message with one."""
    chat = Terminal(*CHAT, "-n", "5", "-q")
    chat.read_until_seen("> ")
    chat.press("One\\\n")
    chat.read_until_seen(r"\.\.\. $")
    chat.press("two\n")
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("//stats\n")
    chat.read_until_seen(r"cut at the limit(.|\n)*cut at the limit\)\n\n> $")
    chat.press("\x04")
    assert chat.finish() == 0
