"""Drafts of a model's own heads in an engine: the text is that of decoding alone, whatever becomes of the sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.drafters import read_beside_a_kill
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels
from tests.pictures import picture
from tests.sweeps import sampled

from paceline import LLM, Image, estimate_memory
from paceline.errors import InvalidParams, ModelLoadError, StateError, Unsupported
from paceline.runtime import Model
from paceline.speculation.depth_chooser import DepthChooser
from paceline.testing.models import (
    DFlashSpec,
    Eagle3Spec,
    HunYuan3Spec,
    LlamaSpec,
    LlavaVisionSpec,
    Mimo2Spec,
    Qwen25VisionSpec,
    Qwen35Spec,
    write_lora,
)
from paceline.testing.models.gguf_parts import byte_level

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**EXACT, "num_slots": 3, "n_ctx": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
PROMPTS = ["Hello", "The quick brown fox", "a"]
SPECS = {
    "mtp": HunYuan3Spec(layer_gain=0.4, agrees=True),
    "chained": HunYuan3Spec(n_heads=3, layer_gain=0.4, agrees=True),
    "eagle3": LlamaSpec(n_layer=3, layer_gain=0.4),
    "dflash": LlamaSpec(n_layer=3, layer_gain=0.4),
    "dspark": LlamaSpec(n_layer=3, layer_gain=0.4),
    "random": HunYuan3Spec(n_heads=2),
    "hybrid": Qwen35Spec(layer_gain=0.4, agrees=True),
    "window": Mimo2Spec(),
}
FILES = {
    "eagle3": ("eagle3", Eagle3Spec(agrees=True)),
    "dflash": ("dflash", DFlashSpec(agrees=True, mask_id=byte_level().control[-1], n_head_kv=4, window=8)),
    "dspark": ("dflash", DFlashSpec(markov_rank=16, layer_gain=0.1)),  # the newest token's row is as the model's
}
LEAST = {
    "mtp": 0.2,
    "chained": 0.2,
    "eagle3": 0.05,
    "dflash": 0.05,
    "dspark": 0.05,
    "random": 0.0,
    "hybrid": 0.1,
    "window": 0.0,
}  # of drafts that are right


class Tried:
    """A model with heads that draft in one way."""

    def __init__(self, tiny_models: TinyModels, kind: str) -> None:
        self.kind, self.spec, self.path = kind, SPECS[kind], tiny_models(SPECS[kind])
        name, heads = FILES.get(kind, ("mtp", None))
        self.speculation = name if heads is None else f"{name}:model={tiny_models(heads)}"

    def llm(self, **options: Any) -> LLM:
        return LLM(self.path, **{**SMALL, "speculation": self.speculation, **options})

    def plain(self, **options: Any) -> LLM:
        return self.llm(speculation=None, **options)


@pytest.fixture(scope="module", params=sampled(SPECS, every=3))
def tried(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Tried:
    return Tried(tiny_models, request.param)


@pytest.fixture(scope="module")
def mtp(tiny_models: TinyModels) -> Tried:
    return Tried(tiny_models, "mtp")


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets as many drafts as there is room for, whatever they cost."""

    def choose(
        self: Any, candidates: Sequence[tuple[Any, int]], rows: Any, num_cells: int, most: int, *_: int
    ) -> list[int]:
        return [min(cap, 6, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)
    monkeypatch.setattr(DepthChooser, "trial", lambda *_, **__: 0)


@pytest.fixture(autouse=True)
def _every_sequence_is_followed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No pass of the heads fails."""
    yield
    assert "go on without drafts" not in caplog.text


def assert_same(plain: LLM, prompts: Sequence[str], expected: Sequence[Any], found: Sequence[Any]) -> None:
    for prompt, completion, other in zip(prompts, expected, found, strict=True):
        assert_same_but_for_near_ties(plain, plain.tokenizer.encode(prompt), completion.token_ids, other.token_ids)


@pytest.mark.usefixtures("deep")
def test_streams_together_write_the_same_as_alone(tried: Tried) -> None:
    """And as many drafts are right as the heads are made for; a prompt that is cached has drafts as well."""
    with tried.plain() as plain, tried.llm() as llm:
        alone = [plain.generate(prompt, **GREEDY) for prompt in PROMPTS]
        for num_cached in (0, 0 if tried.kind in ("hybrid", "window") else 3):
            found = llm.generate(PROMPTS, **GREEDY)
            assert_same(plain, PROMPTS, alone, found)
            num_drafts = sum(completion.usage.draft_tokens for completion in found)
            assert num_drafts > 60
            assert sum(completion.usage.accepted_tokens for completion in found) >= LEAST[tried.kind] * num_drafts
            assert sum(completion.usage.cached_tokens for completion in found) >= num_cached
        assert llm.generate(PROMPTS[0], speculation=False, **GREEDY).usage.draft_tokens == 0
        # Its heads have followed all the same, and another goes on behind it with drafts.
        again = llm.generate(PROMPTS[0] + " again", **GREEDY)
        assert again.usage.draft_tokens > 20


@pytest.mark.usefixtures("deep")
def test_draws_of_a_seed_are_those_without_drafts(mtp: Tried) -> None:
    """Choices share a prompt's cells in both memories, and draw with penalties the same as alone."""
    options: dict[str, Any] = {"temperature": 0.7, "max_tokens": 16, "ignore_eos": True, "n": 3, "repeat_penalty": 1.1}
    with mtp.plain() as plain, mtp.llm() as llm:
        for seed in range(6):
            expected = plain.generate("Hello", seed=seed, **options)
            found = llm.generate("Hello", seed=seed, **options)
            assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in expected.choices]
            assert found.usage.draft_tokens > 0


@pytest.mark.usefixtures("deep")
def test_the_preempted_go_on_with_drafts(tried: Tried) -> None:
    """Their cells are moved to host memory and back, with the heads' cells."""
    prompts = [f"{index} " + "the quick brown fox " * 6 for index in range(6)]
    options: dict[str, Any] = {**GREEDY, "max_tokens": 100}
    small = {"num_slots": 4, "n_ctx": 512}
    with tried.plain(num_slots=1) as plain, tried.llm(**small) as llm:
        alone = [plain.generate(prompt, **options) for prompt in prompts]
        found = llm.generate(prompts, **options)
        assert llm.stats().number("paceline_preemptions_total") > 0
        assert_same(plain, prompts, alone, found)
        assert all(completion.usage.draft_tokens > 0 for completion in found)


@pytest.mark.usefixtures("deep")
def test_prefixes_in_host_memory_and_files_have_the_heads_part(tried: Tried, tmp_path: Path) -> None:
    """After an eviction and a load the sequence is still followed: the next drafts are as right as before."""
    prompt = "the quick brown fox jumps over the lazy dog " * 4
    options: dict[str, Any] = {**GREEDY, "max_tokens": 60}
    with tried.plain() as plain:
        alone = plain.generate(prompt, **options)
        with tried.llm(num_slots=1, n_ctx=512, state_folder=tmp_path) as llm:
            first = llm.generate(prompt, **options)
            llm.save_prefix("saved", prompt)
            for index in range(4):  # take its cells
                llm.generate(f"{index}" * 300, **options)
            again = llm.generate(prompt, **options)
            assert again.usage.cached_tokens > 100
            assert_same(plain, [prompt] * 2, [alone] * 2, [first, again])
            assert again.usage.accepted_tokens >= first.usage.accepted_tokens - 5
        with tried.llm(num_slots=1, n_ctx=512, state_folder=tmp_path) as llm:
            llm.load_prefix("saved")
            loaded = llm.generate(prompt, **options)
            assert loaded.usage.cached_tokens > 100
            assert_same(plain, [prompt], [alone], [loaded])
            assert loaded.usage.draft_tokens > 0
        with tried.plain(state_folder=tmp_path) as without, pytest.raises(StateError):
            without.load_prefix("saved")


@pytest.mark.usefixtures("deep")
def test_cancelled_and_stopped_streams_leave_the_others_as_they_are(mtp: Tried) -> None:
    """A stop within accepted drafts cuts both memories; the next request finds the rest."""
    with mtp.plain() as plain, mtp.llm() as llm:
        alone = plain.generate(PROMPTS[1], **GREEDY)
        stop = alone.text[20:23]
        expected = plain.generate(PROMPTS[1], stop=[stop], **GREEDY)
        with llm.stream(PROMPTS[0], **GREEDY) as cancelled:
            cancelled.get()
        for _ in range(2):
            assert llm.generate(PROMPTS[1], stop=[stop], **GREEDY).text == expected.text
        assert_same(plain, [PROMPTS[1]], [alone], [llm.generate(PROMPTS[1], **GREEDY)])


def test_a_killed_worker_continues_with_drafts(tried: Tried) -> None:
    """The next worker loads the heads as well, and the text is that of decoding alone."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 400}
    with tried.plain() as plain, tried.llm(isolation="process") as llm:
        alone = plain.generate(PROMPTS[1], **options)
        found, chunk = read_beside_a_kill(llm, PROMPTS[1], options)
        assert llm.stats().number("paceline_engine_restarts_total") == 1
        assert chunk.usage is not None
        assert chunk.usage.draft_tokens > 0
        ids = plain.tokenizer.encode(PROMPTS[1])
        assert_same_but_for_near_ties(plain, ids, alone.token_ids, found)


@pytest.mark.usefixtures("deep")
def test_adapters_and_drafts_go_together(mtp: Tried, tmp_path: Path) -> None:
    """Requests with an adapter and without have their own text and drafts."""
    lora = write_lora(tmp_path / "lora.gguf", mtp.spec)
    with (
        Model.load(mtp.path, draft_heads=True) as model,  # which has all tensors of the adapter
        LLM(model, lora={"one": lora}, **SMALL) as plain,
        mtp.llm(lora={"one": lora}) as llm,
    ):
        for options in ({"lora": {"one": 1.0}}, {}):
            alone = plain.generate(PROMPTS[1], **GREEDY, **options)
            found = llm.generate(PROMPTS[1], **GREEDY, **options)
            assert found.usage.draft_tokens > 0
            assert list(found.token_ids) == list(alone.token_ids)


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("kind", ["eagle3", "hybrid"])
def test_text_behind_an_image_has_drafts(tiny_models: TinyModels, kind: str) -> None:
    """The output is the same as without; the hybrid's positions leave some out after the image (M-RoPE)."""
    tried = Tried(tiny_models, kind)
    mmproj = tiny_models(LlavaVisionSpec() if kind == "eagle3" else Qwen25VisionSpec())
    prompt = ["Hello", Image(picture(1, 150, 90)), PROMPTS[1]]
    with tried.plain(mmproj=mmproj) as plain, tried.llm(mmproj=mmproj) as llm:
        expected = plain.generate(prompt, **GREEDY)
        for _ in range(2):
            found = llm.generate(prompt, **GREEDY)
            assert found.token_ids == expected.token_ids
            assert found.usage.draft_tokens > 20
            assert found.usage.accepted_tokens > 0


@pytest.mark.usefixtures("deep")
def test_improbable_tokens_are_not_drafted(mtp: Tried) -> None:
    """Nothing is as probable as p_min=1 asks for; with a bound between, fewer drafts are wrong."""
    shares = []
    for p_min in (0.0, 0.5, 1.0):
        with mtp.llm(speculation={"name": "mtp", "p_min": p_min}) as llm:
            usage = llm.generate(PROMPTS[1], **GREEDY).usage
            shares.append(usage.accepted_tokens / usage.draft_tokens if usage.draft_tokens else None)
    assert shares[2] is None
    assert shares[0] is not None and shares[1] is not None and shares[1] > shares[0]


@pytest.mark.usefixtures("deep")
def test_a_model_that_was_loaded_before_brings_its_heads(mtp: Tried) -> None:
    """It was loaded with them, or is refused."""
    with Model.load(mtp.path, draft_heads=True) as model, LLM(model, speculation="mtp", **SMALL) as llm:
        assert llm.generate(PROMPTS[0], **GREEDY).usage.draft_tokens > 0
    with Model.load(mtp.path) as model, pytest.raises(Unsupported, match="draft_heads=True"):
        LLM(model, speculation="mtp", **SMALL)


def test_estimates_have_the_heads(tried: Tried) -> None:
    """Weights and cache of heads in the model's file from its header, of heads in another file by a plan."""
    for dry_run in (True, False) if tried.kind not in FILES else (True,):
        without = estimate_memory(tried.path, dry_run=dry_run)
        estimate = estimate_memory(tried.path, dry_run=dry_run, speculation=tried.speculation)
        assert estimate.weights_bytes > without.weights_bytes
        assert estimate.cache_bytes > without.cache_bytes
    if tried.kind != "eagle3":
        plan = estimate_memory(tried.path, speculation=tried.speculation)
        assert plan.cache_bytes == estimate.cache_bytes
        assert abs(plan.weights_bytes - estimate.weights_bytes) < 0.01 * plan.weights_bytes


@pytest.mark.parametrize(
    ("kind", "speculation", "error", "says"),
    [
        ("llama", "mtp", Unsupported, "has no next-token-prediction heads"),
        ("llama", "mtp:model={hy_v3}", InvalidParams, "hy_v3 has no draft heads for a model of llama"),
        ("llama", "eagle3:model={llama}", InvalidParams, "has the architecture llama, and not eagle3"),
        ("hy_v3", "eagle3:model={eagle3}", Unsupported, "no hidden states of layers of the architecture hy_v3"),
        (
            "llama",
            "mtp:model={eagle3}",
            InvalidParams,
            "has the architecture eagle3, and not llama; .*EAGLE-3 files go with",
        ),
        ("llama", "eagle3", InvalidParams, "eagle3:model=FILE"),
        ("llama", "dflash:model={eagle3}", InvalidParams, "has the architecture eagle3, and not dflash"),
        ("hy_v3", "dflash:model={dflash}", Unsupported, "no hidden states of layers of the architecture hy_v3"),
        ("llama", "dflash:model={dflash}", InvalidParams, "or the model has no such layer"),
        ("llama", "eagle3:model=/none/there.gguf", ModelLoadError, "none/there.gguf"),
        ("hy_v3", "mtp:p_min=2", InvalidParams, "p_min"),
        ("hy_v3", "mtp:depth=2", InvalidParams, "depth"),
        ("hy_v3", {"name": "mtp", "model": 3}, InvalidParams, "model"),
    ],
)
def test_heads_that_are_not_there_or_do_not_fit_are_refused(
    tiny_models: TinyModels, kind: str, speculation: Any, error: type[Exception], says: str
) -> None:
    """When the model is loaded, with the reason."""
    if isinstance(speculation, str):
        dflash = tiny_models(DFlashSpec(target_layers=(0, 9)))
        paths = {
            "dflash": dflash,
            "hy_v3": tiny_models("hy_v3"),
            "llama": tiny_models("llama"),
            "eagle3": tiny_models(Eagle3Spec()),
        }
        speculation = speculation.format(**paths)
    with pytest.raises((error, TypeError), match=says):
        LLM(tiny_models(kind), speculation=speculation, **SMALL)
