"""Chats on the built page: writing, streaming, stopping, branching and storing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browser.chat_page import ChatPage, conversation_file, wait_count, wait_holds
from tests.e2e.served import Served

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]

STORY = "Tell me a story about a fox."


def test_reply_is_streamed_and_kept_with_its_costs(served: Served, open_page: Open) -> None:
    """A message is answered word by word; the conversation has its title, and the reply its costs and folded thinking."""
    chat = open_page(served.url)
    chat.send(STORY)
    begun = chat.wait_text(10)
    chat.wait_done()
    whole = chat.text()
    assert whole.startswith(begun[:10])
    assert len(whole) > 100
    reply = chat.replies.first
    wait_holds(reply, "tokens/s")
    thinking = reply.locator("details.thinking")
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    thinking.locator(".markdown").wait_for()
    assert chat.listed.all_inner_texts() == [STORY]
    assert chat.page.get_by_role("heading", level=1).inner_text() == STORY


def test_stop_frees_the_slot_and_keeps_the_text(endless: Served, open_page: Open) -> None:
    """Stopping in the middle ends the request on the server; the text stays, and the chat goes on from it."""
    chat = open_page(endless.url)
    chat.send("Write.")
    begun = chat.wait_stored(200)
    chat.page.get_by_role("button", name="Stop the reply").click()
    chat.wait_state("stopped")
    endless.assert_idle()
    assert chat.stored().startswith(begun)
    chat.set_parameters(Max_tokens="5")
    chat.send("And now?")
    chat.wait_done()
    wait_count(chat.replies, 2)


def test_escape_stops(endless: Served, open_page: Open) -> None:
    """Escape in the composer ends the reply."""
    chat = open_page(endless.url)
    chat.send("Write.")
    chat.wait_text(50)
    chat.composer.press("Escape")
    chat.wait_state("stopped")
    endless.assert_idle()


def test_regenerated_reply_is_a_branch_with_cached_tokens(served: Served, open_page: Open) -> None:
    """Another reply stands beside the first one, and its prompt was cached; either can be shown."""
    chat = open_page(served.url)
    chat.send("Tell me a story about an owl and a drum.")
    chat.wait_done()
    first = chat.text()
    chat.replies.last.get_by_role("button", name="Regenerate").click()
    chat.page.get_by_role("group", name="Branch 2 of 2").wait_for(timeout=100_000)
    chat.wait_done()
    wait_count(chat.replies, 1)
    wait_holds(chat.replies.last, re.compile(r"\d cached"))
    second = chat.text()
    chat.page.get_by_role("button", name="Branch before").click()
    chat.page.get_by_role("group", name="Branch 1 of 2").wait_for()
    assert chat.text() == first
    chat.page.get_by_role("button", name="Next branch").click()
    assert chat.text() == second


def test_edited_message_is_a_branch(served: Served, open_page: Open) -> None:
    """A message that is edited gets a reply of its own; the old one with its reply is a step away."""
    chat = open_page(served.url)
    chat.send(STORY)
    chat.wait_done()
    first = chat.text()
    chat.messages.first.hover()
    chat.messages.first.get_by_role("button", name="Edit").click()
    editor = chat.messages.first.get_by_role("textbox", name="Message")
    editor.fill("Tell me a story about a bear.")
    editor.press("Enter")
    chat.page.get_by_role("group", name="Branch 2 of 2").wait_for()
    chat.wait_done()
    wait_holds(chat.messages.first, "bear")
    assert chat.text() != first
    chat.page.get_by_role("button", name="Branch before").click()
    assert chat.text() == first


def test_reply_is_continued_after_its_limit_and_after_a_stop(endless: Served, open_page: Open) -> None:
    """The model goes on in the same reply, from its last character."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="5")
    chat.send("Write.")
    chat.wait_done()
    wait_holds(chat.replies.first, "5 tokens")
    begun = chat.stored()
    chat.page.get_by_role("button", name="Continue").click()
    wait_holds(chat.replies.first, "10 tokens")
    assert chat.stored().startswith(begun)
    wait_count(chat.page.locator(".branches"), 0)
    chat.set_parameters(Max_tokens="")
    chat.page.get_by_role("button", name="Continue").click()
    begun = chat.wait_stored(len(chat.stored()) + 50)
    chat.page.get_by_role("button", name="Stop the reply").click()
    chat.wait_state("stopped")
    chat.set_parameters(Max_tokens="3")
    chat.page.get_by_role("button", name="Continue").click()
    chat.wait_done()
    assert chat.stored().startswith(begun)
    endless.assert_idle()


def test_reply_is_rewritten_and_continued(endless: Served, open_page: Open) -> None:
    """The text of a person stands beside the reply, and the model continues it."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="5")
    chat.send("Write.")
    chat.wait_done()
    chat.replies.first.get_by_role("button", name="Edit").click()
    editor = chat.replies.first.get_by_role("textbox", name="Reply")
    editor.fill("Roses are")
    editor.press("Enter")
    assert editor.input_value() == "Roses are\n"
    editor.fill("Roses are")
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.replies.first.get_by_role("button", name="Save and continue").click()
    assert sent.value.post_data_json["messages"][-1] == {"role": "assistant", "content": "Roses are"}
    chat.page.get_by_role("group", name="Branch 2 of 2").wait_for()
    chat.wait_done()
    assert chat.stored().startswith("Roses are")
    wait_holds(chat.replies.first, "You wrote the beginning of this text.")


def test_samples_are_written_at_once_with_other_settings(endless: Served, open_page: Open) -> None:
    """Each sample is a branch with its own temperature; Escape stops all of them."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="5")
    chat.send("Write.")
    chat.wait_done()
    chat.set_parameters(Max_tokens="")
    chat.replies.first.get_by_role("button", name="Retry with other settings").click()
    form = chat.page.get_by_role("form", name="Retry with other settings")
    form.get_by_label("Samples").select_option("3")
    form.get_by_label("Temperature").fill("1.5")
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        form.get_by_role("button", name="Write 3 replies").click()
    assert sent.value.post_data_json["temperature"] == 1.5
    chat.wait_text(20)
    chat.page.keyboard.press("Escape")
    for number in (4, 3, 2):
        chat.page.get_by_role("group", name=f"Branch {number} of 4").wait_for()
        chat.wait_state("stopped")
        chat.page.get_by_role("button", name="Branch before").click()
    chat.wait_done()
    endless.assert_idle()


def test_fork_is_a_conversation_of_its_own(served: Served, open_page: Open) -> None:
    """A fork has the messages up to there, and goes on without the conversation that it comes from; its prefix is cached."""
    chat = open_page(served.url)
    chat.send(STORY)
    chat.wait_done()
    origin, story = chat.conversation(), chat.text()
    chat.replies.last.get_by_role("button", name="Fork").click()
    chat.page.wait_for_url(lambda url: not url.endswith(origin))
    assert chat.text() == story
    chat.send("Where did they live?")
    chat.wait_done()
    wait_count(chat.replies, 2)
    wait_holds(chat.replies.last, re.compile(r"\d cached"))
    chat.listed.nth(1).get_by_role("link").click()
    chat.page.wait_for_url(lambda url: url.endswith(origin))
    wait_count(chat.replies, 1)
    assert chat.text() == story
    wait_count(chat.listed, 2)


def test_reload_in_the_middle_goes_on_without_a_gap(endless: Served, open_page: Open) -> None:
    """A page that is loaded again in the middle of a stream shows the earlier text, and reads the same stream on."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="3000")
    chat.send("Write.")
    begun = chat.wait_stored(300)
    chat.page.reload()
    chat.wait_done()
    assert endless.metrics()["paceline_requests_resident"] == 0
    chat.page.wait_for_timeout(200)
    assert chat.stored().startswith(begun)
    wait_holds(chat.replies.last, "3,000 tokens")
    wait_count(chat.replies.last.get_by_role("note"), 0)


def test_several_chats_stream_at_once(endless: Served, open_page: Open) -> None:
    """Two conversations are generated at the same time; the list shows which, and both are complete at the end."""
    chat = open_page(endless.url)
    for word in ("One.", "Two."):
        chat.page.get_by_role("link", name="New conversation").click()
        chat.set_parameters(Max_tokens="9000")
        chat.send(word)
        chat.wait_text(20)
    pulses = chat.page.get_by_label("A reply is being generated")
    wait_count(pulses, 2)
    for word in ("One.", "Two."):
        chat.page.get_by_role("link", name=word).click()
        # the conversation that was open is shown some frames longer, and may be done
        wait_holds(chat.messages.last, word)
        chat.wait_done()
        wait_holds(chat.replies.last, "9,000 tokens")
    wait_count(pulses, 0)


def test_structured_output_conforms_to_its_schema(served: Served, open_page: Open) -> None:
    """With a JSON schema the reply is JSON, shown as code; a schema that is no JSON is not taken, and said."""
    chat = open_page(served.url)
    schema = {"type": "object", "properties": {"animal": {"enum": ["fox", "bear"]}}, "required": ["animal"]}
    panel = chat.settings()
    panel.get_by_label("JSON schema").fill('{"type": ')
    assert "no JSON" in panel.get_by_role("alert").inner_text()
    panel.get_by_label("JSON schema").fill(json.dumps(schema))
    wait_count(panel.get_by_role("alert"), 0)
    # sampled, one reply in ten thinks until the context is full and has no JSON
    panel.get_by_label("Temperature", exact=True).fill("0")
    chat.page.get_by_role("button", name="Close the settings").click()
    chat.send("Which animal?")
    chat.wait_done()
    code = chat.replies.last.locator("pre").text_content()
    assert json.loads(code or "")["animal"] in ("fox", "bear")


def test_called_tool_is_shown_and_its_result_sent_back(served: Served, open_page: Open) -> None:
    """Calls of the model are shown with their arguments; the result that a person gives goes back to the model."""
    chat = open_page(served.url)
    place = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    weather = {"name": "weather", "description": "The weather of a place.", "parameters": place}
    panel = chat.settings()
    panel.get_by_label("Tools", exact=True).fill(json.dumps([{"type": "function", "function": weather}]))
    chat.page.get_by_role("button", name="Close the settings").click()
    chat.send("What is the weather in the village?")
    chat.wait_done()
    call = chat.replies.last.locator(".tool-call")
    wait_holds(call, "weather")
    call.get_by_label("Result of weather").fill("rain, 12 degrees")
    chat.page.get_by_role("button", name="Send the result").click()
    chat.page.get_by_role("article", name="Result of weather").wait_for()
    chat.wait_done(1)
    wait_count(chat.replies, 2)


def test_parameters_have_the_servers_defaults_and_refuse_what_is_invalid(served: Served, open_page: Open) -> None:
    """Fields show the server's defaults, the error of a wrong value, and send valid values."""
    chat = open_page(served.url)
    panel = chat.settings()
    field = panel.get_by_label("Temperature", exact=True)
    assert float(field.get_attribute("placeholder") or "") == 1.0
    described = field.get_attribute("aria-describedby") or ""
    assert len(chat.page.locator(f"[id='{described}']").inner_text()) > 10
    field.fill("3")
    assert "The most is 2" in panel.get_by_role("alert").inner_text()
    field.fill("0")
    panel.get_by_label("Max tokens", exact=True).fill("4")
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.page.get_by_role("button", name="Close the settings").click()
        chat.send(STORY)
    body = sent.value.post_data_json
    assert (body["temperature"], body["max_tokens"]) == (0, 4)
    chat.wait_done()
    wait_holds(chat.replies.last, "limit of tokens")


def test_refused_request_is_said_in_the_servers_words(served: Served, open_page: Open) -> None:
    """A refusal of the server is shown with its reason, and can be tried again with other parameters."""
    chat = open_page(served.url)
    chat.set_parameters(Grammar="root ::= (")
    chat.send(STORY)
    chat.wait_state("failed")
    wait_holds(chat.replies.last.get_by_role("alert"), "grammar")
    chat.set_parameters(Grammar="", Max_tokens="5")
    chat.replies.last.get_by_role("button", name="Try again").click()
    chat.wait_done()
    wait_count(chat.page.locator(".branches"), 0)


def test_export_and_import_give_the_same_conversation(served: Served, open_page: Open, tmp_path: Path) -> None:
    """The export of a browser can be imported by another, in addition to its conversations; a foreign file changes nothing."""
    chat = open_page(served.url)
    chat.send(STORY)
    chat.wait_done()
    story = chat.text()
    with chat.page.expect_download() as saved:
        chat.page.get_by_role("button", name="Export all conversations").click()
    path = tmp_path / "conversations.json"
    saved.value.save_as(path)
    other = open_page(served.url)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    other.import_file(broken)
    assert "Nothing was imported" in other.page.locator(".toast").inner_text()
    other.import_file(path)
    other.listed.first.get_by_role("link").click()
    other.wait_done()
    assert other.text() == story


def test_deleted_conversation_is_gone_for_good(served: Served, open_page: Open, tmp_path: Path) -> None:
    """It is gone at once, also after the page is loaded again."""
    chat = open_page(served.url)
    chat.import_file(conversation_file(tmp_path / "c.json", ["a", "b"]))
    chat.listed.first.hover()
    chat.page.get_by_role("button", name="Delete Imported").click()
    chat.page.get_by_text("Conversations stay in this browser.").wait_for()
    chat.page.reload()
    chat.page.get_by_text("Conversations stay in this browser.").wait_for()
    assert chat.listed.count() == 0
    assert chat.saved_messages() == []


def test_conversation_that_is_deleted_while_its_reply_grows_leaves_nothing(endless: Served, open_page: Open) -> None:
    """Its request ends, and no later part of the reply is saved."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="30000")
    chat.send("Write.")
    chat.wait_stored(50)
    chat.listed.first.hover()
    chat.page.get_by_role("button", name="Delete Write.").click()
    endless.assert_idle()
    chat.page.wait_for_timeout(1000)
    assert chat.saved_messages() == []


def test_imported_parameters_that_the_model_does_not_have_are_shown(
    served: Served, open_page: Open, tmp_path: Path
) -> None:
    """They are sent, so they are seen, and can be taken out."""
    path = conversation_file(tmp_path / "c.json", ["a", "b"])
    content = json.loads(path.read_text())
    content["conversations"][0]["conversation"]["parameters"] = {"strange_one": 5, "temperature": 0.5}
    path.write_text(json.dumps(content))
    chat = open_page(served.url)
    chat.import_file(path)
    chat.listed.first.get_by_role("link").click()
    panel = chat.settings()
    assert "strange_one: 5" in panel.inner_text()
    assert panel.get_by_label("Temperature", exact=True).input_value() == "0.5"
    panel.get_by_role("button", name="Remove strange_one").click()
    wait_count(panel.get_by_text("strange_one"), 0)
    assert panel.get_by_label("Temperature", exact=True).input_value() == "0.5"


def test_second_tab_follows_a_reply_and_does_not_ask_for_it_again(endless: Served, open_page: Open) -> None:
    """A conversation that is open twice has one stream: the other tab shows the text saved by the first, up to the end."""
    chat = open_page(endless.url)
    chat.set_parameters(Max_tokens="3000")
    chat.send("Write.")
    begun = chat.wait_stored(200)
    other = ChatPage(chat.page.context.new_page(), endless.url)
    asked: list[str] = []
    other.page.on("request", lambda request: asked.append(request.url) if "/v1/chat" in request.url else None)
    other.page.on("request", lambda request: asked.append(request.url) if "/v1/stream" in request.url else None)
    other.open(f"#{chat.conversation()}")
    other.wait_stored(len(begun) + 1)
    chat.wait_done()
    other.wait_done()
    wait_holds(other.replies.last, "3,000 tokens")
    assert asked == []
    assert other.failures == []


def conversation_in_two_tabs(server: Served, open_page: Open) -> tuple[ChatPage, ChatPage]:
    """Open a conversation with one reply in two tabs of a browser."""
    chat = open_page(server.url)
    chat.set_parameters(Max_tokens="5")
    chat.send("Write.")
    chat.wait_done()
    other = ChatPage(chat.page.context.new_page(), server.url)
    other.open(f"#{chat.conversation()}")
    other.wait_done()
    return chat, other


def test_reply_is_stopped_from_another_tab(endless: Served, open_page: Open) -> None:
    """Stop works in each tab that shows the reply, and frees the slot."""
    chat = open_page(endless.url)
    chat.send("Write.")
    chat.wait_stored(100)
    other = ChatPage(chat.page.context.new_page(), endless.url)
    other.open(f"#{chat.conversation()}")
    other.wait_text(100)
    other.page.get_by_role("button", name="Stop the reply").click()
    other.wait_state("stopped")
    chat.wait_state("stopped")
    endless.assert_idle()
    assert not other.failures


def test_reply_of_a_tab_that_is_closed_goes_on_in_another(endless: Served, open_page: Open) -> None:
    """Also if the second tab had the conversation open before the reply began."""
    chat, other = conversation_in_two_tabs(endless, open_page)
    other.set_parameters(Max_tokens="3000")
    other.send("More.")
    wait_count(chat.replies, 2)
    chat.wait_stored(200)
    other.page.close()
    chat.wait_done()
    wait_holds(chat.replies.last, "3,000 tokens")


def test_conversation_that_another_tab_deletes_is_left(endless: Served, open_page: Open) -> None:
    """The tab goes to a new conversation, and actions there do not bring the old conversation back."""
    chat, other = conversation_in_two_tabs(endless, open_page)
    other.listed.first.hover()
    other.page.get_by_role("button", name="Delete Write.").click()
    wait_count(chat.listed, 0)
    assert chat.conversation() == "/"
    chat.set_parameters(Max_tokens="5")
    chat.send("Write anew.")
    chat.wait_done()
    assert {message["role"] for message in chat.saved_messages()} == {"user", "assistant"}
    assert len(chat.saved_messages()) == 2
    assert not other.failures


def test_conversation_goes_on_with_another_model(endless_model: Path, open_page: Open, tmp_path: Path) -> None:
    """With several models a conversation names its model; it is loaded on a request, and replies name their model."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.gguf").symlink_to(endless_model)
    with Served("--models-dir", str(tmp_path), "-c", "32768", "-np", "2", is_ready=False) as server:
        chat = open_page(server.url)
        models = chat.page.get_by_label("Model", exact=True)
        for name in ("second", "first"):
            models.select_option(name)
            with chat.page.expect_request("**/v1/chat/completions") as sent:
                chat.send(f"To {name}.")
            assert sent.value.post_data_json["model"] == name
            chat.wait_text(10)
            chat.composer.press("Escape")
            chat.wait_state("stopped")
            chat.replies.last.get_by_text(name, exact=True).wait_for()
        chat.open("#/engine")
        chat.page.get_by_text("live", exact=True).wait_for()
        chat.page.locator(".figures").get_by_text("idle").first.wait_for()
