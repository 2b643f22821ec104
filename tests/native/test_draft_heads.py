"""Draft heads on llama.cpp: their drafts, and their memory, which follows every change of the model's memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.native.conftest import TinyModels
from tests.sweeps import sampled

from paceline.errors import InvalidParams, InvalidType, ModelLoadError, NoKvSlot, PacelineError, StateError, Unsupported
from paceline.params import SamplingParams
from paceline.runtime import (
    CellState,
    Context,
    DraftWish,
    MemoryClass,
    Model,
    Sampler,
    StepRow,
    memory_in_use,
    plan_memory,
)
from paceline.testing.models import DFlashSpec, Eagle3Spec, HunYuan3Spec, LlamaSpec, Mimo2Spec, Qwen35Spec, write_lora

pytestmark = pytest.mark.native

Array = npt.NDArray[np.float32]

SIZES: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "n_outputs_max": 64, "n_threads": 1}
EXACT: dict[str, Any] = {**SIZES, "swa_full": True, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
SCRATCH = 3
MODELS = {
    "hy_v3": HunYuan3Spec(),
    "chained": HunYuan3Spec(n_heads=3),
    "own-output": HunYuan3Spec(own_output=True),
    "qwen35": Qwen35Spec(),
    "eagle3": LlamaSpec(n_layer=3),
    "window": Mimo2Spec(n_heads=3),
    "dflash": LlamaSpec(n_layer=3),
    "dspark": LlamaSpec(n_layer=3),
    "dspark-behind": LlamaSpec(n_layer=3),
}
HEADS = {
    "eagle3": Eagle3Spec(),
    "dflash": DFlashSpec(n_layer=2, target_layers=(0, 2, 3), window=16),
    "dspark": DFlashSpec(markov_rank=16, block_size=4),
    "dspark-behind": DFlashSpec(markov_rank=16, block_size=5, from_anchor=False),
}
CUTTABLE = ["hy_v3", "chained", "eagle3", "window", "dflash", "dspark", "dspark-behind"]
BLOCKS = ["dflash", "dspark", "dspark-behind"]
PROMPT = [257, 72, 101, 108, 108, 111, 32, 119, 111, 114]


def held_by_heads(context: Context, seq_id: int) -> int:
    """Positions of a sequence that its heads hold."""
    return context.native.heads_positions(seq_id)[1] + 1


class Loaded:
    """A model with its heads, and contexts with them."""

    def __init__(self, tiny_models: TinyModels, kind: str) -> None:
        self.model = Model.load(tiny_models(MODELS[kind]), draft_heads=True)
        self.heads = Model.load(tiny_models(HEADS[kind])) if kind in HEADS else self.model
        self.shift = 1 if kind == "eagle3" else 0
        self.keeps_rows = kind not in BLOCKS

    def context(self, **options: Any) -> Context:
        return Context(self.model, draft_heads=self.heads, **{**EXACT, **options})

    def from_scratch(self, tokens: list[int], depth: int) -> list[int]:
        """Drafts behind tokens that were computed at once, but for the newest one."""
        with self.context() as context:
            context.decode(tokens[:-1], wants_logits="none")
            return context.draft([DraftWish(0, len(tokens) - 1, tokens[-1], depth)])[0]

    def check(self, context: Context, seq_id: int, tokens: list[int], *, is_exact: bool = True) -> None:
        """Check that a sequence holds tokens in both memories and has the drafts that it has from scratch."""
        held, of_heads = context.positions(seq_id), held_by_heads(context, seq_id)
        assert held is not None
        assert held.last + 1 == len(tokens)
        assert of_heads == len(tokens) - self.shift
        (drafts,) = context.draft([DraftWish(seq_id, len(tokens), 65, 3)])
        assert len(drafts) == 3 or not is_exact  # no last hidden row, no drafts
        assert drafts == self.from_scratch([*tokens, 65], 3) or not is_exact
        assert held_by_heads(context, seq_id) == of_heads


@pytest.fixture(scope="module", params=list(MODELS))
def loaded(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Loaded:
    return Loaded(tiny_models, request.param)


@pytest.fixture(scope="module", params=CUTTABLE)
def cuttable(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Loaded:
    return Loaded(tiny_models, request.param)


@pytest.fixture(scope="module")
def hunyuan(tiny_models: TinyModels) -> Loaded:
    return Loaded(tiny_models, "hy_v3")


# ---- a reference: HunYuan 3's head in NumPy


class HeadInNumpy:
    """One dense head after its definition: the newest token's embedding beside the hidden row of the token before."""

    def __init__(self, path: Any, spec: HunYuan3Spec) -> None:
        from gguf import GGUFReader

        self.at: dict[str, Array] = {
            tensor.name: np.array(tensor.data, np.float32) for tensor in GGUFReader(path).tensors
        }
        self.spec, self.block = spec, f"blk.{spec.n_layer}"

    def __getitem__(self, name: str) -> Array:
        return self.at[f"{self.block}.{name}.weight"]

    def rows(self, tokens: list[int], hidden: Array) -> Array:
        """Return the head's hidden rows, for tokens with the hidden row before each: (n, n_embd)."""
        spec, size = self.spec, self.spec.head_size
        embedded = _normed(self.at["token_embd.weight"][tokens], self["nextn.enorm"])
        x = np.concatenate([embedded, _normed(hidden, self["nextn.hnorm"])], axis=1) @ self["nextn.eh_proj"].T
        y = _normed(x, self["attn_norm"])
        query, key, value = (
            (y @ self[name].T).reshape(len(tokens), -1, size) for name in ("attn_q", "attn_k", "attn_v")
        )
        query = _rotated(_normed(query, self["attn_q_norm"]))
        key = _rotated(_normed(key, self["attn_k_norm"]))
        per_key = spec.n_head // spec.n_head_kv
        out = np.zeros_like(query)
        for head in range(spec.n_head):
            scores = query[:, head] @ key[:, head // per_key].T / size**0.5
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ value[:, head // per_key]
        x = x + out.reshape(len(tokens), -1) @ self["attn_output"].T
        y = _normed(x, self["ffn_norm"])
        gate = y @ self["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ self["ffn_up"].T)) @ self["ffn_down"].T
        return _normed(x, self["nextn.shared_head_norm"])


def _normed(x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight
    return normed


def _rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


@pytest.mark.parametrize("kind", ["hy_v3", "own-output"])
def test_drafts_match_the_heads_definition(tiny_models: TinyModels, kind: str) -> None:
    """The first position has no hidden row before it, drafts go on with the head's own rows."""
    hunyuan, spec = Loaded(tiny_models, kind), MODELS[kind]
    assert isinstance(spec, HunYuan3Spec)
    head = HeadInNumpy(hunyuan.model.paths[0], spec)
    output = head["nextn.shared_head_head"] if spec.own_output else head.at["output.weight"]
    tokens = [*PROMPT, 65]
    with Context(hunyuan.model, embeddings=True, pooling="none", **EXACT) as context:
        context.decode(PROMPT, wants_logits="all")
        hidden = np.stack([np.zeros(spec.n_embd, np.float32), *(context.embeddings(i) for i in range(len(PROMPT)))])
    expected = []
    for _ in range(4):
        row = head.rows(tokens, hidden)[-1]
        expected.append(int((output @ row).argmax()))
        tokens, hidden = [*tokens, expected[-1]], np.vstack([hidden, row])
    assert hunyuan.from_scratch([*PROMPT, 65], 4) == expected


class BlockInNumpy:
    """A DFlash file of one layer over the model's embeddings, and the Markov head of a DSpark file."""

    def __init__(self, path: Any, model_path: Any, spec: DFlashSpec) -> None:
        from gguf import GGUFReader

        borrowed = ("token_embd.weight", "output.weight")
        self.at: dict[str, Array] = {
            tensor.name: np.array(tensor.data, np.float32)
            for of_file in (model_path, path)
            for tensor in GGUFReader(of_file).tensors
            if of_file is path or tensor.name in borrowed
        }
        self.of_model = np.array(
            next(tensor.data for tensor in GGUFReader(model_path).tensors if tensor.name == borrowed[0])
        )
        self.spec = spec

    def __getitem__(self, name: str) -> Array:
        return self.at[f"{name}.weight"]

    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Return the drafts behind tokens, of which the newest one begins the block."""
        first = 0 if self.spec.markov_rank and self.spec.from_anchor is not False else 1
        block = [tokens[-1], *[self.spec.mask_id or 0] * (num_drafts - 1 + first)]
        logits = _normed(self.rows(tokens[:-1], block), self["output_norm"]) @ self["output"].T
        found, newest = [], tokens[-1]
        for row in logits[first:]:
            biased = row + self["markov_w2"] @ self["markov_w1"][newest] if self.spec.markov_rank else row
            newest = int(biased.argmax())
            newest = self.spec.draft_ids[newest] if self.spec.draft_ids else newest
            found.append(newest)
        return found

    def rows(self, before: list[int], block: list[int]) -> Array:
        """Return the layer's output for a block; its tokens attend to all that was before, and to the block as the file says."""
        features = _normed(self.of_model[before] @ self["fc"].T, self["enc.output_norm"])
        x = self["token_embd"][block]
        seen = np.concatenate([features, _normed(x, self["blk.0.attn_norm"])])
        query, key, value = (
            (seen @ self[f"blk.0.attn_{name}"].T).reshape(len(seen), -1, self.spec.head_size) for name in "qkv"
        )
        query = _rotated(_normed(query, self["blk.0.attn_q_norm"]))[len(before) :]
        key = _rotated(_normed(key, self["blk.0.attn_k_norm"]))
        per_key = self.spec.n_head // self.spec.n_head_kv
        key, value = np.repeat(key, per_key, axis=1), np.repeat(value, per_key, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / self.spec.head_size**0.5
        if self.spec.is_causal:
            scores[:, *np.triu_indices(len(block), len(before) + 1, len(seen))] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), value)
        x = x + out.reshape(len(block), -1) @ self["blk.0.attn_output"].T
        y = _normed(x, self["blk.0.ffn_norm"])
        gate = y @ self["blk.0.ffn_gate"].T
        rows: Array = x + (gate / (1 + np.exp(-gate)) * (y @ self["blk.0.ffn_up"].T)) @ self["blk.0.ffn_down"].T
        return rows


_DRAFT_IDS = tuple(range(250, 10, -3))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"is_causal": False},
        {"draft_ids": _DRAFT_IDS},
        {"borrows": False},
        {"is_mrope": True},
        {"markov_rank": 16},
        {"markov_rank": 16, "from_anchor": True, "is_causal": True},
        {"markov_rank": 16, "from_anchor": False},
        {"markov_rank": 16, "from_anchor": False, "draft_ids": _DRAFT_IDS, "confidence": True},
        {"markov_rank": 16, "draft_ids": _DRAFT_IDS, "borrows": False},
        {"markov_rank": 16, "confidence": True},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_blocks_match_their_definition(tiny_models: TinyModels, fields: dict[str, Any]) -> None:
    """Each of its own depth in one pass; with a Markov head all are computed as deep as the deepest. No more than a block."""
    spec = DFlashSpec(target_layers=(0,), block_size=6, layer_gain=3.0, **fields)
    model_path, path = tiny_models(LlamaSpec(n_layer=3)), tiny_models(spec)
    reference = BlockInNumpy(path, model_path, spec)
    most = 6 if spec.markov_rank and spec.from_anchor is not False else 5
    prompts, depths = [PROMPT, PROMPT[:4], PROMPT[2:9]], [3, most, 1]
    with Context(Model.load(model_path, draft_heads=True), draft_heads=Model.load(path), **EXACT) as context:
        for seq_id, prompt in enumerate(prompts):
            context.decode(prompt, seq_ids=seq_id, wants_logits="none")
        wishes = [DraftWish(seq_id, len(prompts[seq_id]), 65, depth) for seq_id, depth in enumerate((3, 9, 1))]
        computed = [most] * 3 if spec.markov_rank else depths
        whole = [reference.drafts([*prompt, 65], size) for prompt, size in zip(prompts, computed, strict=True)]
        assert context.draft(wishes) == [drafts[:depth] for drafts, depth in zip(whole, depths, strict=True)]
        assert context.draft(wishes, min_probability=1.0) == [[]] * 3


@pytest.mark.parametrize(("n_layer", "window"), [(1, 0), (5, 0), (5, 16), (8, 16), (12, 0)])
@pytest.mark.parametrize("draft_ids", [(), _DRAFT_IDS], ids=["all", "some"])
@pytest.mark.parametrize("confidence", [False, True])
def test_a_markov_head_drafts_what_the_graph_has_room_for(
    tiny_models: TinyModels,
    caplog: pytest.LogCaptureFixture,
    n_layer: int,
    window: int,
    draft_ids: tuple[int, ...],
    confidence: bool,
) -> None:
    """Of the longest block that a file may have, when it is loaded too; a warning says how many tokens that are."""
    sizes = {"n_embd": 128, "n_head": 4, "n_head_kv": 4}
    fields = {"draft_ids": draft_ids, "confidence": confidence, "window": window, "n_layer": n_layer}
    spec = DFlashSpec(block_size=64, markov_rank=16, **sizes, **fields)
    options = {**SIZES, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}  # rotated, with the largest graph
    target = Model.load(tiny_models(LlamaSpec(n_layer=3, **sizes)))
    with caplog.at_level("WARNING"), Context(target, draft_heads=Model.load(tiny_models(spec)), **options) as context:
        context.decode(PROMPT, wants_logits="none")
        context.decode(PROMPT, seq_ids=1, wants_logits="none")
        found = context.draft([DraftWish(seq_id, len(PROMPT), 65, 64) for seq_id in (0, 1)])
    assert len(found[0]) == len(found[1])
    assert len(found[0]) >= 8
    assert (len(found[0]) < 64) == (f"of blocks of 64 tokens {len(found[0])} are drafted" in caplog.text)


@pytest.mark.parametrize("markov_rank", [0, 16])
def test_blocks_beyond_a_ubatch_are_refused(tiny_models: TinyModels, markov_rank: int) -> None:
    """Before anything is allocated; a file of just that size drafts whole blocks."""
    target = Model.load(tiny_models(LlamaSpec(n_layer=3)))
    heads = Model.load(tiny_models(DFlashSpec(block_size=32, markov_rank=markov_rank)))
    sizes = {**EXACT, "n_batch": 128, "n_ubatch": 16}
    for make in (Context, plan_memory):
        with pytest.raises(
            InvalidParams, match="n_ubatch is 16, and the DFlash file drafts blocks of 32 .* raise it to 32"
        ):
            make(target, draft_heads=heads, **sizes)
        with pytest.raises(InvalidParams, match="n_ubatch is 16"):
            make(target, draft_heads=heads, **{**sizes, "n_batch": 16, "n_outputs_max": 16})
    with Context(target, draft_heads=heads, **{**sizes, "n_ubatch": 32}) as context:
        for seq_id in (0, 1):
            context.decode(PROMPT, seq_ids=seq_id, wants_logits="none")
        found = context.draft([DraftWish(seq_id, len(PROMPT), 65, 63) for seq_id in (0, 1)])
        assert [len(item) for item in found] == [32 if markov_rank else 31] * 2


# ---- mirrored memory


def test_tokens_one_by_one_leave_what_all_at_once_leave(loaded: Loaded) -> None:
    """In chunks, beside other sequences, token by token."""
    with loaded.context() as context:
        context.decode([*PROMPT[:4], 1, 2], seq_ids=[0, 0, 0, 0, 1, 1], wants_logits="none")
        for token in PROMPT[4:]:
            context.decode([token, token], seq_ids=[0, 1], wants_logits="none")
        loaded.check(context, 0, PROMPT)
        loaded.check(context, 1, [1, 2, *PROMPT[4:]])


def test_tokens_of_sequences_that_alternate_go_with_their_own_rows(loaded: Loaded) -> None:
    """A pass need not have the tokens of a sequence side by side."""
    with loaded.context() as context:
        context.decode(
            [token for item in PROMPT for token in (item, item + 1)], seq_ids=[0, 1] * 10, wants_logits="none"
        )
        loaded.check(context, 0, PROMPT)
        loaded.check(context, 1, [token + 1 for token in PROMPT])


def test_a_pass_of_several_ubatches_is_followed(loaded: Loaded) -> None:
    """Hidden rows of the whole pass exist, not only those of its last part."""
    prompt = [random.Random(1).randrange(250) for _ in range(150)]
    with loaded.context(n_batch=256, n_ubatch=32) as context:
        context.decode(prompt, wants_logits="none")
        loaded.check(context, 0, prompt)


def test_wrong_drafts_are_cut_from_both_memories(cuttable: Loaded) -> None:
    """The hidden row behind which drafting goes on is that of the last right token."""
    with cuttable.context() as context, Sampler(SamplingParams(temperature=0), cuttable.model) as sampler:
        tokens = list(PROMPT)
        context.decode(tokens)
        likeliest = int(context.logits(len(tokens) - 1).argmax())
        for wrong in ([likeliest], [3, 4, 5], []):
            newest = 65
            row = StepRow(
                seq_id=0, position=len(tokens), token_ids=[newest, *wrong], num_drafts=len(wrong), samplers=(sampler,)
            )
            drawn = list(context.step([row]).rows[0].draws[0].token_ids)
            tokens += [newest, *drawn[:-1]]
            cuttable.check(context, 0, tokens)


def test_right_drafts_stay(cuttable: Loaded) -> None:
    """Both memories hold them, and the hidden row is the last one's."""
    with cuttable.context() as context, Sampler(SamplingParams(temperature=0), cuttable.model) as sampler:
        context.decode(PROMPT[:-1], wants_logits="none")
        right = []
        for position in range(len(PROMPT) - 1, len(PROMPT) + 4):
            context.decode([PROMPT[-1] if position == len(PROMPT) - 1 else right[-1]])
            right.append(int(context.logits(0).argmax()))
        context.remove(0)
        context.decode(PROMPT[:-1], wants_logits="none")
        drafts = [*right[:3], (right[3] + 1) % 250, 7]
        row = StepRow(
            seq_id=0, position=len(PROMPT) - 1, token_ids=[PROMPT[-1], *drafts], num_drafts=5, samplers=(sampler,)
        )
        drawn = context.step([row]).rows[0].draws[0].token_ids
        assert list(drawn) == right[:4]
        cuttable.check(context, 0, [*PROMPT, *right[:3]])
        context.remove(0, len(PROMPT) + 1)  # what follows a stop is cut before the next pass
        cuttable.check(context, 0, [*PROMPT, right[0]])


def test_a_row_that_is_taken_back_leaves_both_memories_before_it(tiny_models: TinyModels) -> None:
    """Recurrent layers go back by the row; the heads go on behind the hidden row before it."""
    loaded = Loaded(tiny_models, "qwen35")
    with loaded.context() as context, Sampler(SamplingParams(temperature=0), loaded.model) as sampler:
        context.decode(PROMPT, wants_logits="none")
        tokens = list(PROMPT)
        for wrong in ([3, 4, 5], [6]):
            row = StepRow(
                seq_id=0, position=len(tokens), token_ids=[65, *wrong], num_drafts=len(wrong), samplers=(sampler,)
            )
            draws = context.step([row]).rows[0].draws[0]
            assert draws.is_taken_back
            loaded.check(context, 0, tokens)
            drawn = list(draws.token_ids)
            row = StepRow(seq_id=0, position=len(tokens), token_ids=[65, *drawn], samplers=(sampler,))
            context.step([row])
            tokens += [65, *drawn]
            loaded.check(context, 0, tokens)


def test_copies_draft_as_their_sources(loaded: Loaded) -> None:
    """A whole copy has the last hidden row as well; the source may go."""
    with loaded.context() as context:
        context.decode(PROMPT, wants_logits="none")
        context.copy(0, 1)
        context.remove(0)
        loaded.check(context, 1, PROMPT)
        assert held_by_heads(context, 0) == 0
        context.copy(1, 2)
        context.decode([7, 8], seq_ids=[1, 2], wants_logits="none")
        loaded.check(context, 1, [*PROMPT, 7])
        loaded.check(context, 2, [*PROMPT, 8])


def test_a_shared_prefix_is_followed_without_its_last_hidden_row(cuttable: Loaded) -> None:
    """Drafts come with the next pass, of blocks at once; the single position costs nothing else."""
    with cuttable.context() as context:
        context.decode(PROMPT, wants_logits="none")
        context.copy(0, 1, 0, 6)
        cuttable.check(context, 1, PROMPT[:6], is_exact=False)
        (drafts,) = context.draft([DraftWish(1, 6, 5, 3)])
        assert drafts == ([] if cuttable.keeps_rows else cuttable.from_scratch([*PROMPT[:6], 5], 3))
        context.decode([5], seq_ids=1, wants_logits="none")
        cuttable.check(context, 1, [*PROMPT[:6], 5], is_exact=False)
        assert len(context.draft([DraftWish(1, 7, 5, 3)])[0]) == 3
        context.copy(0, 2, 0, 1)
        context.copy(0, 2, 1, len(PROMPT))
        cuttable.check(context, 2, PROMPT)


def test_saved_ranges_have_both_parts(loaded: Loaded) -> None:
    """Loaded, cut and loaded in two pieces; a hybrid's cells go with its state."""
    apart = loaded.model.memory_class is MemoryClass.HYBRID
    with loaded.context() as context:
        context.decode(PROMPT, wants_logits="none")
        size = len(PROMPT)
        whole = context.save_cells(0, 0, size, scratch_seq_id=SCRATCH)
        state = context.save_state(0, size) if apart else None
        first = context.cut_cells(whole, 0, 6, scratch_seq_id=SCRATCH)
        rest = context.cut_cells(whole, 6, size, scratch_seq_id=SCRATCH)
        for pieces in ([(whole, 0, size)], [(first, 0, 6), (rest, 6, size)], [(whole, 0, 1), (whole, 1, size)]):
            context.remove(0)
            for saved, start, end in pieces:
                context.load_cells(0, saved, start, end, scratch_seq_id=SCRATCH)
            if state is not None:
                context.load_state(0, state, size)
            loaded.check(context, 0, PROMPT)
        context.remove(1)
        if apart:
            context.copy_cells(0, 1, size)
            assert state is not None
            context.load_state(1, state, size)
            loaded.check(context, 1, PROMPT)


def test_saved_sequences_have_both_parts(loaded: Loaded) -> None:
    """They fit into another context with the same heads, and into none without."""
    with loaded.context() as context, Context(loaded.model, **EXACT) as without:
        context.decode(PROMPT, wants_logits="none")
        data = context.save_sequence(0, token_ids=PROMPT)
        context.clear()
        assert held_by_heads(context, 0) == 0
        assert context.load_sequence(2, data) == tuple(PROMPT)
        loaded.check(context, 2, PROMPT)
        with pytest.raises(StateError, match="another kind of context"):
            without.load_sequence(0, data)
        without.decode(PROMPT, wants_logits="none")
        with pytest.raises(StateError, match="another kind of context"):
            context.load_sequence(0, without.save_sequence(0))
        loaded.check(context, 2, PROMPT)


def test_a_partial_state_takes_both_memories_back(tiny_models: TinyModels) -> None:
    """A hybrid that has gone on returns to its saved state, the heads with it."""
    loaded = Loaded(tiny_models, "qwen35")
    with loaded.context() as context:
        context.decode(PROMPT, wants_logits="none")
        data = context.save_sequence(0, partial=True)
        context.decode([1, 2, 3], wants_logits="none")
        context.load_sequence(0, data)
        loaded.check(context, 0, PROMPT)


def test_heads_begin_anew_behind_an_image(loaded: Loaded) -> None:
    """They cannot read it, and draft from the text after it; changes of the sequence apply to that part."""
    image = np.random.default_rng(1).normal(size=(6, loaded.model.n_embd)).astype(np.float32)
    with loaded.context() as context, Context(loaded.model, **EXACT) as without:
        for item in (context, without):
            item.decode(PROMPT[:4], wants_logits="none")
            item.decode_embeddings(0, 4, image)
        assert context.draft([DraftWish(0, 10, 65, 3)]) == [[]]
        for item in (context, without):
            item.decode(PROMPT, positions=list(range(10, 20)))
        assert np.allclose(context.logits(9), without.logits(9), atol=1e-4)
        first, last = 10 - loaded.shift, 19 - loaded.shift
        assert context.native.heads_positions(0) == (first, last)
        (drafts,) = context.draft([DraftWish(0, 20, 65, 3)])
        assert len(drafts) == 3
        context.copy(0, 1)
        assert context.draft([DraftWish(1, 20, 65, 3)]) == [drafts]
        data = context.save_sequence(0)
        context.remove(0)
        context.load_sequence(0, data)
        assert context.draft([DraftWish(0, 20, 65, 3)]) == [drafts]
        assert context.native.heads_positions(0) == (first, last)
        context.decode([7, 8], positions=[20, 21], seq_ids=0, wants_logits="none")
        assert context.native.heads_positions(0) == (first, last + 2)


def test_ranges_with_an_image_have_no_part_of_the_heads(cuttable: Loaded) -> None:
    """Loaded again, the heads begin with the next token, whether the range ends in the image or behind it."""
    image = np.random.default_rng(1).normal(size=(6, cuttable.model.n_embd)).astype(np.float32)
    with cuttable.context() as context:
        context.decode(PROMPT[:4], wants_logits="none")
        context.decode_embeddings(0, 4, image)
        context.decode(PROMPT, positions=list(range(10, 20)))
        for end in (7, 10, 15, 20):
            context.remove(1)
            saved = context.save_cells(0, 0, end, scratch_seq_id=SCRATCH)
            context.load_cells(1, saved, 0, end, scratch_seq_id=SCRATCH)
            assert held_by_heads(context, 1) == 0
            context.decode([1, 2], positions=[end, end + 1], seq_ids=1, wants_logits="none")
            assert len(context.draft([DraftWish(1, end + 2, 65, 3)])[0]) == 3
            context.remove(1, end + 1)
            assert context.native.heads_positions(1)[1] == end - cuttable.shift
        context.remove(2)
        context.copy(0, 2, 0, 12)
        context.decode([1], positions=[12], seq_ids=2, wants_logits="none")
        assert len(context.draft([DraftWish(2, 13, 65, 3)])[0]) == 3


@pytest.mark.parametrize("seed", sampled(range(4), every=4))
def test_memories_stay_the_same_whatever_is_done(cuttable: Loaded, seed: int) -> None:
    """Random passes, cuts, copies, saves and loads of three sequences."""
    chance = random.Random(seed)
    known: dict[int, list[int]] = {0: [], 1: [], 2: []}
    exact = dict.fromkeys(known, True)
    with cuttable.context() as context:
        for _ in range(40):
            seq_id, other = chance.sample(sorted(known), 2)
            tokens = known[seq_id]
            match chance.choice(["decode", "decode", "cut", "copy", "load", "remove"]):
                case "decode":
                    added = [chance.randrange(250) for _ in range(chance.randrange(1, 9))]
                    context.decode(added, seq_ids=seq_id, wants_logits="none")
                    tokens += added
                case "cut" if len(tokens) > 1:
                    end = chance.randrange(1, len(tokens))
                    context.remove(seq_id, end)
                    del tokens[end:]
                    exact[seq_id] = False  # the row is there only if the last pass had it
                case "copy" if tokens:
                    end = chance.choice([len(tokens), chance.randrange(1, len(tokens) + 1)])
                    context.remove(other)
                    context.copy(seq_id, other, 0, end)
                    known[other], exact[other] = tokens[:end], exact[seq_id] and end == len(tokens)
                case "load" if tokens:
                    start = chance.randrange(len(tokens))
                    saved = context.save_cells(seq_id, start, len(tokens), scratch_seq_id=SCRATCH)
                    kept = context.save_cells(seq_id, 0, start, scratch_seq_id=SCRATCH) if start else None
                    context.remove(seq_id)
                    if kept is not None:
                        context.load_cells(seq_id, kept, 0, start, scratch_seq_id=SCRATCH)
                    context.load_cells(seq_id, saved, start, len(tokens), scratch_seq_id=SCRATCH)
                case "remove":
                    context.remove(seq_id)
                    tokens.clear()
                    exact[seq_id] = True
            for entry, its in known.items():
                if its:
                    cuttable.check(context, entry, its, is_exact=exact[entry])


# ---- what goes wrong


def test_a_failed_pass_changes_neither_memory(hunyuan: Loaded) -> None:
    """No cells are left for it."""
    with hunyuan.context(n_ctx=256, n_batch=256) as context:
        context.decode(PROMPT, wants_logits="none")
        context.decode([5] * 200, seq_ids=1, wants_logits="none")
        with pytest.raises(PacelineError, match="no free cells"):
            context.decode([1] * 100, wants_logits="none")
        hunyuan.check(context, 0, PROMPT)


def test_drafts_without_free_cells_are_an_error_that_changes_nothing(cuttable: Loaded) -> None:
    """Of all sequences of the call, also if the first drafts had found cells; with cells they have drafts again."""
    with cuttable.context(n_ctx=256, n_batch=256) as context:
        context.decode(PROMPT, wants_logits="none")
        context.decode(PROMPT, seq_ids=1, wants_logits="none")
        free = 256 - 2 * (len(PROMPT) - cuttable.shift)
        context.decode([5] * (free - 3 + cuttable.shift), seq_ids=2, wants_logits="none")
        wishes = [DraftWish(seq_id, len(PROMPT), 65, 3) for seq_id in (0, 1)]
        for _ in range(2):
            with pytest.raises(NoKvSlot, match="drafting failed"):
                context.draft(wishes)
            assert [held_by_heads(context, case) for case in (0, 1)] == [len(PROMPT) - cuttable.shift] * 2
        context.remove(2)
        cuttable.check(context, 0, PROMPT)
        cuttable.check(context, 1, PROMPT)


def test_a_damaged_part_of_the_heads_costs_drafts_alone(cuttable: Loaded) -> None:
    """The sequence decodes as before; the heads begin with its next token, and draft as if there were none before."""
    with cuttable.context() as context:
        context.decode(PROMPT)
        expected = context.logits(len(PROMPT) - 1)
        saved = context.save_cells(0, 0, 9, scratch_seq_id=SCRATCH)
        damaged = saved.payload.copy()
        (size,) = damaged[8:16].view(np.uint64)
        damaged[32 + int(size) :][:40] = 255
        damaged.flags.writeable = False
        context.remove(0)
        context.load_cells(0, CellState(0, 9, damaged), 0, 9, scratch_seq_id=SCRATCH)
        assert held_by_heads(context, 0) == 0
        assert context.draft([DraftWish(0, 9, 65, 3)]) == [[]]
        context.decode(PROMPT[9:])
        assert np.allclose(context.logits(0), expected, atol=1e-3)
        assert context.native.heads_positions(0) == (9 - cuttable.shift, 9 - cuttable.shift)
        assert len(context.draft([DraftWish(0, len(PROMPT), 65, 3)])[0]) == 3
        context.remove(0)
        context.decode(PROMPT, wants_logits="none")
        cuttable.check(context, 0, PROMPT)


def test_states_that_are_no_frames_are_refused(hunyuan: Loaded) -> None:
    """Of a context without heads, cut off, or with sizes beyond their end."""
    with hunyuan.context() as context, Context(hunyuan.model, **EXACT) as without:
        for item in (context, without):
            item.decode(PROMPT, wants_logits="none")
        plain = without.save_cells(0, 0, 4, scratch_seq_id=SCRATCH)
        framed = context.save_cells(0, 0, 4, scratch_seq_id=SCRATCH)
        endless = framed.payload.copy()
        endless[16:24] = 255
        endless.flags.writeable = False
        for payload in (plain.payload, framed.payload[:20].copy(), endless):
            payload.flags.writeable = False
            with pytest.raises(StateError, match="without draft heads|damaged"):
                context.load_cells(1, CellState(0, 4, payload), 0, 4, scratch_seq_id=SCRATCH)
            assert context.positions(1) is None
        hunyuan.check(context, 0, PROMPT)


@pytest.mark.parametrize(
    ("wishes", "options", "message"),
    [
        ([DraftWish(4, 10, 1, 1)], {}, r"seq_id must be in \[0, 4\)"),
        ([DraftWish(0, 10, 999999, 1)], {}, "token_id must be in"),
        ([DraftWish(0, 10, 1, 0)], {}, "max_tokens at least 1"),
        ([DraftWish(0, -1, 1, 1)], {}, "position must be in"),
        ([DraftWish(0, 10, 1, 1)] * 2, {}, "wants drafts twice"),
        ([DraftWish(0, 10, 1, 1)], {"min_probability": 2}, "min_probability"),
    ],
)
def test_bad_wishes_are_refused(
    hunyuan: Loaded, wishes: list[DraftWish], options: dict[str, Any], message: str
) -> None:
    with hunyuan.context() as context:
        context.decode(PROMPT, wants_logits="none")
        with pytest.raises(InvalidParams, match=message):
            context.draft(wishes, **options)
        with pytest.raises(InvalidType, match="integers"):
            context.draft([DraftWish(0, 10, "a", 1)])  # type: ignore[arg-type]
        hunyuan.check(context, 0, PROMPT)


def test_wishes_that_no_heads_can_follow_are_empty(hunyuan: Loaded) -> None:
    """Another position than the sequence's end, an empty sequence, improbable tokens, the end of the context."""
    with hunyuan.context(n_ctx=256, n_batch=256) as context:
        context.decode(PROMPT, wants_logits="none")
        assert context.draft([DraftWish(0, 9, 1, 2), DraftWish(1, 0, 1, 2)]) == [[], []]
        assert context.draft([DraftWish(0, 10, 1, 2)], min_probability=1.0) == [[]]
        context.decode([5] * (254 - len(PROMPT)), wants_logits="none")
        assert len(context.draft([DraftWish(0, 254, 1, 5)])[0]) == 2
        assert context.draft([]) == []


@pytest.mark.parametrize(
    ("fields", "room"), [({}, 2), ({"markov_rank": 16}, 3), ({"markov_rank": 16, "from_anchor": False}, 2)]
)
def test_blocks_end_with_the_context(tiny_models: TinyModels, fields: dict[str, Any], room: int) -> None:
    """At its last position; the other sequences of the call lose no more drafts than even blocks need."""
    model = Model.load(tiny_models(Qwen35Spec()))  # M-RoPE: positions may be left out
    heads = Model.load(tiny_models(DFlashSpec(is_mrope=True, **fields)))
    with Context(model, draft_heads=heads, **{**EXACT, "n_ctx": 256, "n_batch": 256}) as context:
        context.decode(PROMPT, positions=list(range(243, 253)), wants_logits="none")
        context.decode(PROMPT, seq_ids=1, wants_logits="none")
        for depth in (1, 2, 3, 4):
            at_end, other = context.draft([DraftWish(0, 253, 65, depth), DraftWish(1, len(PROMPT), 65, 4)])
            assert len(at_end) == min(depth, room)
            assert len(other) == (room if fields else 4)
        assert held_by_heads(context, 0) == 253
        assert len(context.draft([DraftWish(1, len(PROMPT), 65, 4)])[0]) == 4


def test_chained_heads_draft_as_many_tokens_as_there_are(tiny_models: TinyModels) -> None:
    loaded = Loaded(tiny_models, "chained")
    assert len(loaded.from_scratch([*PROMPT, 65], 9)) == 3


@pytest.mark.parametrize(
    ("model", "heads", "error", "message"),
    [
        (LlamaSpec(), None, Unsupported, "has no next-token-prediction heads"),
        (LlamaSpec(), HunYuan3Spec(), InvalidParams, "architecture hy_v3 has no draft heads for a model of llama"),
        (HunYuan3Spec(n_embd=32), HunYuan3Spec(), InvalidParams, "hidden rows of 64 values, and the model's have 32"),
        (LlamaSpec(), Eagle3Spec(target_layers=(0, 1, 3)), InvalidParams, "layers 0, 1 and 3, and the model has 2"),
        (LlamaSpec(), Eagle3Spec(target_layers=(0, 1, 1)), InvalidParams, "layers 0, 1 and 1"),
        (LlamaSpec(), Eagle3Spec(n_target=32), InvalidParams, "hidden states have 32 values, and this one's have 64"),
        (LlamaSpec(), Eagle3Spec(n_embd=32, n_head=2, n_head_kv=2), InvalidParams, "rows have 64 values, not 32"),
        (LlamaSpec(), Eagle3Spec(draft_ids=(1, 2, 999999)), InvalidParams, "d2t .* names token 999999"),
        (HunYuan3Spec(), Eagle3Spec(), Unsupported, "no hidden states of layers of the architecture hy_v3"),
        (LlamaSpec(), DFlashSpec(target_layers=(0, 3)), InvalidParams, "reads layer 3 .* it has 2"),
        (LlamaSpec(), DFlashSpec(target_layers=(1, 1)), InvalidParams, "reads layer 1 twice"),
        (
            LlamaSpec(),
            DFlashSpec(n_embd=32, n_head=2, n_head_kv=2),
            InvalidParams,
            "of 32 values, and the model's have 64",
        ),
        (LlamaSpec(), DFlashSpec(mask_id=None), InvalidParams, "no mask token"),
        (LlamaSpec(), DFlashSpec(block_size=65), InvalidParams, "from 2 to 64, not 65"),
        (LlamaSpec(), DFlashSpec(block_size=1), InvalidParams, "from 2 to 64, not 1"),
        (HunYuan3Spec(), DFlashSpec(), Unsupported, "no hidden states of layers of the architecture hy_v3 for DFlash"),
        (Qwen35Spec(n_heads=2), None, Unsupported, "one next-token-prediction head of the architecture qwen35, not 2"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tiny_models: TinyModels, model: Any, heads: Any, error: type[PacelineError], message: str
) -> None:
    """Before anything is allocated, and the model still works."""
    with Model.load(tiny_models(model), draft_heads=True) as loaded:
        others = loaded if heads is None else Model.load(tiny_models(heads), draft_heads=True)
        for make in (Context, plan_memory):
            with pytest.raises(error, match=message):
                make(loaded, draft_heads=others, **SIZES)
        with Context(loaded, **SIZES) as context:
            context.decode(PROMPT)
            with pytest.raises(Unsupported, match="made without draft heads"):
                context.draft([DraftWish(0, 10, 1, 1)])


def test_heads_that_were_not_loaded_are_refused(tiny_models: TinyModels) -> None:
    with (
        Model.load(tiny_models("hy_v3")) as model,
        pytest.raises(Unsupported, match="no blk.2.nextn.eh_proj.weight.*draft_heads=True"),
    ):
        Context(model, draft_heads=model, **SIZES)


def test_other_contexts_and_objects_are_refused(hunyuan: Loaded) -> None:
    with pytest.raises(InvalidParams, match="kv_unified=True"):
        hunyuan.context(kv_unified=False)
    with pytest.raises(InvalidParams, match="embeddings=False"):
        hunyuan.context(embeddings=True)
    with pytest.raises(InvalidType, match="draft_heads must be a Model"):
        Context(hunyuan.model, draft_heads="x", **SIZES)  # type: ignore[arg-type]


def test_an_eagle3_file_is_no_model_of_its_own(tiny_models: TinyModels) -> None:
    with Model.load(tiny_models(Eagle3Spec())) as model, pytest.raises((InvalidParams, Unsupported, ModelLoadError)):
        Context(model, n_ctx=256)


# ---- the rest of a context


def test_an_eagle3_draft_vocabulary_leads_into_the_models(tiny_models: TinyModels) -> None:
    """Drafts are tokens that it has."""
    ids = tuple(range(10, 90, 2))
    with (
        Model.load(tiny_models(LlamaSpec(n_layer=3))) as model,
        Model.load(tiny_models(Eagle3Spec(borrows=False, draft_ids=ids))) as heads,
        Context(model, draft_heads=heads, **EXACT) as context,
    ):
        context.decode(PROMPT, wants_logits="none")
        (drafts,) = context.draft([DraftWish(0, 10, 65, 8)])
        assert len(drafts) == 8
        assert set(drafts) <= set(ids)


def test_plans_and_sums_of_memory_have_the_heads_part(loaded: Loaded) -> None:
    sizes = {**SIZES, "n_ctx": 2048}
    without = plan_memory(loaded.model, **sizes)
    planned = plan_memory(loaded.model, draft_heads=loaded.heads, **sizes)
    assert sum(device.cache_bytes for device in planned.devices) > sum(device.cache_bytes for device in without.devices)
    with Context(loaded.model, draft_heads=loaded.heads, **sizes) as context:
        used = memory_in_use(context)
    assert [device.cache_bytes for device in used.devices] == [device.cache_bytes for device in planned.devices]
    assert [device.weights_bytes for device in used.devices] == [device.weights_bytes for device in planned.devices]


def test_adapters_and_threads_are_for_both(tiny_models: TinyModels, tmp_path: Any) -> None:
    """An adapter's part for the heads' layers applies to their drafts."""
    spec = HunYuan3Spec()
    path = write_lora(tmp_path / "lora.gguf", spec)
    loaded = Loaded(tiny_models, "hy_v3")
    adapter = loaded.model.load_adapter(path)
    with loaded.context() as context:
        context.decode(PROMPT, wants_logits="none")
        before = context.draft([DraftWish(0, 10, 65, 3)])
        context.set_threads(2, 1)
        context.set_adapters({adapter: 5.0})
        assert context.draft([DraftWish(0, 10, 65, 3)]) != before
        context.set_adapters({})
        assert context.draft([DraftWish(0, 10, 65, 3)]) == before


def test_logits_beside_heads_are_those_without(loaded: Loaded) -> None:
    """Hidden rows of all tokens leave rows of logits unchanged, hidden rows of some tokens too."""
    with loaded.context() as context, Context(loaded.model, **EXACT) as without:
        for wants in ("all", "last", [True, False] * 5):
            for item in (context, without):
                item.clear()
                item.decode(PROMPT, wants_logits=wants)  # type: ignore[arg-type]
            index = 8 if isinstance(wants, list) else 9
            assert np.allclose(context.logits(index), without.logits(index), atol=1e-4)


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[None]:
    """No sequence is left without drafts unless a test intends it."""
    yield
    if "damaged" not in request.node.name:
        assert "go on without drafts" not in caplog.text
