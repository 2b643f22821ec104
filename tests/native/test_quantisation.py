"""`paceline.quantize`: every quantisation of a small model, its options, and all that it refuses or leaves behind."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import _native
from paceline.errors import Aborted, DiskFull, InvalidParams, InvalidType, ModelLoadError
from paceline.runtime import Context, Model
from paceline.runtime.gguf_file import read_gguf
from paceline.runtime.quantisation import QUANTISATIONS, quantized_stem, read_importance_matrix, tensor_type_names
from paceline.testing.models import (
    Gemma3VisionSpec,
    LlamaSpec,
    ModelSpec,
    write_lora,
    write_model,
    write_split_model,
)

pytestmark = pytest.mark.native

SPEC = LlamaSpec(n_embd=256, n_head=4, n_head_kv=2, n_ff=512)  # whole blocks of 256
MAIN_TYPE = {  # of the feed-forward matrices in the middle, where it has another name than the quantisation
    "Q2_K_S": "Q2_K", "Q3_K": "Q3_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S",
    "IQ3_M": "IQ3_S", "MXFP4_MOE": "Q8_0", "COPY": "F32",
}  # fmt: skip
NEED_MATRIX = ("Q2_K_S", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32."""
    return write_model(tmp_path_factory.mktemp("source") / "tiny-F32.gguf", SPEC)


def importances(spec: ModelSpec) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return random mean squares for each matrix."""
    random = np.random.default_rng(1)
    matrices = {tensor.name: tensor.shape for tensor in spec.tensors() if len(tensor.shape) > 1}
    return {name: random.random(shape[-1], np.float32) + 0.01 for name, shape in matrices.items()}


def write_matrix(path: Path, values: Any, counts: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """Write an importance matrix as llama-imatrix does: sums over tokens, and the numbers of tokens."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    for key, value in metadata.items():
        writer.add_key_value(f"imatrix.{key}", value, *_gguf_types(value))
    for name, means in values.items():
        count = np.atleast_1d(np.asarray((counts or {}).get(name, 8), np.float32))
        rows = np.asarray(means, np.float32).reshape(len(count), -1)
        writer.add_tensor(f"{name}.in_sum2", rows * count[:, None])
        writer.add_tensor(f"{name}.counts", count[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_types(value: object) -> tuple[Any, ...]:
    import gguf

    kind = gguf.GGUFValueType
    return (kind.ARRAY, kind.STRING) if isinstance(value, list) else (kind.UINT32,)


def write_old_matrix(path: Path, values: Any, *, num_calls: int = 4, end: bytes = b"") -> Path:
    """Write an importance matrix in the older format."""
    data = struct.pack("<i", len(values))
    for name, means in values.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", num_calls, len(means))
        data += (means * np.float32(num_calls)).astype("<f4").tobytes()
    path.write_bytes(data + end)
    return path


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix for the model."""
    folder = tmp_path_factory.mktemp("matrix")
    return write_matrix(folder / "tiny.imatrix.gguf", importances(SPEC), chunk_count=3, datasets=["calm.txt"])


def types_of(path: Path) -> dict[str, str]:
    names = tensor_type_names()
    return {tensor.name.decode(): names[tensor.type] for tensor in read_gguf(path).tensors}


def logits(path: Path) -> Any:
    with Model.load(path, use_extra_bufts=False) as model, Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2, 3])
        return context.logits(2)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SLOW = ("IQ1_S", "IQ1_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M")  # llama.cpp makes tables for them once in a process


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in QUANTISATIONS]
)
def test_every_quantisation_loads_and_has_its_type(source: Path, matrix: Path, tmp_path: Path, name: str) -> None:
    """The file computes, its matrices have the type, and the result has the numbers of the file."""
    made = paceline.quantize(
        source, name.lower(), tmp_path, imatrix=matrix if name in NEED_MATRIX else None, n_threads=2
    )
    assert made.paths == (tmp_path / f"tiny-{name}.gguf",) and left_in(tmp_path) == [f"tiny-{name}.gguf"]
    found = types_of(made.paths[0])
    assert found["blk.1.ffn_gate.weight"] == MAIN_TYPE.get(name, name)
    assert found["blk.1.ffn_norm.weight"] == "F32"
    assert np.isfinite(logits(made.paths[0])).all()
    with Model.load(made.paths[0]) as model:
        assert (model.n_params, model.size_bytes) == (made.n_params, made.size_bytes)
    assert made.bits_per_weight == 8 * made.size_bytes / made.n_params
    assert {kind: use.num_tensors for kind, use in made.tensor_types.items()} == {
        kind: list(found.values()).count(kind) for kind in found.values()
    }
    assert made.source_bits_per_weight == 32 and made.refusal == ""


def test_weights_are_llama_cpps(source: Path, tmp_path: Path) -> None:
    """The bytes of a tensor are those that llama.cpp makes of its values."""
    import gguf

    (path,) = paceline.quantize(source, "Q8_0", tmp_path / "new.gguf").paths
    before, after = ({tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors} for file in (source, path))
    name = "blk.0.ffn_down.weight"
    wanted = _native.quantise("q8_0", np.ascontiguousarray(before[name].data, np.float32))
    np.testing.assert_array_equal(after[name].data, wanted)
    np.testing.assert_array_equal(after["blk.0.ffn_norm.weight"].data, before["blk.0.ffn_norm.weight"].data)


def test_a_dry_run_tells_sizes_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    """The numbers are those of the file that is written afterwards."""
    planned = paceline.quantize(source, "Q4_K_M", tmp_path, dry_run=True)
    assert left_in(tmp_path) == []
    assert paceline.quantize(source, "Q4_K_M", tmp_path) == planned
    assert planned.source_bytes == 4 * planned.n_params > 5 * planned.size_bytes


def test_a_dry_run_tells_a_refusal(source: Path, tmp_path: Path) -> None:
    """Sizes come all the same, with the words of the error."""
    planned = paceline.quantize(source, "IQ2_XS", tmp_path, dry_run=True)
    with pytest.raises(InvalidParams, match="needs an importance matrix") as error:
        paceline.quantize(source, "IQ2_XS", tmp_path)
    assert str(error.value) == planned.refusal and "IQ2_XS" in planned.tensor_types


OPTIONS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"blk.0.ffn_gate.weight": "Q4_K", "output.weight": "Q6_K", "token_embd.weight": "Q4_K"}),
    ({"pure": True}, {"output.weight": "Q4_K", "blk.0.ffn_down.weight": "Q4_K"}),
    ({"leave_output_tensor": True}, {"output.weight": "F32", "blk.0.ffn_gate.weight": "Q4_K"}),
    ({"output_tensor_type": "q8_0"}, {"output.weight": "Q8_0"}),
    ({"token_embedding_type": "F16"}, {"token_embd.weight": "F16"}),
    (
        {"tensor_types": {r"blk\.1\.ffn": "Q5_0", "ffn_gate": "Q8_0"}},
        {"blk.0.ffn_gate.weight": "Q8_0", "blk.1.ffn_gate.weight": "Q5_0", "blk.0.ffn_up.weight": "Q4_K"},
    ),
]


@pytest.mark.parametrize(("options", "types"), OPTIONS, ids="-".join)
def test_options_choose_types(source: Path, tmp_path: Path, options: Any, types: dict[str, str]) -> None:
    """Each option has the effect that it has in llama-quantize."""
    (path,) = paceline.quantize(source, "Q4_K_M", tmp_path, **options).paths
    found = types_of(path)
    assert {name: found[name] for name in types} == types
    assert np.isfinite(logits(path)).all()


def test_narrow_rows_fall_back_to_smaller_blocks(tmp_path: Path) -> None:
    """Rows that are no whole blocks get the type that llama.cpp takes in their place."""
    source = write_model(tmp_path / "narrow.gguf", LlamaSpec())
    made = paceline.quantize(source, "Q4_K_M")
    assert made.paths == (tmp_path / "narrow-Q4_K_M.gguf",)
    assert types_of(made.paths[0])["blk.0.attn_q.weight"] == "Q5_0"


def test_a_quantised_model_needs_leave(source: Path, tmp_path: Path) -> None:
    """Without allow_requantize it is refused; a change of no quantised tensor is none."""
    (first,) = paceline.quantize(source, "Q8_0", tmp_path).paths
    with pytest.raises(InvalidParams, match=r"is quantised already \(.* Q8_0\).*allow_requantize"):
        paceline.quantize(first, "Q4_0")
    assert paceline.quantize(first, "Q4_0", allow_requantize=True).paths == (tmp_path / "tiny-Q4_0.gguf",)
    copied = paceline.quantize(first, "COPY", tmp_path / "copy.gguf")
    assert copied.tensor_types == copied.source_types and copied.paths[0].stat().st_size == first.stat().st_size


def test_a_split_set_becomes_one_file_or_keeps_its_parts(tmp_path: Path) -> None:
    """The weights are those of the same model in one file."""
    whole = write_model(tmp_path / "whole.gguf", SPEC)
    parts = write_split_model(tmp_path / "parts.gguf", SPEC, parts=3)
    (reference,) = paceline.quantize(whole, "Q4_0").paths
    (joined,) = paceline.quantize(parts[0], "Q4_0").paths
    kept = paceline.quantize(parts[0], "Q4_0", tmp_path / "kept.gguf", keep_split=True).paths
    assert joined.name == "parts-Q4_0.gguf"
    assert [path.name for path in kept] == [f"kept-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    wanted = logits(reference)
    np.testing.assert_array_equal(logits(joined), wanted)
    np.testing.assert_array_equal(logits(kept[0]), wanted)
    with pytest.raises(InvalidParams, match=r"keep_split.*whole\.gguf is one file"):
        paceline.quantize(whole, "Q4_0", keep_split=True)


def test_experts_have_importances_of_their_own(tmp_path: Path) -> None:
    """The values of an expert are its own; an expert without tokens counts all columns the same."""
    spec = LlamaSpec(n_embd=256, n_head=4, n_head_kv=2, n_ff=256, n_expert=2)
    source = write_model(tmp_path / "experts.gguf", spec)
    values = importances(spec)
    experts = {tensor.name for tensor in spec.tensors() if len(tensor.shape) == 3}
    assert experts
    random = np.random.default_rng(2)
    values |= {name: random.random(2 * 256, np.float32) + 0.01 for name in experts}
    counts = {name: [4, 0] for name in experts}
    found = read_importance_matrix(write_matrix(tmp_path / "m.gguf", values, counts)).values
    for name in experts:
        np.testing.assert_allclose(found[name], np.concatenate([values[name][:256], np.ones(256)]), rtol=1e-6)
    (path,) = paceline.quantize(source, "IQ2_XXS", imatrix=tmp_path / "m.gguf").paths
    assert types_of(path)["blk.1.ffn_up_exps.weight"] == "IQ2_XXS"
    assert np.isfinite(logits(path)).all()
    with pytest.raises(InvalidParams, match=r"ffn_\w+_exps.weight has 256 values there, and 512"):
        paceline.quantize(source, "Q4_K_M", imatrix=write_matrix(tmp_path / "less.gguf", importances(spec)))


def test_both_formats_of_a_matrix_are_read(source: Path, matrix: Path, tmp_path: Path) -> None:
    """They give the same file, which says what it was made with; without a matrix it is another."""
    new, old = tmp_path / "a.gguf", tmp_path / "b.gguf"
    dat = write_old_matrix(tmp_path / "tiny.dat", importances(SPEC), end=struct.pack("<ii8s", 3, 8, b"calm.txt"))
    paceline.quantize(source, "Q4_K_M", new, imatrix=matrix)
    paceline.quantize(source, "Q4_K_M", old, imatrix=dat)
    np.testing.assert_array_equal(logits(new), logits(old))
    metadata = read_gguf(old).metadata
    made = {key: metadata[b"quantize.imatrix." + key].value for key in (b"file", b"dataset", b"chunks_count")}
    assert made == {b"file": b"tiny.dat", b"dataset": b"calm.txt", b"chunks_count": 3}
    assert metadata[b"quantize.imatrix.entries_count"].value == len(importances(SPEC))
    (without,) = paceline.quantize(source, "Q4_K_M", tmp_path).paths
    assert not np.array_equal(logits(new), logits(without))


def test_an_alignment_of_the_source_is_not_kept(tmp_path: Path) -> None:
    """llama.cpp writes tensors at multiples of 32 bytes, and the new file says so."""
    import gguf

    source = tmp_path / "aligned.gguf"
    plain = write_model(tmp_path / "plain.gguf", LlamaSpec())
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(source, "llama")
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF.") and entry.name != "general.architecture":
            kinds = (entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
            writer.add_key_value(entry.name, entry.contents(), *kinds)
    writer.add_custom_alignment(128)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (new,) = paceline.quantize(source, "Q8_0").paths
    np.testing.assert_array_equal(logits(new), logits(paceline.quantize(plain, "Q8_0").paths[0]))


# ---- endings


def test_progress_rises_to_one(source: Path, tmp_path: Path) -> None:
    """One call for each tensor."""
    shares: list[float] = []
    paceline.quantize(source, "Q4_0", tmp_path, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) == len(types_of(source))


def stop_by_event(event: threading.Event) -> Callable[[float], object]:
    return lambda share: event.set() if share > 0.3 else None


def stop_by_answer(_: threading.Event) -> Callable[[float], object]:
    return lambda share: share < 0.3


@pytest.mark.parametrize("stop", [stop_by_event, stop_by_answer])
def test_a_cancelled_run_leaves_no_file(source: Path, tmp_path: Path, stop: Any) -> None:
    """The same call works afterwards."""
    event = threading.Event()
    with pytest.raises(Aborted, match="was cancelled"):
        paceline.quantize(source, "Q4_0", tmp_path, progress=stop(event), cancel=event)
    assert left_in(tmp_path) == []
    assert paceline.quantize(source, "Q4_0", tmp_path).paths[0].is_file()


def test_an_error_of_the_callback_leaves_no_file(source: Path, tmp_path: Path) -> None:
    """It comes out as it is."""

    def fail(_: float) -> None:
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        paceline.quantize(source, "Q4_0", tmp_path, progress=fail)
    assert left_in(tmp_path) == []


def test_a_failed_write_is_a_full_disk(source: Path, tmp_path: Path) -> None:
    """llama.cpp does not notice every write that fails; no file comes of it."""
    code = (
        "import resource, signal, sys, paceline\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))\n"
        "try:\n    paceline.quantize(sys.argv[1], 'Q8_0', sys.argv[2])\n"
        "except paceline.DiskFull as error:\n    print(error)\n"
    )
    for limit in (300_000, paceline.quantize(source, "Q8_0", dry_run=True).size_bytes):
        command = [sys.executable, "-c", code, str(source), str(tmp_path), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert f"{tmp_path} has no space for tiny-Q8_0.gguf" in done.stdout
        assert left_in(tmp_path) == []


def test_space_is_checked_before(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to a disk that is too full."""

    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(DiskFull, match=r"tiny-Q8_0.gguf: it takes \d+ bytes, and 1000 are free"):
        paceline.quantize(source, "Q8_0", tmp_path)
    assert left_in(tmp_path) == []


def test_rests_of_a_killed_run_are_removed(source: Path, tmp_path: Path) -> None:
    """A folder with its part file has a name of the output."""
    rest = tmp_path / ".new.gguf.partial"
    rest.mkdir()
    (rest / "new.gguf").write_bytes(bytes(1000))
    paceline.quantize(source, "Q8_0", tmp_path / "new.gguf")
    assert left_in(tmp_path) == ["new.gguf"]


def test_a_link_in_the_place_of_the_folder_of_rests_is_not_followed(source: Path, tmp_path: Path) -> None:
    """What it leads to is not removed."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_bytes(b"mine")
    (tmp_path / ".new.gguf.partial").symlink_to(other)
    with pytest.raises(InvalidParams, match=r"output: cannot make the folder .*/\.new\.gguf\.partial: "):
        paceline.quantize(source, "Q8_0", tmp_path / "new.gguf")
    assert left_in(other) == ["mine"]


def test_two_runs_do_not_write_one_file(source: Path, tmp_path: Path) -> None:
    """The second is refused while the first runs."""
    refused: list[str] = []

    def again(_: float) -> None:
        if not refused:
            with pytest.raises(InvalidParams, match="another process writes") as error:
                paceline.quantize(source, "Q4_0", tmp_path)
            refused.append(str(error.value))

    paceline.quantize(source, "Q4_0", tmp_path, progress=again)
    assert refused and left_in(tmp_path) == ["tiny-Q4_0.gguf"]


def test_an_existing_file_is_replaced_on_request(source: Path, tmp_path: Path) -> None:
    """Not by default, and never the model itself."""
    target = tmp_path / "new.gguf"
    target.write_bytes(b"mine")
    with pytest.raises(InvalidParams, match=r"new.gguf exists; give another path.*--force"):
        paceline.quantize(source, "Q8_0", target)
    assert target.read_bytes() == b"mine"
    paceline.quantize(source, "Q8_0", target, overwrite=True)
    assert np.isfinite(logits(target)).all()
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    for same in (source, link):
        with pytest.raises(InvalidParams, match="is the model itself"):
            paceline.quantize(source, "Q8_0", same, overwrite=True)


# ---- refusals

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"quantisation": "Q4_K_N"}, InvalidParams, r"quantisation must be one of .*did you mean 'Q4_K_\w'"),
    ({"quantisation": 15}, InvalidType, "quantisation must be one of"),
    ({"output_tensor_type": "Q4_K_M"}, InvalidParams, "output_tensor_type must be one of"),
    ({"output_tensor_type": "Q8_K"}, InvalidParams, "output_tensor_type must be one of"),
    ({"tensor_types": {"ffn": "Q9"}}, InvalidParams, r"tensor_types\['ffn'\] must be one of"),
    ({"tensor_types": {"ffn": None}}, InvalidType, r"tensor_types\['ffn'\] must be a type"),
    ({"tensor_types": ["ffn=Q8_0"]}, InvalidType, "tensor_types must be a mapping"),
    ({"tensor_types": {"(": "Q8_0"}}, InvalidParams, r"tensor_types: '\(' is no regular expression"),
    ({"tensor_types": {"": "Q8_0"}}, InvalidParams, "a pattern must be 1 to 512 bytes"),
    ({"tensor_types": {"x" * 600: "Q8_0"}}, InvalidParams, "a pattern must be 1 to 512 bytes"),
    ({"quantisation": "F16", "pure": True}, InvalidParams, "pure has no effect on F16"),
    ({"quantisation": "BF16", "tensor_types": {"a": "Q8_0"}}, InvalidParams, "tensor_types has no effect on BF16"),
    ({"quantisation": "COPY", "output_tensor_type": "Q8_0"}, InvalidParams, "output_tensor_type has no effect on COPY"),
    ({"token_embedding_type": "IQ2_XS"}, InvalidParams, r"token_embd.weight IQ2_XS, which needs an importance matrix"),
    ({"quantisation": "IQ1_S", "pure": True, "imatrix": "no-output"}, InvalidParams, "imatrix .* has no values of"),
    ({"n_threads": 0}, InvalidParams, "n_threads must be"),
    ({"n_threads": 100_000}, InvalidParams, "n_threads must be"),
    ({"progress": 1}, InvalidType, "progress must be a function"),
    ({"pure": 1}, InvalidType, "pure must be True or False"),
    ({"output": "/no/such/folder/x.gguf"}, InvalidParams, "there is no folder /no/such/folder"),
    ({"output": "x" * 300}, InvalidParams, "output x{300}: File name too long; give another path"),
    ({"imatrix": "/no/such.gguf"}, ModelLoadError, "imatrix: cannot read /no/such.gguf: No such file"),
    ({"model": "/no/such.gguf"}, ModelLoadError, "/no/such.gguf: No such file"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_a_wrong_value_names_its_option(
    source: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Nothing is written."""
    given: dict[str, Any] = {"model": source, "quantisation": "Q4_K_M", "output": tmp_path} | options
    if given.get("imatrix") == "no-output":
        values = importances(SPEC)
        del values["output.weight"]
        given["imatrix"] = write_matrix(tmp_path.with_name(f"{tmp_path.name}-matrix.gguf"), values)
    with pytest.raises(error, match=message):
        paceline.quantize(**given)
    assert left_in(tmp_path) == []


def test_types_must_fit_rows(tmp_path: Path) -> None:
    """llama.cpp would read beyond a row of 64 values in blocks of 256."""
    source = write_model(tmp_path / "narrow.gguf", LlamaSpec())
    for option, tensor in (("token_embedding_type", "token_embd"), ("output_tensor_type", "output")):
        message = rf"{option} Q4_K stores rows in blocks of 256 values, and {tensor}.weight has rows of 64"
        with pytest.raises(InvalidParams, match=message):
            paceline.quantize(source, "Q8_0", **{option: "Q4_K"})  # type: ignore[arg-type]


def test_files_that_are_no_model_are_refused(source: Path, tmp_path: Path) -> None:
    """Vocabularies, projectors, adapters, matrices and later parts each have their words."""
    only = write_model(tmp_path / "vocabulary.gguf", VocabularyOnly())
    parts = write_split_model(tmp_path / "parts.gguf", SPEC)
    cases = [
        (only, "has a vocabulary alone and no weights"),
        (write_model(tmp_path / "mmproj.gguf", Gemma3VisionSpec()), "is a multimodal projector"),
        (write_lora(tmp_path / "lora.gguf", SPEC), "is a LoRA adapter"),
        (write_matrix(tmp_path / "m.gguf", importances(SPEC)), "is an importance matrix"),
        (parts[1], "is not the first part of its split set; load parts-00001-of-00003.gguf"),
        (Path(__file__), "not a GGUF file"),
        (tmp_path, "is a folder; give the path of a GGUF file in it"),
    ]
    for path, message in cases:
        with pytest.raises(ModelLoadError, match=message):
            paceline.quantize(path, "Q8_0", tmp_path / "new.gguf")
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match="parts-00003-of-00003.gguf: No such file"):
        paceline.quantize(parts[0], "Q8_0", tmp_path / "new.gguf")


class VocabularyOnly(LlamaSpec):
    """A model without tensors."""

    def tensors(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("weight", "name", "message"),
    [
        (math.nan, "Q8_0", "has invalid data"),
        (1e10, "Q8_0", "validation failed"),
        (-1e10, "IQ2_XXS", r"has weights of 1e\+09"),
    ],
)
@pytest.mark.parametrize("weights", ["F32", "BF16"])
def test_weights_that_do_not_fit_are_refused(
    matrix: Path, tmp_path: Path, weight: float, name: str, message: str, weights: str
) -> None:
    """No file is left. llama.cpp would end the process while it searches a grid for such weights."""
    source = write_model(tmp_path / "source.gguf", SPEC)
    if weights == "BF16":
        source = paceline.quantize(source, "BF16", tmp_path / "half.gguf").paths[0]
    file = read_gguf(source)
    info = next(tensor for tensor in file.tensors if tensor.name == b"blk.1.ffn_up.weight")
    bits = np.float32(weight).tobytes()[-2 if weights == "BF16" else -4 :]
    data = np.memmap(source, np.uint8, "r+")
    first = -(-file.header_bytes // 32) * 32 + info.offset
    data[first : first + len(bits)] = np.frombuffer(bits, np.uint8)
    data.flush()
    before = left_in(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        paceline.quantize(source, name, imatrix=matrix)
    assert left_in(tmp_path) == before


def test_exponents_that_do_not_fit_are_refused(source: Path, matrix: Path, tmp_path: Path) -> None:
    """A block of MXFP4 has weights up to 2 ** 130, and llama.cpp would end the process while it searches a grid for them."""
    source = paceline.quantize(source, "Q8_0", tmp_path / "mxfp4.gguf", tensor_types={"blk.1.ffn_up": "MXFP4"}).paths[0]
    file = read_gguf(source)
    info = next(tensor for tensor in file.tensors if tensor.name == b"blk.1.ffn_up.weight")
    data = np.memmap(source, np.uint8, "r+")
    data[-(-file.header_bytes // 32) * 32 + info.offset + 17 * 100] = 155
    data.flush()
    with pytest.raises(ModelLoadError, match=r"blk.1.ffn_up.weight has weights of 1e\+09"):
        paceline.quantize(source, "IQ3_S", imatrix=matrix, allow_requantize=True)
    assert left_in(tmp_path) == ["mxfp4.gguf"]


class OddShapeSpec(LlamaSpec):
    """A model with a tensor more."""

    def tensors(self) -> Any:
        *others, last = super().tensors()
        return iter([*others, last, replace(last, name="blk.0.extra.weight", shape=self.shape)])

    shape: tuple[int, ...] = ()


class FourDimensions(OddShapeSpec):
    """Its tensor is no matrix and no stack of them."""

    shape = (3, 2, 4, 256)


class NoColumns(OddShapeSpec):
    """Its tensor is empty."""

    shape = (2, 0)


@pytest.mark.parametrize(("kind", "message"), [(FourDimensions, "has four dimensions"), (NoColumns, "has no columns")])
def test_shapes_that_end_the_process_are_refused(tmp_path: Path, kind: type[LlamaSpec], message: str) -> None:
    """llama.cpp would assert, or divide by zero."""
    source = write_model(tmp_path / "odd.gguf", kind(n_embd=256, n_head=4, n_head_kv=2, n_ff=512))
    with pytest.raises(InvalidParams, match=f"blk.0.extra.weight {message}"):
        paceline.quantize(source, "Q8_0")
    assert left_in(tmp_path) == ["odd.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: {**values, "output.weight": np.full(256, np.nan)}, "are not all between 0 and 1e\\+20"),
        (lambda values: {**values, "output.weight": np.full(256, -1)}, "are not all between 0"),
        (lambda values: {**values, "output.weight": np.full(256, 1e36)}, "are not all between 0"),
        (lambda values: {name: value[:-32] for name, value in values.items()}, r"has 224 values there, and 256"),
        (lambda _: {}, r"without tensors named"),
    ],
)
def test_a_wrong_matrix_is_refused(source: Path, tmp_path: Path, change: Any, message: str) -> None:
    """Before anything is written."""
    matrix = write_matrix(tmp_path / "m.gguf", change(importances(SPEC)))
    with pytest.raises((ModelLoadError, InvalidParams), match=message):
        paceline.quantize(source, "Q4_K_M", tmp_path / "new.gguf", imatrix=matrix)
    assert left_in(tmp_path) == ["m.gguf"]


def test_a_damaged_matrix_is_refused(matrix: Path, tmp_path: Path) -> None:
    """Cut anywhere, and with any byte changed, a file gives a matrix or a `ModelLoadError`."""
    old = write_old_matrix(tmp_path / "old.dat", {"a.weight": np.ones(8, np.float32)})
    small = write_matrix(tmp_path / "small.gguf", {"a.weight": np.ones(8, np.float32)}, chunk_count=3, datasets=["x"])
    changed = tmp_path / "changed"
    for path, padding in ((old, 0), (small, 28)):
        whole = path.read_bytes()
        for at in range(len(whole) - padding):
            changed.write_bytes(whole[:at])
            with pytest.raises(ModelLoadError):
                read_importance_matrix(changed)
            changed.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
            with suppress(ModelLoadError):
                read_importance_matrix(changed)
    with pytest.raises(ModelLoadError, match="it is a GGUF file without tensors named"):
        read_importance_matrix(write_model(tmp_path / "model.gguf", LlamaSpec()))


@pytest.mark.parametrize(
    ("stem", "wanted"),
    [
        ("model-F16", "model-Q8_0"),
        ("model.BF16", "model.Q8_0"),
        ("Model-q4_k_m", "Model-Q8_0"),
        ("model", "model-Q8_0"),
        ("model-f16-00001-of-00003", "model-Q8_0"),
        ("F16", "F16-Q8_0"),
        ("model-IQ4_XS-draft", "model-IQ4_XS-draft-Q8_0"),
    ],
)
def test_the_name_has_the_new_quantisation(stem: str, wanted: str) -> None:
    """In place of the old one, if there is one at its end."""
    assert quantized_stem(stem, "Q8_0") == wanted
