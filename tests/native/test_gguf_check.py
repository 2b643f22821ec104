"""Model files that llama.cpp would end the process over are refused with the key and the value."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from paceline.errors import ModelLoadError, Unsupported
from paceline.runtime import Model
from paceline.runtime.gguf_check import check_gguf
from paceline.runtime.gguf_file import ValueType, read_gguf
from paceline.testing.models import (
    KINDS,
    DFlashSpec,
    LlamaSpec,
    Typed,
    every_value_type,
    write_model,
    write_split_model,
)

GOOD = {"llama": LlamaSpec(), **KINDS}
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("llama", {"llama.block_count": 0}, r"llama.block_count is 0, but a model has 1 to 512 layers"),
    ("llama", {"llama.block_count": 513}, r"block_count is 513"),
    ("llama", {"llama.nextn_predict_layers": 2}, r"nextn_predict_layers is 2, but it must be less than block_count"),
    ("llama", {"llama.expert_count": 2000, "llama.expert_used_count": 2}, r"expert_count is 2000, but at most 1024"),
    ("llama", {"llama.expert_count": 4}, r"expert_used_count is 0, but at least one of the 4"),
    ("llama", {"llama.expert_used_count": 3}, r"expert_used_count is 3, but there are 0 experts"),
    ("llama", {"llama.expert_used_count": [1, 3]}, r"expert_used_count is 3, but there are 0 experts"),
    ("mixtral", {"llama.expert_group_count": 4}, r"expert_group_count is 4, but there are 4 experts"),
    ("mixtral", {"llama.expert_group_count": 3}, r"expert_group_count is 3, but 4 experts cannot be split evenly"),
    ("mixtral", {"llama.expert_group_count": 2}, r"expert_group_used_count is 0, but it must be 1 to 1"),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, r"layer_norm_rms_epsilon is -1.0, but it must"),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": float("nan")}, r"layer_norm_rms_epsilon is nan"),
    ("bert", {"bert.attention.layer_norm_epsilon": float("inf")}, r"layer_norm_epsilon is inf"),
    ("llama", {"llama.rope.scaling.type": "spiral"}, r"rope.scaling.type is 'spiral', but llama.cpp knows"),
    ("lfm2", {"lfm2.rope.dimension_count": 0}, r"rope.dimension_count is 0, but it must be at least 2"),
    ("lfm2", {"lfm2.rope.dimension_count": 3}, r"rope.dimension_count is 3, but it must be even"),
    ("falcon-h1", {"falcon-h1.rope.dimension_count": 18}, r"rope.dimension_count is 18, but a head has 16 values"),
    ("qwen2moe", {"qwen2moe.attention.key_length": 64}, r"key_length is 64, but blk.0.attn_k.weight has 32 rows"),
    ("gemma3", {"gemma3.attention.sliding_window": 10**9}, r"sliding_window is 1000000000, but at most 16777216"),
    ("gemma4", {"gemma4.attention.shared_kv_layers": 5}, r"shared_kv_layers is 5, but two of 6 layers need"),
    ("gemma4", {"gemma4.attention.shared_kv_layers": 2}, r"layer 4 uses the cache of layer 2, which is none with a"),
    ("gemma4", {"gemma4.attention.sliding_window_pattern": [True] * 5 + [False]}, r"layer 5 uses the cache of layer 2"),
    ("rwkv6", {"rwkv6.wkv.head_size": 0}, r"wkv.head_size is 0, but embedding_length, 128, must be a multiple"),
    ("rwkv7", {"rwkv7.wkv.head_size": 16}, r"wkv.head_size is 16, but llama.cpp computes 64 values at a time"),
    ("rwkv7", {"rwkv7.token_shift_count": 1}, r"token_shift_count is 1, but llama.cpp computes 2"),
    ("granitehybrid", {"granitehybrid.ssm.inner_size": 64}, r"ssm.inner_size is 64, but llama.cpp computes twice"),
    ("rwkv6", {"rwkv6.attention.head_count_kv": 1}, r"head_count_kv is 1, but there are 2 heads"),
    ("gemma4", {"gemma4.rope.dimension_count_swa": None}, r"dimension_count_swa is 32, but a head has 16 values"),
    ("modern-bert", {"modern-bert.attention.head_count": 3}, r"head_count is 3, but embedding_length, 64, must be"),
    ("modern-bert", {"modern-bert.attention.head_count_kv": 2}, r"head_count_kv is 2, but it must be head_count, 4"),
    ("modern-bert", {"modern-bert.attention.sliding_window_pattern": 1}, r"one layer at least must have a window"),
    ("t5", {"t5.embedding_length_out": 128}, r"embedding_length_out is 128, but nothing in the file"),
    ("llama", {"general.alignment": 2}, r"general.alignment is 2, but it must be a multiple of 32"),
    ("llama", {"tokenizer.ggml.tokens": ["a", "b", "a"]}, r"tokens is a list with the token 'a' in it twice"),
]  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_good_files_pass(tmp_path: Path, kind: str) -> None:
    """Nothing is found wrong with a model of any kind."""
    check_gguf([write_model(tmp_path / "good.gguf", GOOD[kind])])


@pytest.mark.parametrize("architecture", ["deepseek4", "qwen4exp", "gemma4-assistant"])
def test_architectures_may_have_a_wider_output(tmp_path: Path, architecture: str) -> None:
    """Concatenated hidden states, or the target model's, are wider than embedding_length."""
    wider = {f"{architecture}.embedding_length": 64, f"{architecture}.embedding_length_out": 256}
    path = write_model(tmp_path / "wide.gguf", LlamaSpec(), metadata={"general.architecture": architecture, **wider})
    check_gguf([path])


@pytest.mark.parametrize(("kind", "metadata", "message"), REFUSED)
def test_input_that_would_abort_is_refused(
    tmp_path: Path, kind: str, metadata: dict[str, object], message: str
) -> None:
    """The error names the file, the key, the value and the allowed values."""
    path = write_model(tmp_path / "bad.gguf", GOOD[kind], metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=message) as error:
        Model.load(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("group_count", [0, 4])
def test_draft_heads_with_layers_of_deepseek_4_are_unsupported(tmp_path: Path, group_count: int) -> None:
    """Refused before they are loaded, whether llama.cpp would take their sizes or not."""
    sizes = {"dflash.hyper_connection.count": 4, "dflash.attention.output_group_count": group_count}
    path = write_model(tmp_path / "heads.gguf", DFlashSpec(), metadata=sizes)
    with pytest.raises(
        Unsupported, match=r"dflash.hyper_connection.count is 4: DSpark files with layers of DeepSeek 4"
    ):
        Model.load(path)


@pytest.mark.parametrize(
    ("kind", "tensor", "kind_number", "message"),
    [
        ("llama", b"blk.0.attn_q.weight", 26, "tensor blk.0.attn_q.weight is stored as I32"),
        ("llama", b"blk.1.ffn_norm.weight", 1, "tensor blk.1.ffn_norm.weight has tensor type 1; .* must be F32"),
        ("lfm2", b"blk.0.shortconv.conv.weight", 30, "shortconv.conv.weight has tensor type 30"),
    ],
)
def test_tensor_types_that_cannot_be_computed_with_are_refused(
    tmp_path: Path, kind: str, tensor: bytes, kind_number: int, message: str
) -> None:
    """Integers as weights, and norms or convolutions in anything but F32, are refused by the tensor's name."""
    path = write_model(tmp_path / "model.gguf", GOOD[kind])
    data = bytearray(path.read_bytes())
    info = next(info for info in read_gguf(path).tensors if info.name == tensor)
    at = data.index(tensor) + len(tensor) + 4 + 8 * len(info.shape)  # behind the name: dimensions, then the type
    data[at : at + 4] = struct.pack("<I", kind_number)
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        check_gguf([path])


def test_a_missing_tensor_that_is_used_unseen_is_refused(tmp_path: Path) -> None:
    """T5 without its position biases is refused by the tensor's name."""
    path = write_model(tmp_path / "t5.gguf", KINDS["t5"])
    path.write_bytes(path.read_bytes().replace(b"enc.blk.0.attn_rel_b.weight", b"enc.blk.0.attn_rel_x.weight"))
    with pytest.raises(ModelLoadError, match=r"the tensor enc.blk.0.attn_rel_b.weight is missing"):
        check_gguf([path])


def test_overrides_are_looked_at_in_place_of_the_files_values(tmp_path: Path) -> None:
    """A good file with a bad override is refused, a bad file with a good override passes."""
    good = write_model(tmp_path / "good.gguf", LlamaSpec())
    bad = write_model(tmp_path / "bad.gguf", LlamaSpec(), metadata={"llama.block_count": 0})
    with pytest.raises(ModelLoadError, match="block_count is 0"):
        Model.load(good, kv_overrides={"llama.block_count": 0})
    Model.load(bad, kv_overrides={"llama.block_count": 2}).close()


def test_every_part_of_a_split_set_is_looked_at(tmp_path: Path) -> None:
    """A wrong tensor type is found in the last part, and the error names its path."""
    parts = write_split_model(tmp_path / "tiny.gguf", LlamaSpec(), parts=3)
    check_gguf(parts)
    data = parts[2].read_bytes()
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 16
    parts[2].write_bytes(data[:at] + struct.pack("<I", 27) + data[at + 4 :])
    with pytest.raises(ModelLoadError, match="00003-of-00003.gguf: tensor blk.1.ffn_down.weight is stored as I64"):
        Model.load(parts[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"GGML" + bytes(100), r"not a GGUF file: it does not begin with b'GGUF'$"),
        (b"GGUF", "ends in the middle of its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "promises 1152921504606846976 metadata values"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "promises 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(20), "ends in the middle of its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "'k' has type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 0), "k: an array of arrays"),
    ],
)
def test_files_that_are_no_gguf_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """For any bytes the error names the fault."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        check_gguf([path])


def test_every_truncation_of_a_header_is_refused(tmp_path: Path) -> None:
    """A header cut anywhere is an error and never an exception of another kind."""
    whole = write_model(tmp_path / "whole.gguf", LlamaSpec())
    data, size = whole.read_bytes(), read_gguf(whole).header_bytes
    cut = tmp_path / "cut.gguf"
    for length in range(0, size, 37):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            read_gguf(cut)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The error for a missing file has its path in it."""
    with pytest.raises(ModelLoadError, match=r"cannot read .*nowhere.gguf: No such file"):
        check_gguf([tmp_path / "nowhere.gguf"])


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    """Values of every type come back as they were written."""
    path = write_model(tmp_path / "all.gguf", LlamaSpec(), metadata=every_value_type())
    metadata = read_gguf(path).metadata
    for key, typed in every_value_type().items():
        assert isinstance(typed, Typed)
        found = metadata[key.encode()]
        text = typed.type == "STRING" or typed.of == "STRING"
        expected = (
            [item.encode() for item in typed.value]
            if typed.of and text
            else typed.value.encode()
            if text
            else typed.value
        )
        assert (found.value, found.type) == (expected, ValueType[typed.type])
