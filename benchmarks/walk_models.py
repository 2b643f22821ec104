"""Models with a next token that depends on the last token alone, and draft models and heads that are right for a set share.

Speculation is measured with them at an acceptance that is known: a target of Qwen 2.5 0.5B's shape walks through its vocabulary
in a random order, and a small draft model of the same order is wrong about every token of a random choice. Embeddings are so
large that layers hardly change them, and the output layer has the embedding of a token in the row of the next token. Draft heads
pass the newest token on to an output layer of their own, which is wrong about as many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.model import vocabulary_file, written
from paceline.testing.models import Eagle3Spec, HunYuan3Spec, LlamaSpec, ModelSpec, Qwen2Spec, copied, write_model

_EMBEDDING_SCALE = 50.0  # so that what layers add is small beside it
_BLOCK_BYTES = 34  # of Q8_0: a scale of 16 bits, and 32 bytes
_HALF_BILLION: dict[str, Any] = {
    "n_layer": 24, "n_embd": 896, "n_head": 14, "n_head_kv": 2, "n_ff": 4864, "n_ctx_train": 32768,
}  # fmt: skip
_HEAD_OUTPUT = "blk.24.nextn.shared_head_head.weight"

Ids = npt.NDArray[np.int64]


def target() -> Path:
    """Return the path of the target's file, written on first use: 0.6 GB."""
    spec = Qwen2Spec(**_HALF_BILLION, vocabulary=copied(vocabulary_file(None)))
    return written("walk-half-billion-q8_0.gguf", lambda path: _write(path, spec, 0.0))


def draft(acceptance: float) -> Path:
    """Return the path of the draft model that is right with this probability: 90 MB, a tenth of the target's weights a token."""
    spec = Qwen2Spec(n_layer=4, n_embd=256, n_head=4, n_head_kv=2, n_ff=1024, n_ctx_train=32768,
                     vocabulary=copied(vocabulary_file(None)))  # fmt: skip
    return written(f"walk-draft-{acceptance:g}-q8_0.gguf", lambda path: _write(path, spec, 1.0 - acceptance))


def target_with_head(acceptance: float) -> Path:
    """Return the path of a target of that size with a next-token-prediction head that is right so often: 0.8 GB, HunYuan 3."""
    vocabulary = copied(vocabulary_file(None))
    spec = HunYuan3Spec(**_HALF_BILLION, vocabulary=vocabulary, layer_gain=0.1, agrees=True, own_output=True)

    def write(path: Path) -> None:
        _write(path, spec, 0.0)
        tensors = _tensors(path)
        tensors[_HEAD_OUTPUT][:] = tensors["output.weight"]
        _lead_on(tensors[_HEAD_OUTPUT], tensors["token_embd.weight"], spec, 1.0 - acceptance)
        _flush(tensors)

    return written(f"walk-mtp-{acceptance:g}-q8_0.gguf", write)


def target_for_eagle() -> Path:
    """Return the path of a target of that size that EAGLE-3 can read: 0.7 GB, Llama."""
    spec = LlamaSpec(**_HALF_BILLION, vocabulary=copied(vocabulary_file(None)))
    return written("walk-llama-q8_0.gguf", lambda path: _write(path, spec, 0.0))


def eagle(acceptance: float) -> Path:
    """Return the path of an EAGLE-3 file for it that is right so often: 0.3 GB."""
    size = _HALF_BILLION | {"n_layer": 1, "n_head_kv": 14}
    vocabulary = copied(vocabulary_file(None))
    spec = Eagle3Spec(
        **size, vocabulary=vocabulary, n_target=896, target_layers=(2, 12, 21), borrows=False, agrees=True
    )

    def write(path: Path) -> None:
        write_model(path, spec, seed=1, weights="Q8_0")
        tensors, model = _tensors(path), _tensors(target_for_eagle())
        tensors["fc.weight"][:] = (
            0  # rows of the model are those of the token before, which it would draft from as well
        )
        tensors["token_embd.weight"][:] = model["token_embd.weight"]
        tensors["output.weight"][:] = model["output.weight"]
        _lead_on(tensors["output.weight"], model["token_embd.weight"], spec, 1.0 - acceptance)
        _flush(tensors)

    return written(f"walk-eagle3-{acceptance:g}-q8_0.gguf", write)


def following() -> list[int]:
    """Return the token that follows each; control tokens are followed by themselves."""
    vocabulary = copied(vocabulary_file(None))
    found = list(range(vocabulary.size))
    for token_id, after in zip(*_walk(vocabulary.size, vocabulary.control, 0.0), strict=True):
        found[token_id] = int(after)
    return found


def _write(path: Path, spec: ModelSpec, share_wrong: float) -> None:
    write_model(path, spec, seed=1, weights="Q8_0")
    tensors = _tensors(path)
    embeddings, outputs = tensors["token_embd.weight"], tensors["output.weight"]
    outputs[:] = embeddings  # control tokens have next to no weight
    _lead_on(outputs, embeddings, spec, share_wrong)
    scales = embeddings.reshape(len(embeddings), -1, _BLOCK_BYTES)[..., :2].copy().view(np.float16)
    scales = (scales.astype(np.float32) * _EMBEDDING_SCALE).astype(np.float16)
    embeddings.reshape(len(embeddings), -1, _BLOCK_BYTES)[..., :2] = scales.view(np.uint8)
    _flush(tensors)


def _lead_on(outputs: Any, embeddings: Any, spec: ModelSpec, share_wrong: float) -> None:
    """Put the embedding of each token into the row of the token that is to follow."""
    ids, after = _walk(spec.vocabulary.size, spec.vocabulary.control, share_wrong)
    outputs[after] = embeddings[ids]


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, mapped."""
    from gguf import GGUFReader

    return {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}


def _flush(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        assert isinstance(tensor, np.memmap), "the reader maps the file"
        tensor.flush()


def _walk(num_tokens: int, control: tuple[int, ...], share_wrong: float) -> tuple[Ids, Ids]:
    """Return the tokens, and for each the next one: in a random circle, and a share of them with another's."""
    circle = np.setdiff1d(np.arange(num_tokens), np.array(control, np.int64))
    np.random.Generator(np.random.PCG64(1)).shuffle(circle)
    after = np.roll(circle, -1)
    wrong = np.flatnonzero(np.random.Generator(np.random.PCG64(2)).random(len(circle)) < share_wrong)
    after[wrong] = np.roll(after[wrong], 1)
    return circle, after
