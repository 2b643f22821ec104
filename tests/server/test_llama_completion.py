"""POST /completion and /infill over the demo model: the facts of llama-server's own tests, and our own."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.params import SamplingParams
from paceline.server.dialects.llama_server.completion_request import ParseContext, infill_prompt
from paceline.server.dialects.llama_server.llama_bodies import InfillBody
from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

# What comes after these is far more likely than anything else, so that no rounding changes it.
PROMPT, OTHER = "A B C A B C A B C A B C A B C", "a b c d a b c d a b c d a b c d a b c d"
# Draws from all tokens alike: they follow from the seed, and hardly from what the model computes.
ANY: dict[str, Any] = {"temperature": 1e5, "samplers": ["temperature"]}


FRESH = {"n_predict": 8, "temperature": 0, "cache_prompt": False}


def complete(client: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> Any:
    """Return the response to a completion: greedy, eight tokens, computed afresh unless the fields say otherwise."""
    response = client.post("/completion", json={"prompt": prompt, **FRESH, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """The events of a completion."""
    body = {"prompt": prompt, "stream": True, **FRESH, **fields}
    with client.stream("POST", "/completion", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]


def refused(client: httpx.Client, status: int = 400, path: str = "/completion", **fields: Any) -> dict[str, Any]:
    """The error of a request."""
    response = client.post(path, json={"prompt": PROMPT, **fields})
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status
    return error


def test_control_tokens_have_text_with_the_flag() -> None:
    """With --special, in texts and in the tokens of probabilities; a request with false has none."""
    settings = ServerSettings(engine_options=DEMO_ENGINE, special=True)
    asked = {"allowed_token_ids": [4085], "n_predict": 2, "n_probs": 1}
    with RunningServer(settings) as server, server.client() as client:
        shown, hidden = complete(client, **asked), complete(client, **asked, special=False)
        assert (shown["content"], hidden["content"]) == ("<|im_start|>" * 2, "")
        tokens = [
            [token["token"] for token in completion["completion_probabilities"]] for completion in (shown, hidden)
        ]
        assert tokens == [["<|im_start|>"] * 2, [""] * 2]
        body = {"prompt": PROMPT, "max_tokens": 2, "allowed_token_ids": [4085]}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "<|im_start|>" * 2


# ---- whole


def test_a_completion_has_the_fields_of_llama_server(client: httpx.Client) -> None:
    """Every member, of the type that it has there."""
    completion = complete(client, return_tokens=True)
    num_prompt = completion["tokens_evaluated"]
    assert completion["timings"]["prompt_n"] + completion["timings"]["cache_n"] == num_prompt
    assert completion["timings"]["predicted_n"] == completion["tokens_predicted"] == len(completion["tokens"]) == 8
    assert (completion["stop"], completion["stop_type"], completion["stopping_word"]) == (True, "limit", "")
    assert completion["index"] == 0
    assert (completion["truncated"], completion["has_new_line"], completion["model"]) == (False, False, "paceline-demo")
    assert (completion["prompt"], completion["tokens_cached"]) == (PROMPT, num_prompt + 7)
    assert completion["generation_settings"]["n_predict"] == 8
    assert "completion_probabilities" not in completion
    assert "warnings" not in completion
    assert complete(client)["tokens"] == []


def test_the_older_path_does_the_same(client: httpx.Client) -> None:
    """POST /completions."""
    response = client.post("/completions", json={"prompt": PROMPT, "n_predict": 3})
    assert response.json()["tokens_predicted"] == 3


def test_a_prompt_may_be_text_or_ids_or_both(client: httpx.Client) -> None:
    """One prompt gives an object, several give a list in their order."""
    ids = client.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    wanted = complete(client)["content"]
    for prompt in (ids, {"prompt_string": PROMPT}, [PROMPT], [*ids[:2], *ids[2:]]):
        assert complete(client, prompt)["content"] == wanted
    completions = complete(client, [ids, PROMPT, {"prompt_string": PROMPT}])
    assert [(completion["index"], completion["content"]) for completion in completions] == [
        (0, wanted),
        (1, wanted),
        (2, wanted),
    ]
    mixed = complete(client, [1, 2, 3, " Once", 7, " upon"])
    assert isinstance(mixed["content"], str)


@pytest.mark.parametrize("prompt", [None, [], "", [[]], 5, {"x": 1}, [-1], [10**9], [True]])
def test_a_prompt_that_is_none_is_refused(client: httpx.Client, prompt: Any) -> None:
    """The error names the field."""
    assert "prompt" in refused(client, prompt=prompt)["message"]


def test_images_are_refused(client: httpx.Client) -> None:
    """The model reads text."""
    prompt = {"prompt_string": "a <__media__>", "multimodal_data": ["AAAA"]}
    error = refused(client, prompt=prompt)
    assert error["message"].startswith("prompt.multimodal_data[0]: this model takes no images")


def test_one_seed_draws_one_text_and_others_draw_others(client: httpx.Client) -> None:
    """Whatever else runs at the time."""
    with ThreadPoolExecutor(4) as pool:
        drawn = pool.map(lambda seed: complete(client, seed=seed, **ANY)["content"], [1, 1, 2, 3])
    first, again, *others = drawn
    assert first == again
    assert len({first, *others}) == 3


def test_choices_differ_and_are_numbered_prompt_by_prompt(client: httpx.Client) -> None:
    """n_cmpl of them for each prompt."""
    completions = complete(client, [PROMPT, OTHER], n_cmpl=3, seed=5, **ANY)
    assert [completion["index"] for completion in completions] == list(range(6))
    assert [completion["prompt"] for completion in completions] == [PROMPT] * 3 + [OTHER] * 3
    assert (
        len({completion["content"] for completion in completions[:3]})
        == len({completion["content"] for completion in completions[3:]})
        == 3
    )


def test_only_the_fields_that_were_asked_for_come(client: httpx.Client) -> None:
    """Unnested if a name has a slash."""
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
    completion = complete(client, response_fields=fields)
    assert set(completion) == set(fields[:3])
    assert completion["generation_settings/n_predict"] == 8


def test_a_stop_word_ends_the_completion_and_is_not_in_it(client: httpx.Client) -> None:
    """The response has it in a field of its own."""
    text = complete(client, n_predict=24)["content"]
    word = text.split()[3]
    completion = complete(client, n_predict=24, stop=["never comes", word])
    assert (completion["stop_type"], completion["stopping_word"]) == ("word", word)
    assert completion["content"] == text[: text.index(word)]


def test_the_models_own_end_is_eos(client: httpx.Client) -> None:
    """If nothing else is allowed, it comes."""
    assert complete(client, n_predict=-1, grammar='root ::= "yes"')["stop_type"] == "eos"


def test_without_an_end_the_context_is_filled(client: httpx.Client) -> None:
    """The completion is truncated, and the tokens that would end it have a bias of never."""
    n_ctx = client.get("/props").json()["default_generation_settings"]["n_ctx"]
    completion = complete(client, n_predict=-1, ignore_eos=True)
    assert (completion["truncated"], completion["stop_type"]) == (True, "limit")
    assert completion["tokens_evaluated"] + completion["tokens_predicted"] >= n_ctx
    biases = completion["generation_settings"]["logit_bias"]
    assert biases
    assert {biase["bias"] for biase in biases} == {None}
    assert complete(client)["generation_settings"]["logit_bias"] == []


def test_no_tokens_may_be_asked_for(client: httpx.Client) -> None:
    """n_predict 0 computes the prompt alone."""
    completion = complete(client, n_predict=0)
    assert (completion["content"], completion["tokens_predicted"], completion["stop_type"]) == ("", 0, "limit")


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client: httpx.Client) -> None:
    """In llama-server's words and shape."""
    error = refused(client, prompt=[5] * 3000)
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] == 3000 > error["n_ctx"]
    assert "exceeds the available context size" in error["message"]


def test_a_prefix_is_computed_once(client: httpx.Client) -> None:
    """Unless the request does not want it."""
    prompt = [17 + number % 200 for number in range(64)]
    assert complete(client, prompt, cache_prompt=True)["timings"]["prompt_n"] == 64
    again = complete(client, prompt, cache_prompt=True)["timings"]
    assert again["cache_n"] + again["prompt_n"] == 64
    assert again["cache_n"] > 0
    assert complete(client, prompt, cache_prompt=False)["timings"]["cache_n"] == 0


# ---- what may come


def test_every_token_has_probabilities(client: httpx.Client) -> None:
    """With text, bytes and the most likely alternatives."""
    entries = complete(client, n_probs=10, n_predict=5, return_tokens=True)["completion_probabilities"]
    assert len(entries) == 5
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 10
        assert entry["id"] == entry["top_logprobs"][0]["id"]


def test_probabilities_after_sampling_add_up(client: httpx.Client) -> None:
    """Tokens that cannot be drawn are left out; the probabilities of all others add up to one."""
    completion = complete(client, n_probs=10, n_predict=5, temperature=1, top_k=5, post_sampling_probs=True)
    for entry in completion["completion_probabilities"]:
        probabilities = [candidate["prob"] for candidate in entry["top_probs"]]
        assert 0 < entry["prob"] <= 1
        assert min(probabilities) > 0
        assert math.isclose(sum(probabilities), 1, abs_tol=1e-3)


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_banned_tokens_do_not_come(client: httpx.Client, is_object: bool, as_text: bool) -> None:
    """Bans are by id or by text, as pairs or as an object."""
    free = complete(client, return_tokens=True)
    banned: Any = free["tokens"][:2]
    if as_text:
        banned = [client.post("/detokenize", json={"tokens": [token]}).json()["content"] for token in banned]
    form: Any = {str(token): False for token in banned} if is_object else [[token, False] for token in banned]
    completion = complete(client, logit_bias=form, return_tokens=True)
    assert not set(free["tokens"][:2]) & set(completion["tokens"])


def test_grammars_and_schemas_hold(client: httpx.Client) -> None:
    """The output matches the grammar or the schema, also the empty schema."""
    assert complete(client, grammar='root ::= "yes" | "no"', n_predict=-1)["content"] in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    assert set(json.loads(complete(client, json_schema=schema, n_predict=100)["content"])) == {"a"}
    assert "grammar" in refused(client, grammar="root ::= (")["message"].lower()


def test_a_keyword_of_a_schema_that_is_not_enforced_is_refused(client: httpx.Client) -> None:
    """The error names the keyword's path; it does not complete with text that ignores it."""
    assert "#/patternProperties" in refused(client, json_schema={"patternProperties": {"^(?=x)": {}}})["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True),
        ("temperature", "hot"),
        ("n_predict", -2),
        ("seed", 1.5),
        ("n_cmpl", 0),
        ("mirostat_tau", -1),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(client: httpx.Client, field: str, value: Any) -> None:
    """Whether pydantic finds them or the engine's params do."""
    error = refused(client, **{field: value})
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


def test_values_that_cannot_be_done_are_refused(client: httpx.Client) -> None:
    """With llama-server's type for it."""
    assert refused(client, 501, min_keep=3)["type"] == "not_supported_error"


def test_ignored_fields_are_reported(client: httpx.Client) -> None:
    """In the response, or in the last event of a stream."""
    warnings = complete(client, foo=1, n_keep=4, top_p=2)["warnings"]
    assert [any(name in warning for warning in warnings) for name in ("foo", "n_keep", "top_p")] == [True] * 3
    assert streamed(client, foo=1)[-1]["warnings"] == complete(client, foo=1)["warnings"]


def test_a_line_ends_the_completion_where_it_may(client: httpx.Client) -> None:
    """By indent: nothing of the line that begins too far left is sent, streamed or not."""
    grammar = {"grammar": 'root ::= "ab\\n  cd\\n ef" [a-z]*', "n_predict": 40, "n_indent": 2}
    completion = complete(client, **grammar)
    assert (completion["content"], completion["stop_type"], completion["truncated"]) == ("ab\n  cd\n ", "limit", False)
    events = streamed(client, **grammar)
    assert "".join(event["content"] for event in events) == completion["content"]
    assert events[-1]["stop_type"] == "limit"


# ---- what llama-server does not have


def test_options_of_the_engine_are_taken(client: httpx.Client) -> None:
    """Of sampling, and of how a request is treated; wrong values are refused by name."""
    assert complete(client, choice=["yes", "no"], n_predict=-1)["content"] in ("yes", "no")
    first = complete(client, return_tokens=True)["tokens"][0]
    assert complete(client, allowed_token_ids=[first], return_tokens=True)["tokens"] == [first] * 8
    assert "priority" in refused(client, priority="high")["message"]
    assert "min_tokens" in refused(client, min_tokens=-1)["message"]


def test_a_long_prompt_is_cut_where_the_request_sets_truncate(client: httpx.Client) -> None:
    """The response has the part of it that was computed."""
    prompt = [20 + number % 200 for number in range(3000)]
    completion = complete(client, prompt, truncate="right")
    assert completion["tokens_evaluated"] == completion["timings"]["prompt_n"] + completion["timings"]["cache_n"] < 3000
    assert client.post("/detokenize", json={"tokens": prompt}).json()["content"].startswith(completion["prompt"])


def test_a_request_that_runs_out_of_time_is_an_error(client: httpx.Client) -> None:
    """Streamed or not; the stream has the text until then."""
    fields = {"n_predict": -1, "ignore_eos": True, "timeout_s": 1e-6}
    assert refused(client, 504, **fields)["type"] == "timeout_error"
    events = streamed(client, **fields)
    assert events[-1]["error"]["type"] == "timeout_error"
    assert not any(event.get("stop") for event in events)


def test_control_tokens_in_a_prompt_may_be_text(client: httpx.Client) -> None:
    """They are parsed unless the request says otherwise."""
    assert complete(client, "<|im_end|>")["tokens_evaluated"] == 1
    assert complete(client, "<|im_end|>", parse_special=False)["tokens_evaluated"] > 1


def test_how_a_stream_is_read_means_nothing_without_one(client: httpx.Client) -> None:
    """It is ignored, and the response reports it."""
    assert "interval" in complete(client, interval=4)["warnings"][0]
    assert len(streamed(client, interval=4, n_predict=8)) <= 4


# ---- streamed


def test_a_stream_has_the_same_completion_and_ends_once(client: httpx.Client) -> None:
    """Events with stop false, then exactly one with stop true; no event that is not JSON."""
    whole, events = complete(client, n_predict=24, return_tokens=True), streamed(client, n_predict=24)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    end = events[-1]
    assert end["content"] == ""
    for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "has_new_line", "truncated", "prompt"):
        assert end[name] == whole[name]
    assert {**end["generation_settings"], "stream": False} == whole["generation_settings"]
    assert end["timings"]["predicted_n"] == 24


def test_a_stream_of_several_ends_each_of_them(client: httpx.Client) -> None:
    """Events are distinguished by their index."""
    events = streamed(client, [PROMPT, OTHER], n_cmpl=2, seed=3, **ANY)
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1, 2, 3]
    whole = complete(client, [PROMPT, OTHER], n_cmpl=2, seed=3, **ANY)
    for index, completion in enumerate(whole):
        assert "".join(event["content"] for event in events if event["index"] == index) == completion["content"]


def test_a_streams_probabilities_come_with_its_tokens(client: httpx.Client) -> None:
    """A token an event, with its text and its probabilities, even if several tokens came at once."""
    for options in ({}, {"interval": 4}, {"prompt": "The 🦊 said: ä"}):
        events = streamed(client, n_probs=3, n_predict=8, **{"prompt": PROMPT, **options})
        for event in events[:-1]:
            assert [token["id"] for token in event["completion_probabilities"]] == event["tokens"]
            assert len(event["tokens"]) == 1
        assert len(events) == 9
        assert "completion_probabilities" not in events[-1]
    by_token = streamed(client, n_probs=3, interval=4)
    assert [item["content"] for item in by_token] == [item["content"] for item in streamed(client, n_probs=3)]


def test_a_refusal_comes_before_the_stream(client: httpx.Client) -> None:
    """With a status of its own."""
    assert refused(client, stream=True, prompt=[5] * 3000)["type"] == "exceed_context_size_error"
    assert refused(client, stream=True, temperature="x")["type"] == "invalid_request_error"


def test_timings_come_with_every_token_where_asked(client: httpx.Client) -> None:
    """They count up, and cached and computed tokens add up to the prompt."""
    prompt = [40 + number % 50 for number in range(100)]
    for is_cached in (False, True):
        events = streamed(client, prompt, timings_per_token=True, cache_prompt=True, cache_salt="timings")
        timings = [event["timings"] for event in events]
        cached = timings[-1]["cache_n"]
        assert (cached > 0) is is_cached
        counts = [timing["predicted_n"] for timing in timings]
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert {(timing["cache_n"], timing["prompt_n"]) for timing in timings} == {(cached, 100 - cached)}
    assert "timings" not in streamed(client)[0]


def test_progress_of_the_prompt_is_reported_where_asked(client: httpx.Client) -> None:
    """From the cached tokens up to the whole prompt, before the first token, with timings that fit."""
    prompt = [30 + number % 90 for number in range(200)]
    asked = {"return_progress": True, "timings_per_token": True, "cache_prompt": True, "cache_salt": "progress"}
    for is_cached in (False, True):
        events = streamed(client, prompt, **asked)
        cached = events[-1]["timings"]["cache_n"]
        assert (cached > 0) is is_cached
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [event for event in events[: len(progress)] if event["tokens"]] == []
        assert (progress[0]["processed"], progress[-1]["processed"]) == (cached, 200)
        assert [update["processed"] for update in progress] == sorted({update["processed"] for update in progress})
        assert {(update["total"], update["cache"]) for update in progress} == {(200, cached)}
        assert all(update["time_ms"] >= 0 for update in progress)
        timings = [event["timings"] for event in events]
        assert [timing["prompt_n"] for timing in timings[: len(progress)]] == [
            update["processed"] - cached for update in progress
        ]
        assert {timing["cache_n"] for timing in timings} == {cached}
        assert (timings[0]["prompt_ms"], timings[0]["predicted_n"]) == (0.0, 0)
    assert "return_progress" in complete(client, return_progress=True)["warnings"][0]


# ---- gaps


def test_a_gap_is_filled(client: httpx.Client) -> None:
    """The prompt is made of both sides in the model's own tokens."""
    response = client.post(
        "/infill", json={"input_prefix": "One day, ", "input_suffix": " was happy.", "prompt": "a fox", "n_predict": 8}
    )
    assert response.status_code == 200
    prompt = response.json()["prompt"]
    assert prompt.startswith("<|fim_prefix|>One day, a fox<|fim_suffix|>")
    assert prompt.endswith("<|fim_middle|>")


@pytest.mark.parametrize("field", ["input_prefix", "input_suffix", "prompt", "filename", "text"])
def test_control_tokens_in_the_texts_of_an_infill_stay_text(server: RunningServer, field: str) -> None:
    """In every field; with `parse_special` the prompt's are parsed, and no other field's."""
    tokenizer = server.call(server.service.engine).tokenizer
    sides: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b"}
    spelt = {field: tokenizer.decode([tokenizer.fim.middle], special=True)}
    body = {**sides, "input_extra": [{"text": "d", **spelt}]} if field in ("filename", "text") else {**sides, **spelt}

    def num_middle_tokens(**more: bool) -> int:
        facts: dict[str, Any] = {"base": SamplingParams(), "images": None, "tokenizer": tokenizer}
        context = ParseContext(n_ctx=512, n_batch=64, **facts)
        return infill_prompt(InfillBody.model_validate({**body, **more}), context).count(tokenizer.fim.middle)

    assert num_middle_tokens() == 1
    assert num_middle_tokens(parse_special=True) == (2 if field == "prompt" else 1)


@pytest.mark.parametrize(
    "extra", [{}, {"filename": "ok"}, {"filename": 123}, {"filename": 123, "text": "abc"}, {"text": 4}]
)
def test_other_files_must_be_text(client: httpx.Client, extra: dict[str, Any]) -> None:
    """With a name that is text as well, if they have one."""
    error = refused(client, path="/infill", input_prefix="a", input_suffix="b", input_extra=[extra])
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sides", [{"input_prefix": "a"}, {"input_suffix": "a"}, {"input_prefix": "a", "input_suffix": 4}]
)
def test_a_gap_has_two_sides(client: httpx.Client, sides: dict[str, Any]) -> None:
    """Both are texts."""
    assert "input_" in refused(client, path="/infill", **sides)["message"]


def test_more_completions_than_the_server_takes_are_refused(client: httpx.Client, server: RunningServer) -> None:
    """Before any of them has a slot's number: prompts, and prompts times choices."""
    assert "300 prompts" in refused(client, prompt=["a"] * 300)["message"]
    assert "2 times 200" in refused(client, prompt=["a", "b"], n_cmpl=200)["message"]
    assert server.call(lambda: server.service.request_registry.count) == 0
