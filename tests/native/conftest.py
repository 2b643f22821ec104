"""Tiny random models for native tests, written once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.runtime import Context, Model, attention, matmul
from paceline.testing.models import KINDS, ModelSpec, WeightType, write_model

TinyModels = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_models("llama")`, `tiny_models(LlamaSpec(n_layer=3), seed=1, weights="Q8_0")`: the path of the model."""
    folder = tmp_path_factory.mktemp("tiny-models")
    written: dict[tuple[ModelSpec, int, WeightType], Path] = {}

    def path_of(kind: str | ModelSpec, *, seed: int = 0, weights: WeightType = "F32") -> Path:
        spec = KINDS[kind] if isinstance(kind, str) else kind
        key = (spec, seed, weights)
        if key not in written:
            written[key] = write_model(
                folder / f"{spec.architecture}-{len(written)}.gguf", spec, seed=seed, weights=weights
            )
        return written[key]

    return path_of


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels) -> Iterator[Model]:
    """Load a tiny Llama."""
    with Model.load(tiny_models("llama")) as model:
        yield model


@pytest.fixture
def context(llama: Model) -> Iterator[Context]:
    """Return a context of three sequences and 512 cells."""
    with Context(llama, n_ctx=512, n_batch=128, n_ubatch=64, n_seq_max=3, n_outputs_max=16, n_threads=1) as made:
        yield made


@pytest.fixture
def llama_cpp_kernels() -> Iterator[None]:
    """Attention and matrix products by llama.cpp's kernels: they round as llama.cpp does."""
    before = attention.kernel(), matmul.kernel()
    attention.use_kernel("llama.cpp")
    matmul.use_kernel("llama.cpp")
    yield
    attention.use_kernel(before[0])
    matmul.use_kernel(before[1])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the compiled core."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.native)


@pytest.fixture
def own_attention() -> Iterator[None]:
    """Compute attention by paceline's kernel during the test."""
    before = attention.kernel()
    attention.use_kernel("paceline")
    yield
    attention.use_kernel(before)
