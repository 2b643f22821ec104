"""Matrix products on a CPU by our own kernels, against exact sums, double precision and llama.cpp's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.sweeps import sampled

from paceline.demo import demo_model_path
from paceline.errors import InvalidParams
from paceline.runtime import Context, Model, build_info, plan_memory
from paceline.runtime.matmul import (
    FLOATS,
    TYPES,
    SingleProduct,
    dequantise,
    kernel,
    kernels,
    quantise,
    use_kernel,
    use_kernel_of_environment,
)
from paceline.testing.models import (
    LlamaSpec,
    ModelSpec,
    Qwen2MoeSpec,
    Qwen2Spec,
    write_lora,
    write_model,
    write_requantised,
)

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not build_info().own_matmul, reason="built without it: another tree or compiler"),
    pytest.mark.skipif(not kernels(), reason="this processor runs none of the kernels"),
]
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
KINDS = TYPES if any(name.startswith("neon") for name in kernels()) else TYPES + FLOATS
FORMS = [kind for kind in ("q8_0", "q4_1", "q2_K", "q6_K", "f16") if kind in KINDS]
"""A type for each form of a block's sum: an offset or a minimum, one scale or two, and words."""
Array = npt.NDArray[np.floating[Any]]
BLOCKS = {
    "iq1_s": 256,
    "iq1_m": 256,
    "iq2_xxs": 256,
    "iq2_xs": 256,
    "iq2_s": 256,
    "iq3_xxs": 256,
    "iq3_s": 256,
    "iq4_xs": 256,
    "q2_K": 256,
    "q3_K": 256,
    "q4_K": 256,
    "q5_K": 256,
    "q6_K": 256,
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = kernel()
    use_kernel("paceline")
    yield
    use_kernel(before)


@pytest.fixture(params=kernels())
def each_kernel(request: pytest.FixtureRequest) -> str:
    """Each kernel that this processor can run, selected."""
    use_kernel(request.param)
    return str(request.param)


def weights_of(kind: str, matrices: int, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(seed).normal(size=(matrices * rows, columns)).astype(np.float32)
    return quantise(kind, values).reshape(matrices, rows, -1)


def whole_numbers(tokens: int, used: int, columns: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Activations that 8 bits hold exactly: whole numbers up to 127, which is the largest of each 32."""
    values = np.random.default_rng(seed).integers(-127, 128, size=(tokens, used, columns)).astype(np.float32)
    values[..., ::32] = np.where(values[..., ::32] < 0, -127, 127)
    return values


def whole_weights(kind: str, matrices: int, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """Weights in floats that kernels keep exactly: whole numbers of seven bits."""
    values = np.random.default_rng(seed).integers(-127, 128, size=(matrices * rows, columns)).astype(np.float32)
    return quantise(kind, values).reshape(matrices, rows, -1)


def reference(one: SingleProduct) -> tuple[Array, Array]:
    """The products in double precision, and the sums of their terms' magnitudes."""
    matrices, rows, _ = one.weights.shape
    flat = dequantise(one.type_name, one.weights.reshape(matrices * rows, -1))
    values = flat.reshape(matrices, rows, -1).astype(np.float64)
    activations = one.activations.astype(np.float64)
    experts = np.zeros(activations.shape[:2], np.int32) if one.experts is None else one.experts
    return (
        np.einsum("turc,tuc->tur", values[experts], activations),
        np.einsum("turc,tuc->tur", np.abs(values)[experts], np.abs(activations)),
    )


def make(
    kind: str, tokens: int, rows: int, blocks: int, experts: tuple[int, int] | None = None, seed: int = 0
) -> SingleProduct:
    columns = blocks * BLOCKS.get(kind, 32)
    matrices, used = experts or (1, 1)
    chosen = np.random.default_rng(seed).integers(0, matrices, size=(tokens, used)).astype(np.int32)
    return SingleProduct(
        type_name=kind,
        weights=(whole_weights if kind in FLOATS else weights_of)(kind, matrices, rows, columns, seed),
        activations=whole_numbers(tokens, used, columns, seed),
        experts=chosen if experts else None,
    )


def check(one: SingleProduct, n_threads: int, error: float = 3e-6) -> None:
    outputs, _, buffer = one.run(n_threads=n_threads)
    wanted, magnitude = reference(one)
    assert buffer == "CPU_PACELINE"
    assert np.all(np.abs(outputs - wanted) <= error * magnitude)


@pytest.mark.parametrize("name", kernels())
@QUIET
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 70),
    rows=st.integers(1, 140),
    blocks=st.integers(1, 12),
    n_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@example("q8_0", 512, 33, 3, 2, 0)
def test_products_are_exact_for_activations_of_eight_bits(
    name: str, kind: str, tokens: int, rows: int, blocks: int, n_threads: int, seed: int
) -> None:
    """Any type and shape: without rounded activations, outputs are the sums in double precision."""
    use_kernel(name)
    check(make(kind, tokens, rows, blocks, seed=seed), n_threads)


@pytest.mark.parametrize("name", kernels())
@QUIET
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 40),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 4),
    experts=st.tuples(st.integers(1, 9), st.integers(1, 4)),
    n_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products_of_experts_are_exact(
    name: str, kind: str, tokens: int, rows: int, blocks: int, experts: tuple[int, int], n_threads: int, seed: int
) -> None:
    """Mixtures of experts: each row of activations meets the matrix that was chosen for it."""
    use_kernel(name)
    check(make(kind, tokens, rows, blocks, experts, seed), n_threads)


@pytest.mark.parametrize(("kind", "experts", "rows"), [("q8_0", None, 9001), ("q4_K", (3, 2), 5001)])
def test_weights_that_several_threads_pack_are_whole(kind: str, experts: tuple[int, int] | None, rows: int) -> None:
    """From four megabytes on packing is shared: every group of every matrix is there."""
    one = make(kind, 2, rows, 1024 // BLOCKS.get(kind, 32), experts)
    assert one.weights.nbytes > 4 << 20
    check(one, 2)


@pytest.mark.parametrize("kind", sampled(KINDS, every=3))
def test_extreme_codes_do_not_overflow(each_kernel: str, kind: str) -> None:
    """Weights and activations of the largest magnitude, in all combinations of signs."""
    columns = BLOCKS.get(kind, 32) * 2
    values = np.ones((8, columns), np.float32)
    values[1] = -1
    values[2, ::2] = -1
    values[3, 1::4] = -1
    values[4:] = np.random.default_rng(0).choice([-1.0, 1.0], size=(4, columns))
    # Words, and their sums over a block of weights, are largest just below a power of two.
    weights = quantise(kind, values * np.float32(2 - 2**-7) if kind in FLOATS else values)
    if kind in FLOATS:
        values *= np.float32(2 - 2**-23) / 127
    elif kind == "q8_0":
        weights[0].reshape(-1, 34)[:, 2:] = 128  # -128, which ggml's own quantiser does not write
    activations = np.concatenate([127 * values[:, None], -127 * values[:, None]])
    check(SingleProduct(type_name=kind, weights=weights[None], activations=activations), 1)


HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q2_K": (80, 82),
    "q3_K": (108,),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
}
"""Where the 16 bit floats of a block are; of the other types at its begin."""


def any_weights(kind: str, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """Weights of any bits, with scales that are ordinary numbers."""
    rng = np.random.default_rng(seed)
    row_bytes = quantise(kind, np.zeros((1, columns), np.float32)).shape[1]
    num_blocks = columns // BLOCKS.get(kind, 32)
    weights = rng.integers(0, 256, size=(rows * num_blocks, row_bytes // num_blocks), dtype=np.uint8)
    if kind in FLOATS:
        halves = rng.integers(0, 1 << 16, size=(rows * num_blocks, 32), dtype=np.uint16)
        # Without the highest bit of the exponent, magnitudes are below 2.
        weights = (halves & np.uint16(0xBFFF)).view(np.uint8)
    elif kind == "mxfp4":
        weights[:, 0] = rng.integers(96, 160, size=len(weights))
    elif kind == "iq1_m":
        # The 16 bit float of a block is in the high bits of four pairs of bytes; the last byte has its sign and exponent.
        weights[:, 55] = weights[:, 55] % 16 + 32
    else:
        for place in HALVES.get(kind, (0,)):
            halves = rng.normal(size=(len(weights), 1)).astype(np.float16)
            weights[:, place : place + 2] = halves.view(np.uint8)
    return weights.reshape(1, rows, row_bytes)


@pytest.mark.parametrize("kind", sampled(KINDS, every=3))
def test_any_bits_of_weights_are_multiplied(each_kernel: str, kind: str) -> None:
    """Codes and scales that no quantiser writes, for example the largest of both, match dequantising.

    Of weights in floats, the smallest in a block lose some of their bits.
    """
    weights = any_weights(kind, 70, 1024, 5)
    check(
        SingleProduct(type_name=kind, weights=weights, activations=whole_numbers(9, 1, 1024)),
        2,
        3e-5 if kind in FLOATS else 3e-6,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(each_kernel: str, kind: str) -> None:
    """One token alone, among others, with one thread and with several: the very same outputs."""
    rng = np.random.default_rng(3)
    columns = 768
    activations = rng.normal(size=(37, 1, columns)).astype(np.float32)
    weights = weights_of(kind, 1, 100, columns)
    together = SingleProduct(type_name=kind, weights=weights, activations=activations)
    outputs = together.run(n_threads=1)[0]
    assert np.array_equal(outputs, together.run(n_threads=3)[0])
    for count in (1, 2, 3, 5, 8, 9):
        for first in range(0, 37, 11):
            few = SingleProduct(type_name=kind, weights=weights, activations=activations[first : first + count])
            assert np.array_equal(few.run(n_threads=2)[0], outputs[first : first + count])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (32, 8), (33, 9), (160, 300), (896, 17), (2080, 17)])
def test_any_number_of_threads_gives_the_same_bits(rows: int, tokens: int) -> None:
    """One item, fewer than threads, whole and divided groups of weights: all outputs are there, and are the same."""
    one = make("q8_0", tokens, rows, 2)
    check(one, 1)
    outputs = one.run(n_threads=1)[0]
    for n_threads in (2, 3, 5, 9):
        assert np.array_equal(one.run(n_threads=n_threads)[0], outputs)


@pytest.mark.parametrize("chosen", [[0], [6], [3], [0, 6], [1, 2, 5]])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_without_rows_are_passed_over(chosen: list[int], tokens: int) -> None:
    """The first, the last, or all but one of seven experts have no rows; fewer and more items than threads."""
    one = SingleProduct(
        type_name="q4_0",
        weights=weights_of("q4_0", 7, 40, 64),
        activations=whole_numbers(tokens, 2, 64),
        experts=np.random.default_rng(0).choice(chosen, size=(tokens, 2)).astype(np.int32),
    )
    check(one, 1)
    outputs = one.run(n_threads=1)[0]
    for n_threads in (2, 3, 8):
        assert np.array_equal(one.run(n_threads=n_threads)[0], outputs)


def test_a_row_of_experts_has_the_same_bits_alone_and_in_a_batch(each_kernel: str) -> None:
    """A token of a mixture alone and among others that choose the same experts: the very same outputs."""
    rng = np.random.default_rng(4)
    activations = rng.normal(size=(30, 3, 256)).astype(np.float32)
    experts = rng.integers(0, 128, size=(30, 3)).astype(np.int32)
    experts[20:] = experts[0]
    weights = weights_of("q4_K", 128, 40, 256)
    outputs = SingleProduct(type_name="q4_K", weights=weights, activations=activations, experts=experts).run(
        n_threads=2
    )[0]
    for token in (0, 7, 29):
        here = slice(token, token + 1)
        alone = SingleProduct(type_name="q4_K", weights=weights, activations=activations[here], experts=experts[here])
        assert np.array_equal(alone.run(n_threads=3)[0], outputs[here])


def test_kernels_agree() -> None:
    """Other instructions, the same sums: to the rounding of single precision."""
    for kind in KINDS:
        one = SingleProduct(
            type_name=kind,
            weights=weights_of(kind, 1, 64, 1024),
            activations=np.random.default_rng(1).normal(size=(9, 1, 1024)).astype(np.float32),
        )
        found = []
        for name in kernels():
            use_kernel(name)
            found.append(one.run()[0])
        for other in found[1:]:
            assert np.abs(other - found[0]).max() < 1e-3


@pytest.mark.parametrize("kind", sampled(KINDS, every=3))
def test_errors_are_no_larger_than_those_of_llama_cpp(each_kernel: str, kind: str) -> None:
    """Against double precision, on normal values: within 2 % of llama.cpp's error, or less."""
    one = SingleProduct(
        type_name=kind,
        weights=weights_of(kind, 1, 512, 2048),
        activations=np.random.default_rng(2).normal(size=(16, 1, 2048)).astype(np.float32),
    )
    wanted = reference(one)[0]
    ours = float(np.square(one.run()[0] - wanted).mean())
    use_kernel("llama.cpp")
    outputs, _, buffer = one.run()
    assert buffer != "CPU_PACELINE"
    assert ours <= 1.04 * float(np.square(outputs - wanted).mean())  # 2 % of the root


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_stay_in_their_row(each_kernel: str, kind: str, bad: float) -> None:
    """A row of activations with NaN or an infinity gives no finite output, and leaves the others' as they are."""
    activations = whole_numbers(9, 1, 512)
    weights = weights_of(kind, 1, 40, 512)
    clean = SingleProduct(type_name=kind, weights=weights, activations=activations.copy()).run()[0]
    activations[4, 0, 50] = bad
    outputs = SingleProduct(type_name=kind, weights=weights, activations=activations).run()[0]
    assert np.array_equal(np.delete(outputs, 4, 0), np.delete(clean, 4, 0))
    assert not np.isfinite(outputs[4]).any()


@pytest.mark.skipif("f16" not in KINDS, reason="ARM's kernels multiply no floats")
@pytest.mark.parametrize("kind", FLOATS)
def test_columns_of_large_activations_do_not_enlarge_the_error(each_kernel: str, kind: str) -> None:
    """Some columns a hundred times as large as the others with which they share a unit: no larger error than llama.cpp's."""
    activations = np.random.default_rng(2).normal(size=(16, 1, 2048)).astype(np.float32)
    activations[..., ::300] *= 100
    one = SingleProduct(type_name=kind, weights=weights_of(kind, 1, 512, 2048), activations=activations)
    wanted = reference(one)[0]
    ours = float(np.square(one.run()[0] - wanted).mean())
    use_kernel("llama.cpp")
    assert ours <= float(np.square(one.run()[0] - wanted).mean())


@pytest.mark.skipif("f16" not in KINDS, reason="ARM's kernels multiply no floats")
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("bad", [0x7F80, 0x7FC0])
def test_weights_that_are_no_numbers_stay_in_their_row(each_kernel: str, kind: str, bad: int) -> None:
    """A row of weights with NaN or an infinity gives no finite output, and leaves the other rows' as they are."""
    weights, activations = weights_of(kind, 1, 40, 96), whole_numbers(9, 1, 96)
    clean = SingleProduct(type_name=kind, weights=weights.copy(), activations=activations).run()[0]
    weights[0, 7].view(np.uint16)[50] = bad if kind == "bf16" else 0x7C00 | bad & 0x40
    outputs = SingleProduct(type_name=kind, weights=weights, activations=activations).run()[0]
    assert np.array_equal(np.delete(outputs, 7, -1), np.delete(clean, 7, -1))
    assert not np.isfinite(outputs[..., 7]).any()


@pytest.mark.skipif("f16" not in KINDS, reason="ARM's kernels multiply no floats")
def test_weights_in_bf16_may_have_any_size(each_kernel: str) -> None:
    """Rows of the smallest and of the largest weights give what double precision does."""
    weights = whole_weights("bf16", 1, 40, 64, 0)
    sizes = np.ldexp(1.0, np.linspace(-110, 100, 40).astype(int))[:, None]
    weights = quantise("bf16", (dequantise("bf16", weights[0]) * sizes).astype(np.float32))[None]
    check(SingleProduct(type_name="bf16", weights=weights, activations=whole_numbers(3, 1, 64)), 1)


@pytest.mark.parametrize("kind", FORMS)
def test_tiny_and_zero_activations_are_zeros(each_kernel: str, kind: str) -> None:
    """Rows with a largest value that is no normal float give zeros, not NaN."""
    activations = np.zeros((3, 1, 512), np.float32)
    activations[1] = 1e-42
    activations[2, 0, 40:] = -1e-39
    outputs = SingleProduct(type_name=kind, weights=weights_of(kind, 1, 40, 512), activations=activations).run()[0]
    assert np.abs(outputs).max() < 1e-35


def quantised_model(tmp_path: Path, spec: ModelSpec) -> Path:
    return write_model(tmp_path / "model.gguf", spec, weights="Q8_0")


def logits_of(model: Model, tokens: int) -> Array:
    with Context(model, n_ctx=256, n_batch=128, n_threads=2) as context:
        ids = [7 + i % 40 for i in range(tokens)]
        context.decode(ids)
        return context.logits(tokens - 1)


SPECS = [LlamaSpec(n_embd=128, n_ff=224), Qwen2Spec(n_embd=128), Qwen2MoeSpec(n_embd=128)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_model_computes_what_it_does_with_llama_cpp(tmp_path: Path, spec: ModelSpec) -> None:
    """Logits of a quantised model equal llama.cpp's, up to the rounding of activations."""
    path = quantised_model(tmp_path, spec)
    found = {}
    for name in ("llama.cpp", *kernels()):
        use_kernel(name)
        with Model.load(path) as model:
            found[name] = [logits_of(model, tokens) for tokens in (1, 5, 40)]
    for name in kernels():
        for ours, theirs in zip(found[name], found["llama.cpp"], strict=True):
            assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_a_loaded_model_keeps_its_weights_after_a_switch(tmp_path: Path) -> None:
    """Weights that are packed stay packed: contexts made after a switch to llama.cpp's products compute the same."""
    with Model.load(quantised_model(tmp_path, SPECS[0])) as model:
        before = logits_of(model, 5)
        use_kernel("llama.cpp")
        assert np.array_equal(logits_of(model, 5), before)


def test_an_adapter_applies_to_packed_weights(tmp_path: Path) -> None:
    """A LoRA's own products are llama.cpp's, added to ours: the change is the same, and removing it brings back the same bits."""
    spec = LlamaSpec(n_embd=128, n_ff=224)
    path, lora = quantised_model(tmp_path, spec), write_lora(tmp_path / "lora.gguf", spec)
    changes = []
    for name in ("llama.cpp", "paceline"):
        use_kernel(name)
        with Model.load(path) as model, model.load_adapter(lora) as adapter:
            with Context(model, n_ctx=64, n_batch=64, n_threads=2) as context:
                found = []
                for adapters in ({}, {adapter: 1.0}, {}):
                    context.set_adapters(adapters)
                    context.clear()
                    context.decode([7, 8, 9])
                    found.append(context.logits(2).copy())
        assert np.array_equal(found[0], found[2])
        changes.append(found[1] - found[0])
    assert np.abs(changes[0]).max() > 0.1
    assert np.abs(changes[1] - changes[0]).max() < 0.1 * np.abs(changes[0]).max()


@pytest.mark.parametrize(("kind", "least"), [("Q8_0", 1.0), ("IQ3_XXS", 1.3)])
def test_packed_weights_are_counted_as_memory(tmp_path: Path, kind: str, least: float) -> None:
    """A plan counts packed weights as allocated, not as mapped from the file, and in their size when they are packed."""
    path = write_requantised(tmp_path / kind, quantised_model(tmp_path, LlamaSpec(n_embd=256, n_ff=512)), kind)
    with Model.load(path) as model:
        packed = plan_memory(model, n_ctx=128)
    use_kernel("llama.cpp")
    with Model.load(path) as model:
        mapped = plan_memory(model, n_ctx=128)
    assert sum(device.mapped_bytes for device in packed.devices) < sum(device.mapped_bytes for device in mapped.devices)
    weights = [sum(device.weights_bytes for device in plan.devices) for plan in (packed, mapped)]
    assert least <= weights[0] / weights[1] < least + 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_pages_of_the_file_are_released_once_they_are_packed(tmp_path: Path) -> None:
    """A process holds its packed weights, and not their source too; with llama.cpp's products it holds the file."""
    path = shutil.copy(demo_model_path(), tmp_path / "copy.gguf")  # other tests' models map the original

    def resident() -> int:
        """Bytes of the file that are in memory as this process maps it."""
        found, is_ours = 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                is_ours = line.endswith(str(path.resolve()))
            elif is_ours and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
        return found

    with Model.load(path) as model:
        released = resident()
        logits_of(model, 5)
    use_kernel("llama.cpp")
    with Model.load(path):
        held = resident()
    assert held > 0.9 * path.stat().st_size
    assert released < 0.5 * held


def test_unknown_names_are_refused() -> None:
    """A name that is no kernel's raises, and the selection stays."""
    before = kernel()
    with pytest.raises(InvalidParams, match="'avx2'"):
        use_kernel("sse9")
    assert kernel() == before


def test_the_variable_selects_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """PACELINE_CPU_MATMUL names the kernel of a process; a wrong name raises when it is first read."""
    command = [sys.executable, "-c", "from paceline.runtime.matmul import kernel; print(kernel())"]
    fastest, last = kernels()[0], kernels()[-1]
    default = "llama.cpp" if fastest.startswith("neon") else fastest
    for value, wanted in (("llama.cpp", "llama.cpp"), (last, last), ("paceline", fastest), ("", default)):
        environment = {**os.environ, "PACELINE_CPU_MATMUL": value}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted
    monkeypatch.setenv("PACELINE_CPU_MATMUL", "fast")
    use_kernel_of_environment.cache_clear()
    try:
        with pytest.raises(InvalidParams, match="PACELINE_CPU_MATMUL must be one of"):
            kernel()
    finally:
        monkeypatch.undo()
        use_kernel_of_environment.cache_clear()


def test_arrays_that_do_not_fit_are_refused() -> None:
    """Wrong shapes and types raise before anything is computed."""
    weights, activations = weights_of("q8_0", 1, 4, 64), whole_numbers(2, 1, 64)
    wrong: tuple[dict[str, Any], ...] = (
        {"type_name": "q9_9"},
        {"activations": whole_numbers(2, 1, 96)},
        {"activations": activations.astype(np.float64)},
        {"weights": np.concatenate([weights, weights])},
        {"experts": np.full((2, 1), 1, np.int32)},
        {"experts": np.full((2, 1), -1, np.int32)},
    )
    for bad in wrong:
        given: dict[str, Any] = {"type_name": "q8_0", "weights": weights, "activations": activations, **bad}
        with pytest.raises(InvalidParams):
            SingleProduct(**given).run()


def test_weights_in_floats_are_read_as_they_are() -> None:
    """float32 is a type like any other to who reads weights."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(dequantise("f32", values.view(np.uint8)), values)
