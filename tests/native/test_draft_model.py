"""A draft model beside its target: the same text in every case; and the errors of a pair that does not fit."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.drafters import DEEP, force_depths, read_beside_a_kill
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels

from paceline import LLM, Model, estimate_memory
from paceline.demo import demo_draft_model_path, demo_model_path
from paceline.engine.engine_factory import DraftModel, check_same_tokens
from paceline.errors import Aborted, Closed, InvalidParams, InvalidType, ModelLoadError, NotEnoughMemory, Unsupported
from paceline.speculation.depth_chooser import DepthChooser

pytestmark = pytest.mark.native

DRAFT = demo_draft_model_path()
SMALL: dict[str, Any] = {**EXACT, "num_slots": 3, "n_ctx": 1024, "draft_options": {"type_k": "f32", "type_v": "f32"}}
PLAIN = {name: value for name, value in SMALL.items() if name != "draft_options"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
PROMPTS = [
    "Once upon a time there was a fox",
    "A little girl named Lily",
    "The king of the mountain",
    "One day, a bird",
]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets as many drafts as there is room for, whatever they cost."""
    force_depths(monkeypatch, 5)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**PLAIN) as llm:
        yield llm


def check_same(plain: LLM, prompt: str, expected: Any, found: Any) -> None:
    ids = plain.tokenizer.encode(prompt)
    assert_same_but_for_near_ties(plain, ids, expected.token_ids, found.token_ids)


def drafter_of(llm: LLM) -> Any:
    engine: Any = llm._engine
    return engine._thread._engine.scheduler._speculation._calls._drafter


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("options", [{}, {"p_min": 0.6}, {"n_ctx": 256, "chunk_size": 16}])
def test_the_demo_pair_writes_the_same_as_the_model_alone(plain: LLM, options: dict[str, Any]) -> None:
    """One stream and several, with most drafts accepted; also if the draft model has few cells and catches up slowly."""
    draft_options = {**SMALL["draft_options"], **options}
    with LLM(**{**SMALL, "draft_options": draft_options}, draft_model=DRAFT) as llm:
        (lone,) = llm.generate(PROMPTS[:1], **GREEDY)
        check_same(plain, PROMPTS[0], plain.generate(PROMPTS[0], **GREEDY), lone)
        assert lone.usage.accepted_tokens > 15
        assert lone.usage.accepted_tokens > (0.7 if options.get("p_min") else 0.3) * lone.usage.draft_tokens
        for prompt, found, alone in zip(
            PROMPTS, llm.generate(PROMPTS, **GREEDY), plain.generate(PROMPTS, **GREEDY), strict=True
        ):
            check_same(plain, prompt, alone, found)
            assert found.usage.accepted_tokens > 5
        drafter_of(llm).check()
        assert not drafter_of(llm)._sequences


def weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: The city's English name.
    """
    return f"sunny in {city}, 20 degrees"


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
def test_tool_calls_begin_and_end_within_bursts_as_without_drafts(plain: LLM, choice: str) -> None:
    """The trigger of a call's grammar may be a draft, and so may the end of the call; the loop goes on to the same reply.

    Without thinking, with which a grammar has no drafts.
    """
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {
        "tools": [weather],
        "temperature": 0,
        "max_tokens": 60,
        "tool_choice": choice,
        "reasoning_effort": "none",
    }
    with LLM(**SMALL, draft_model=DRAFT) as llm:
        found, expected = (item.chat(asked, **options) for item in (llm, plain))
        assert found.usage.accepted_tokens > 0
        assert [(call.name, call.arguments) for call in found.tool_calls] == [
            (call.name, call.arguments) for call in expected.tool_calls
        ]
        assert [call.name for call in found.tool_calls] == ["weather"]
        if choice == "auto":
            looped, alone = (item.chat(asked, run_tools=True, **options) for item in (llm, plain))
            assert looped.content == alone.content
            assert len(looped.rounds) == len(alone.rounds) == 1


@pytest.mark.usefixtures("deep")
def test_a_model_drafts_for_itself_without_a_mistake(tiny_models: TinyModels) -> None:
    """All drafts are right, of a `Model` as well, which stays open, and with a window that is kept whole."""
    for kind, extra in (("llama", {}), ("gemma3", {"swa_full": True})):
        path = tiny_models(kind)
        with LLM(path, **PLAIN, **extra) as alone, Model.load(path) as model:
            expected = alone.generate("Hello", **GREEDY)
            for draft in (path, model):
                with LLM(path, draft_model=draft, **SMALL, **extra) as llm:
                    found = llm.generate("Hello", **GREEDY)
                    check_same(alone, "Hello", expected, found)
                    assert found.usage.accepted_tokens > 0.9 * found.usage.draft_tokens > 40
            assert model.n_vocab > 0


@pytest.mark.usefixtures("deep")
def test_sequences_that_are_cancelled_and_preempted_leave_the_others_right(plain: LLM) -> None:
    """With cells for not all of them, and streams that are left in the middle."""
    options = {**SMALL, "n_ctx": 256, "host_cache_bytes": 0}
    with LLM(**options, draft_model=DRAFT) as llm:

        def leave(prompt: str) -> None:
            with llm.stream(prompt, **GREEDY) as stream:
                stream.get()

        with ThreadPoolExecutor(6) as pool:
            left = [pool.submit(leave, prompt) for prompt in PROMPTS]
            whole = [pool.submit(llm.generate, prompt, **{**GREEDY, "max_tokens": 100}) for prompt in PROMPTS]
        for item in left:
            item.result()
        for prompt, item in zip(PROMPTS, whole, strict=True):
            check_same(plain, prompt, plain.generate(prompt, **{**GREEDY, "max_tokens": 100}), item.result())
        drafter_of(llm).check()
        assert llm.stats().number("paceline_draft_tokens_accepted_total") > 50


@pytest.mark.usefixtures("deep")
def test_a_prompt_that_was_drafted_for_before_is_not_computed_again(plain: LLM) -> None:
    """The draft model's context keeps prefixes as the target's does; the same text comes of both."""
    prompt = "Once upon a time there was a fox. " * 12
    with LLM(**SMALL, draft_model=DRAFT) as llm:
        drafter, caught_up = drafter_of(llm), []
        propose_all = drafter.propose_all

        def counted(wanted: Any) -> Any:
            found = propose_all(wanted)
            caught_up.append(drafter.num_caught_up)
            return found

        drafter.propose_all = counted
        first = llm.generate(prompt, **GREEDY)
        num_first = sum(caught_up)
        again = llm.generate(prompt, **GREEDY)
        assert num_first > len(llm.tokenizer.encode(prompt)) - 10
        assert sum(caught_up) - num_first < 10
        assert again.usage.cached_tokens > 0
        check_same(plain, prompt, plain.generate(prompt, **GREEDY), first)
        check_same(plain, prompt, first, again)


def test_a_sequence_catches_up_after_a_while_without_drafts(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation that is off for a hundred tokens leaves no gap: its next proposals are as right as before."""
    asked_at = []

    def choose(
        self: Any, candidates: Sequence[tuple[float, int]], rows: Any, num_cells: int, most: int, num_ticks: int
    ) -> list[int]:
        num_tokens = rows[0].sequence.num_tokens
        if is_on := num_tokens < 30 or num_tokens > 140:
            asked_at.append(num_tokens)
        return [min(cap, 4) if is_on else 0 for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)
    monkeypatch.setattr(DepthChooser, "saved_s", lambda _: math.inf)
    options = {**GREEDY, "max_tokens": 200}
    with LLM(**SMALL, draft_model=DRAFT) as llm:
        found = llm.generate(PROMPTS[0], **options)
        check_same(plain, PROMPTS[0], plain.generate(PROMPTS[0], **options), found)
        assert asked_at[0] < 30 < 140 < asked_at[-1]
        assert found.usage.accepted_tokens > 0.4 * found.usage.draft_tokens > 20


def test_a_killed_worker_continues_with_its_draft_model(tiny_models: TinyModels) -> None:
    """The next worker loads both; the text is that of decoding alone."""
    path = tiny_models("llama")
    options: dict[str, Any] = {**GREEDY, "max_tokens": 400}
    with LLM(path, **PLAIN) as alone:
        expected = list(alone.generate("Hello", **options).token_ids)
    with LLM(path, draft_model=path, isolation="process", instruments=[DEEP], **SMALL) as llm:
        found, chunk = read_beside_a_kill(llm, "Hello", options)
        assert llm.stats().number("paceline_engine_restarts_total") == 1
        assert chunk.usage is not None
        assert 0 < chunk.usage.accepted_tokens <= chunk.usage.draft_tokens
        assert found == expected


@pytest.mark.usefixtures("deep")
def test_it_is_asked_behind_another_drafter(plain: LLM) -> None:
    """In a chain it drafts for sequences without a proposal of the first drafter."""
    with LLM(**SMALL, draft_model=DRAFT, speculation="ngram:size_n=40,draft-model") as llm:
        found = llm.generate(PROMPTS[0], **GREEDY)
        check_same(plain, PROMPTS[0], plain.generate(PROMPTS[0], **GREEDY), found)
        assert found.usage.accepted_tokens > 10


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_other_tokens_are_refused_with_the_first_difference(tiny_models: TinyModels, isolation: str) -> None:
    """Both models are named."""
    with pytest.raises(Unsupported, match=r"draft model .* does not have the tokens of .*: .*(token|type|bos)"):
        LLM(tiny_models("llama"), draft_model=DRAFT, isolation=isolation, **SMALL)


def test_vocabularies_are_compared_token_by_token(tiny_models: TinyModels) -> None:
    """A model has its own tokens, and the demo pair the same."""
    with Model.load(DRAFT) as draft, Model.load(DRAFT.with_name("paceline-demo.gguf")) as target:
        check_same_tokens(target, draft)
        pieces = list(draft.tokenizer.pieces(True))
        pieces[77] = b"other"
        draft.tokenizer.pieces = lambda special: tuple(pieces)  # type: ignore[method-assign]
        with pytest.raises(Unsupported, match="token 77 is b'other', not"):
            check_same_tokens(target, draft)


@pytest.mark.parametrize(("kind", "says"), [("mamba", "state"), ("falcon-h1", "recurrent"), ("bert", "writes|no text")])
def test_models_that_cannot_draft_are_refused(tiny_models: TinyModels, kind: str, says: str) -> None:
    """With the reason, before any memory is taken."""
    with pytest.raises(Unsupported, match=says):
        LLM(tiny_models("llama"), draft_model=tiny_models(kind), **SMALL)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_errors_of_loading_name_the_draft_model(tmp_path: Path, isolation: str) -> None:
    """A file that is no model, and one that is not there."""
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"no model at all")
    for path in (wrong, tmp_path / "missing.gguf"):
        with pytest.raises(ModelLoadError, match=rf"draft model .*{path.name}"):
            LLM(draft_model=path, isolation=isolation, **SMALL)


@pytest.mark.parametrize("dry_run", [True, False])
def test_estimates_count_the_draft_model(dry_run: bool) -> None:
    """Its weights, and a cache with as many cells as the target's, or a given number."""
    alone = estimate_memory(dry_run=dry_run, n_ctx=4096)
    drafting = estimate_memory(dry_run=dry_run, n_ctx=4096, draft_model=DRAFT)
    small = estimate_memory(dry_run=dry_run, n_ctx=4096, draft_model=DRAFT, draft_options={"n_ctx": 512})
    (draft,) = estimate_memory(DRAFT, dry_run=dry_run, n_ctx=4096).devices
    assert drafting.weights_bytes == alone.weights_bytes + draft.weights_bytes
    assert drafting.cache_bytes == alone.cache_bytes + draft.cache_bytes
    assert small.cache_bytes == alone.cache_bytes + draft.cache_bytes // 8
    assert drafting.n_ctx == alone.n_ctx == 4096
    assert drafting.is_measured is dry_run


def test_a_draft_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    """The error says how much, and the ways out; fewer cells load."""
    with pytest.raises(NotEnoughMemory, match="draft model.*draft_options"):
        LLM(demo_model_path(), **PLAIN, draft_model=DRAFT, draft_options={"n_ctx": 6_000_000})
    with pytest.raises(NotEnoughMemory, match=rf"draft model .*{DRAFT.name}"):
        LLM(**PLAIN, draft_model=DRAFT, draft_options={"n_ctx": 60_000_000}, fit=False)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"draft_options": {"p_min": 0.5}}, InvalidParams, "no draft_model"),
        ({"speculation": "draft-model"}, InvalidParams, "give draft_model"),
        ({"speculation": "ngram", "draft_model": DRAFT}, InvalidParams, "add 'draft-model' to speculation"),
        ({"speculation": "draft-model:p_min=1", "draft_model": DRAFT}, InvalidParams, "draft_options"),
        ({"draft_model": DRAFT, "draft_options": {"p_mim": 0.5}}, InvalidType, "p_min"),
        ({"draft_model": DRAFT, "draft_options": {"p_min": 1.5}}, InvalidParams, "p_min"),
        ({"draft_model": DRAFT, "draft_options": {"chunk_size": 1}}, InvalidParams, "chunk_size"),
        ({"draft_model": DRAFT, "draft_options": {"n_ctx": "many"}}, InvalidParams, "n_ctx"),
        ({"draft_model": DRAFT, "draft_options": {"n_ctx": 1}}, InvalidParams, r"draft_options\['n_ctx'\].*2"),
        ({"draft_model": DRAFT, "draft_options": {"n_batch": 1}}, InvalidParams, r"draft_options\['n_batch'\].*2"),
        ({"draft_model": DRAFT, "draft_options": {"n_batch": "x"}}, InvalidParams, r"draft_options\['n_batch'\]"),
        ({"draft_model": DRAFT, "draft_options": {"max_rollback": 2}}, InvalidParams, "max_rollback.*=2 has no use"),
        (
            {"draft_model": DRAFT, "draft_options": {"chunk_size": 4096, "n_batch": 32}},
            InvalidParams,
            r"chunk_size'\]=4096 is more .* n_batch=32; .*draft_options\['n_batch'\]",
        ),
        (
            {"draft_model": DRAFT, "n_batch": 64, "draft_options": {"chunk_size": 65}},
            InvalidParams,
            "chunk_size.*=65 is more .* n_batch=64",
        ),
        ({"draft_model": DRAFT, "draft_options": {"type_k": "q17"}}, InvalidParams, "draft model.*type_k"),
        ({"draft_model": DRAFT, "draft_options": [1]}, InvalidType, "mapping"),
        ({"draft_model": 7}, InvalidType, "draft_model: must be"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    """Before a model is loaded, if that is possible."""
    with pytest.raises(error, match=says):
        LLM(**PLAIN, **options)


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("options", [{"n_batch": 2}, {"n_ctx": 2}, {"n_ubatch": 1}, {"chunk_size": 16, "n_batch": 16}])
def test_the_smallest_sizes_load_and_draft_or_do_not(plain: LLM, options: dict[str, Any]) -> None:
    """The text is the same."""
    draft_options = {**SMALL["draft_options"], **options}
    with LLM(**{**SMALL, "draft_options": draft_options}, draft_model=DRAFT) as llm:
        found = llm.generate(PROMPTS[0], **GREEDY)
        check_same(plain, PROMPTS[0], plain.generate(PROMPTS[0], **GREEDY), found)
        drafter_of(llm).check()


def test_a_window_that_wrong_drafts_cannot_be_cut_from_is_refused(tiny_models: TinyModels) -> None:
    """If the draft model has a window; without the option, or with a whole window, it loads."""
    path = tiny_models("gemma3")
    options = {**PLAIN, "swa_full": True, "draft_model": path}
    with pytest.raises(InvalidParams, match=r"draft_options\['swa_full'\]=False .*sliding window.*leave it out"):
        LLM(path, **options, draft_options={"swa_full": False})
    for draft_options in ({}, {"swa_full": True}):
        with LLM(path, **options, draft_options=draft_options) as llm:
            assert len(llm.generate("Hello", **GREEDY).token_ids) == 60
    with LLM(**PLAIN, draft_model=DRAFT, draft_options={"swa_full": False}) as llm:
        assert llm.generate("Hello", **GREEDY).usage.completion_tokens == 60


def test_a_failure_behind_the_draft_model_frees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projector that is none ends the load; contexts and models that were made are closed."""
    made: list[Any] = []
    begin = DraftModel.begin

    def kept(self: DraftModel, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(DraftModel, "begin", kept)
    projector = tmp_path / "mmproj-none.gguf"
    projector.write_bytes(b"no projector")
    with pytest.raises(ModelLoadError, match="mmproj-none"):
        LLM(**SMALL, draft_model=DRAFT, mmproj=projector)
    (one,) = made
    with pytest.raises(Closed):
        _ = one.context.decode([1])
    with pytest.raises(Closed):
        _ = one.model.n_vocab


@pytest.mark.usefixtures("deep")
def test_an_abort_ends_passes_of_the_draft_model(plain: LLM) -> None:
    """The sequences go on without its drafts, and it drafts again for later requests."""
    prompt = "Once upon a time there was a fox. " * 20
    with LLM(**SMALL, draft_model=DRAFT) as llm:
        engine: Any = llm._engine
        context = drafter_of(llm)._backend._context
        plain_step, aborted = context.plain_step, []

        def step(*arguments: Any) -> Any:
            if not aborted:
                stop = threading.Event()

                def again() -> None:
                    while not stop.wait(0.0002):
                        engine._backend.abort()  # of the target nothing runs now

                thread = threading.Thread(target=again)
                thread.start()
                try:
                    for _ in range(1000):
                        plain_step(*arguments)
                        context.remove(0)
                except Aborted as error:
                    aborted.append(error)
                    raise
                finally:
                    stop.set()
                    thread.join()
            return plain_step(*arguments)

        context.plain_step = step
        found = llm.generate(prompt, **GREEDY)
        assert aborted
        check_same(plain, prompt, plain.generate(prompt, **GREEDY), found)
        drafter_of(llm).check()
        assert llm.generate(PROMPTS[0], **GREEDY).usage.completion_tokens == 60
