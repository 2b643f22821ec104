"""Checks of model files: refuses values on which llama.cpp would abort, naming the key and the value.

llama.cpp refuses most damaged files; over some values it aborts instead, while loading or at the first pass. These values are
found here before it sees the file. `docs/known-aborts.md` lists the values that are not caught; `tests/fuzz/fuzz_gguf.py` finds
new ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.errors import (
    AdapterError,
    AdapterFileForbidden,
    AdapterFileNotFound,
    ModelFileForbidden,
    ModelFileNotFound,
    ModelLoadError,
    Unsupported,
)
from paceline.runtime.device import total_memory
from paceline.runtime.gguf_file import GgufFile, MetadataValue, TensorInfo, ValueType, read_gguf

Override = bool | int | float | str

MAX_LAYERS: Final = 512
MAX_EXPERTS: Final = 1024
MAX_WINDOW: Final = 2**24
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_SHARD: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_TYPE_F32: Final = 0
_KEY_WEIGHT: Final = re.compile(rb"blk\.(\d+)\.attn_k\.weight")
_CONVOLUTION: Final = re.compile(rb"blk\.(\d+)\.ssm_conv1d\.weight")
# Tensors of element-wise operations and of convolutions, which mix no types.
_PLAIN: Final = re.compile(
    rb"(norm(_\d)?(\.weight)?|\.bias|\.ssm_[ad]|conv1d\.weight|shortconv\.conv\.weight|^token_types\.weight"
    rb"|^rope_freqs\.weight|layer_output_scale\.weight"
    rb"|(time|channel)_mix_(ln|first|decay|lerp_\w+|[wav]0|k_k|k_a|r_k)\.weight)$"
)
_ADAPTER_TYPES: Final = {
    "general.type": ValueType.STRING,
    "general.architecture": ValueType.STRING,
    "adapter.type": ValueType.STRING,
    "adapter.lora.alpha": ValueType.FLOAT32,
}
# Tensors that llama.cpp takes as optional and then uses without a check.
_NEEDED: Final = {
    "t5": (b"enc.blk.0.attn_rel_b.weight", b"dec.blk.0.attn_rel_b.weight"),
    "t5encoder": (b"enc.blk.0.attn_rel_b.weight",),
}
# embedding_length_out is the width of several hidden states side by side, or of the draft's target model.
_WIDER_OUT: Final = ("deepseek4", "qwen4exp", "gemma4-assistant")
_NEED_CONVOLUTION_BIAS: Final = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_NEED_EXPERTS: Final = ("bailingmoe2", "glm4moe", "grovemoe", "llada-moe", "smallthinker")
_NEED_SECTIONS: Final = ("paddleocr", "qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
# How many activations of the last token a layer's state has.
_SHIFTED_TOKENS: Final = {"rwkv6": 2, "rwkv7": 2, "rwkv6qwen2": 1, "arwkv7": 1}
# Tensor types that no weight can have: integers and doubles, and the formats of activations.
UNUSABLE_TYPES: Final = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_INTEGER_TENSORS: Final = (b"d2t", b"tid2eid")  # tables of token and expert ids, integers on purpose


def check_gguf(
    paths: Sequence[str | Path], overrides: Mapping[str, Override] | None = None, *, needs_weights: bool = False
) -> None:
    """Check the header of a model's file, or of all files of a split set in order.

    `overrides` are the values that llama.cpp will use instead of the file's. Raises `ModelLoadError`, and `Unsupported` if
    llama.cpp would load the file but paceline cannot use it.
    """
    files = [read_gguf(path) for path in paths]
    facts = _Facts(str(paths[0]), files[0], dict(overrides or {}))
    for path, file in zip(paths, files, strict=True):
        _check_complete(path, file)
    if needs_weights and not any(file.tensors for file in files):
        raise ModelLoadError(f"{paths[0]} has a vocabulary alone and no weights; give the file of the whole model")
    for check in (
        _check_kind,
        _check_layers,
        _check_experts,
        _check_draft_heads,
        _check_numbers,
        _check_heads,
        _check_rope,
        _check_shared_layers,
        _check_modern_bert,
        _check_states,
        _check_widths,
        _check_tokens,
    ):
        check(facts)
    _check_needed(facts, {tensor.name for file in files for tensor in file.tensors})
    for path, file in zip(paths, files, strict=True):
        _check_tensors(str(path), file.tensors)


def _check_complete(path: str | Path, file: GgufFile) -> None:
    """Raise `ModelLoadError` if the file ends before its last tensor begins."""
    begin = file.header_bytes + max((tensor.offset for tensor in file.tensors), default=0)
    size = Path(path).stat().st_size
    if file.tensors and begin >= size:
        raise ModelLoadError(
            f"{path} is not complete: it has {size} bytes, and its last tensor begins after {begin}; download it again"
        )


def _check_kind(facts: _Facts) -> None:
    """Raise `ModelLoadError` for a GGUF file that is no model, naming its kind and the option for it."""
    kind = facts.text("general.type")
    if kind == "adapter" or facts.text("adapter.type") is not None:
        raise ModelLoadError(
            f"{facts.name} is a LoRA adapter; give it as lora (--lora), and the model that it was made for as the model"
        )
    if kind == "mmproj" or facts.architecture == "clip":
        raise ModelLoadError(
            f"{facts.name} is a multimodal projector; give it as mmproj (--mmproj), and its language model as the model"
        )
    if kind == "imatrix":
        raise ModelLoadError(f"{facts.name} is an importance matrix, which serves to quantise a model; give the model")


def files_beside(path: Path) -> tuple[Path, ...]:
    """Return the files that llama.cpp opens for this one: itself, or all parts of its split set."""
    match = _SHARD.fullmatch(path.name)
    if not match:
        return (path,)
    stem, count = match["stem"], int(match["count"])
    shards = tuple(path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    if int(match["number"]) != 1:
        raise ModelLoadError(
            f"{path.name} is not the first part of its split set; load {shards[0].name}" if shards else path.name
        )
    return shards


def check_adapter(path: str | Path) -> None:
    """Check the header of a LoRA adapter's file. Raises `AdapterError`."""
    try:
        file = read_gguf(path)
        _check_complete(path, file)
        _check_tensors(str(path), file.tensors)
    except ModelFileNotFound as error:
        raise AdapterFileNotFound(str(error), error.filename) from None
    except ModelFileForbidden as error:
        raise AdapterFileForbidden(str(error), error.filename) from None
    except ModelLoadError as error:
        raise AdapterError(str(error)) from None
    size, memory = Path(path).stat().st_size, total_memory()
    if size > memory:  # it is read whole
        raise AdapterError(f"{path} has {size} bytes, more than the {memory} bytes of this machine's memory")
    kind_of_file = file.metadata.get(b"general.type")
    is_adapter = b"adapter.type" in file.metadata or (kind_of_file is not None and kind_of_file.value == b"adapter")
    if not is_adapter and file.tensors and b"general.architecture" in file.metadata:
        raise AdapterError(
            f"{path} is not a LoRA adapter: its general.type is not 'adapter'; llama.cpp's convert_lora_to_gguf.py makes adapters"
        )
    for key, kind in _ADAPTER_TYPES.items():
        found = file.metadata.get(key.encode())
        if found is not None and found.type is not kind:
            raise AdapterError(f"{path}: {key} has the type {found.type.name}, but it must have {kind.name}")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Metadata by the names that architectures share: `facts.integer("block_count")`.

    None for a missing value or one of a wrong type, which llama.cpp refuses by itself.
    """

    name: str
    file: GgufFile
    overrides: dict[str, Override]

    def key(self, key: str) -> str:
        """Return the key with the architecture as prefix, unless it has a prefix of its own."""
        return key if key.startswith(("tokenizer.", "general.")) else f"{self.architecture}.{key}"

    @property
    def architecture(self) -> str:
        value = self.file.metadata.get(b"general.architecture")
        override = self.overrides.get("general.architecture")
        if isinstance(override, str):
            return override
        return str(value.value, "utf-8", "replace") if value and value.type is ValueType.STRING else ""

    def integer(self, key: str) -> int | None:
        value = self._value(key, ValueType.UINT32)
        return None if value is None else int(value) & 0xFFFFFFFF  # an override is cut off in the same way

    def integers(self, key: str) -> list[int]:
        """Return the number, or the numbers of all layers."""
        found = self.file.metadata.get(self.key(key).encode())
        if (
            found
            and found.type is ValueType.ARRAY
            and found.item_type in (ValueType.UINT32, ValueType.INT32, ValueType.BOOL)
        ):
            return [int(item) & 0xFFFFFFFF for item in found.value]
        single = self.integer(key)
        return [] if single is None else [single]

    def is_odd(self, key: str) -> bool:
        """Return whether there is a value that is neither a 32-bit number nor a list of them."""
        return self.key(key).encode() in self.file.metadata and not self.integers(key)

    def number(self, key: str) -> float | None:
        value = self._value(key, ValueType.FLOAT32)
        return None if value is None else float(value)

    def text(self, key: str) -> str | None:
        value = self._value(key, ValueType.STRING)
        return str(value, "utf-8", "replace") if isinstance(value, bytes) else value

    def strings(self, key: str) -> list[bytes]:
        found = self.file.metadata.get(key.encode())
        is_list = found is not None and found.type is ValueType.ARRAY and found.item_type is ValueType.STRING
        return found.value if found is not None and is_list else []

    def refuse(self, key: str, value: object, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.name}: {self.key(key)} is {value}, but {reason}")

    def _value(self, key: str, kind: ValueType) -> Any:
        override = self.overrides.get(self.key(key))
        if override is not None and isinstance(override, _OVERRIDE_TYPES[kind]) and not isinstance(override, bool):
            return override
        found: MetadataValue | None = self.file.metadata.get(self.key(key).encode())
        return found.value if found and found.type is kind else None


_OVERRIDE_TYPES: Final[dict[ValueType, type]] = {ValueType.UINT32: int, ValueType.FLOAT32: float, ValueType.STRING: str}


def _check_layers(facts: _Facts) -> None:
    layers = facts.integer("block_count")
    if layers is None:
        return
    if not 1 <= layers <= MAX_LAYERS:
        raise facts.refuse("block_count", layers, f"a model has 1 to {MAX_LAYERS} layers")
    extra = facts.integer("nextn_predict_layers") or 0
    if extra >= layers:
        raise facts.refuse("nextn_predict_layers", extra, f"it must be less than block_count, {layers}")


def _check_experts(facts: _Facts) -> None:
    experts = facts.integer("expert_count") or 0
    used = max(facts.integers("expert_used_count"), default=0)
    if facts.architecture.startswith("hunyuan") and experts <= 1:
        return  # llama.cpp takes one expert as none there
    if not experts and facts.architecture in _NEED_EXPERTS:
        raise facts.refuse("expert_count", experts, "this architecture needs one at least")
    if experts > MAX_EXPERTS:
        raise facts.refuse("expert_count", experts, f"at most {MAX_EXPERTS} experts are possible")
    if used > experts:
        raise facts.refuse("expert_used_count", used, f"there are {experts} experts (expert_count)")
    if experts and not used:
        raise facts.refuse("expert_used_count", used, f"at least one of the {experts} experts must be used")
    groups, used_groups = facts.integer("expert_group_count") or 0, facts.integer("expert_group_used_count") or 0
    if groups and groups >= experts:
        raise facts.refuse("expert_group_count", groups, f"there are {experts} experts (expert_count)")
    if groups > 1 and experts % groups:
        raise facts.refuse("expert_group_count", groups, f"{experts} experts cannot be split evenly")
    if groups > 1 and not 0 < used_groups < groups:
        raise facts.refuse("expert_group_used_count", used_groups, f"it must be 1 to {groups - 1}")


def _check_draft_heads(facts: _Facts) -> None:
    """Refuse a DSpark file with layers of DeepSeek 4, before llama.cpp asserts on its sizes."""
    count = facts.integer("hyper_connection.count") if facts.architecture == "dflash" else None
    if count:
        raise Unsupported(
            f"{facts.name}: {facts.key('hyper_connection.count')} is {count}: DSpark files with layers of DeepSeek 4 are not "
            "supported, as wrong drafts cannot be cut from their memory"
        )


def _check_numbers(facts: _Facts) -> None:
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon"):
        epsilon = facts.number(f"attention.{name}")
        if epsilon is not None and not (math.isfinite(epsilon) and epsilon >= 0):
            raise facts.refuse(f"attention.{name}", epsilon, "it must be finite and at least 0")


def _check_heads(facts: _Facts) -> None:
    """Check the size of the key heads against the metadata, which not every architecture compares."""
    queries = facts.integers("attention.head_count")
    if queries and not any(queries) and facts.architecture not in ("mamba", "mamba2", *_SHIFTED_TOKENS):
        raise facts.refuse("attention.head_count", 0, "this architecture needs one at least")
    sizes = {facts.integer(f"attention.key_length{suffix}") for suffix in ("", "_swa", "_mla")} - {None}
    heads = facts.integers("attention.head_count_kv")
    for tensor in facts.file.tensors:
        match = _KEY_WEIGHT.fullmatch(tensor.name)
        if match is None or not sizes or not heads or len(tensor.shape) != 2:
            continue
        layer = int(match[1])
        count = heads[layer] if len(heads) > layer else heads[0]
        if count and tensor.shape[1] not in {count * size for size in sizes if size is not None}:
            found = f"{tensor.name.decode()} has {tensor.shape[1]} rows for {count} heads"
            raise facts.refuse("attention.key_length", facts.integer("attention.key_length"), found)


def _check_widths(facts: _Facts) -> None:
    window = facts.integer("attention.sliding_window")
    if window is not None and window > MAX_WINDOW:
        raise facts.refuse("attention.sliding_window", window, f"at most {MAX_WINDOW} tokens are possible")
    width, out = facts.integer("embedding_length"), facts.integer("embedding_length_out")
    is_made = facts.architecture in _WIDER_OUT or any(b"dense" in tensor.name for tensor in facts.file.tensors)
    if width and out and out > width and not is_made:
        raise facts.refuse("embedding_length_out", out, f"nothing in the file makes more of embedding_length, {width}")
    alignment = facts.integer("general.alignment")
    if alignment is not None and alignment % 32:
        raise facts.refuse("general.alignment", alignment, "it must be a multiple of 32")


def _check_rope(facts: _Facts) -> None:
    scaling = facts.text("rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise facts.refuse("rope.scaling.type", repr(scaling), f"llama.cpp knows {', '.join(_ROPE_SCALINGS)}")
    sections = facts.integers("rope.dimension_sections")
    if facts.architecture in _NEED_SECTIONS and not any(sections[:3]):
        raise facts.refuse("rope.dimension_sections", sections, "one of the first three must be more than 0")
    heads, width = facts.integers("attention.head_count"), facts.integer("embedding_length")
    by_default = width // heads[0] if heads and heads[0] and width else 0
    for suffix in ("", "_swa"):
        size = facts.integer(f"attention.key_length{suffix}") or facts.integer("attention.key_length") or by_default
        rotated = facts.integer(f"rope.dimension_count{suffix}")
        if rotated is None and facts.integer(f"attention.key_length{suffix}") and suffix:
            rotated = facts.integer("rope.dimension_count") or facts.integer("attention.key_length") or by_default
        if rotated == 0 and size and facts.integer("attention.kv_lora_rank") is None:  # it loops for ever over none
            raise facts.refuse(f"rope.dimension_count{suffix}", 0, "it must be at least 2")
        if rotated is not None and rotated % 2:
            raise facts.refuse(f"rope.dimension_count{suffix}", rotated, "it must be even")
        if rotated is not None and size and rotated > size:
            raise facts.refuse(f"rope.dimension_count{suffix}", rotated, f"a head has {size} values")


def _check_shared_layers(facts: _Facts) -> None:
    """Check that the last layers, with or without a window, find a layer of their kind to share the cache of."""
    shared, layers = facts.integer("attention.shared_kv_layers") or 0, facts.integer("block_count")
    windows = facts.integers("attention.sliding_window_pattern")
    if not shared or layers is None or facts.architecture not in ("gemma3n", "gemma4"):
        return
    own = layers - shared
    if own < 2:
        raise facts.refuse("attention.shared_kv_layers", shared, f"two of {layers} layers need a cache of their own")
    if len(windows) != layers:  # a period instead of a list; llama.cpp refuses it for gemma4
        return
    last = {True: own - 2, False: own - 1}
    for layer in range(own, layers):
        has_window = bool(windows[layer])
        if bool(windows[last[has_window]]) != has_window:
            kind = "with" if has_window else "without"
            raise facts.refuse(
                "attention.shared_kv_layers",
                shared,
                f"layer {layer} uses the cache of layer {last[has_window]}, which is none {kind} a window",
            )


def _check_modern_bert(facts: _Facts) -> None:
    """Check the heads of ModernBERT (one matrix for queries, keys and values), and that some layer has its window."""
    if facts.architecture != "modern-bert":
        return
    width, layers = facts.integer("embedding_length"), facts.integer("block_count")
    heads = max(facts.integers("attention.head_count"), default=0)
    shared = set(facts.integers("attention.head_count_kv")) - {heads}
    if not heads or (width or 0) % heads:
        raise facts.refuse("attention.head_count", heads, f"embedding_length, {width}, must be a multiple of it")
    if shared or facts.is_odd("attention.head_count_kv"):
        raise facts.refuse(
            "attention.head_count_kv", min(shared, default="no number"), f"it must be head_count, {heads}"
        )
    pattern = facts.integers("attention.sliding_window_pattern")
    period = pattern[0] if len(pattern) == 1 else 0
    is_odd = facts.is_odd("attention.sliding_window_pattern")
    has_window = any(pattern) if len(pattern) > 1 else period > 1 and (layers or 0) > 1
    if facts.integer("attention.sliding_window") and (pattern or is_odd) and not has_window:
        raise facts.refuse(
            "attention.sliding_window_pattern", pattern or "no number", "one layer at least must have a window"
        )


def _check_states(facts: _Facts) -> None:
    """Check the sizes of recurrent states, which llama.cpp does not check."""
    architecture, width = facts.architecture, facts.integer("embedding_length")
    head_size = facts.integer("wkv.head_size")
    if architecture in _SHIFTED_TOKENS and head_size is not None and width is not None:
        if head_size == 0 or width % head_size:
            raise facts.refuse("wkv.head_size", head_size, f"embedding_length, {width}, must be a multiple of it")
        if head_size % 64 and architecture in ("rwkv7", "arwkv7"):
            raise facts.refuse("wkv.head_size", head_size, "llama.cpp computes 64 values at a time")
    if architecture in ("rwkv6", "rwkv6qwen2") and head_size and width:
        heads = width // head_size
        for found in facts.integers("attention.head_count_kv"):
            if found and (found != heads if architecture == "rwkv6" else heads % found):
                raise facts.refuse("attention.head_count_kv", found, f"there are {heads} heads")
    shifted = facts.integer("token_shift_count")
    if shifted is not None and shifted != _SHIFTED_TOKENS.get(architecture, shifted):
        raise facts.refuse("token_shift_count", shifted, f"llama.cpp computes {_SHIFTED_TOKENS[architecture]}")
    inner = facts.integer("ssm.inner_size")
    if architecture == "granitehybrid" and None not in (inner, width) and inner != 2 * (width or 0):
        raise facts.refuse("ssm.inner_size", inner, f"llama.cpp computes twice embedding_length, {width}")


def _check_tokens(facts: _Facts) -> None:
    tokens = facts.strings("tokenizer.ggml.tokens")
    distinct = set(tokens)
    if len(distinct) == len(tokens) and b"" not in distinct:  # nearly always, and the fast way to know
        return
    tokens = [token or b"[EMPTY_%d]" % place for place, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        token = next(token for token, count in Counter(tokens).items() if count > 1)
        text = token.decode("utf-8", "replace")[:80]
        raise facts.refuse("tokenizer.ggml.tokens", f"a list with the token {text!r} in it twice", "tokens must differ")


def _check_needed(facts: _Facts, present: set[bytes]) -> None:
    needed = list(_NEEDED.get(facts.architecture, ()))
    if facts.architecture in _NEED_CONVOLUTION_BIAS:
        needed += [name.removesuffix(b"weight") + b"bias" for name in present if _CONVOLUTION.fullmatch(name)]
    if facts.architecture == "rwkv6":
        single = (name for name in present if name.endswith(b".time_mix_lerp_x.weight"))
        fused = (name.replace(b"lerp_x", b"lerp_fused") for name in single)
        needed += [name for name in fused if name.replace(b"lerp_fused", b"lerp_w") not in present]
    for name in needed:
        if present and name not in present:
            raise ModelLoadError(f"{facts.name}: the tensor {name.decode()} is missing")


def _check_tensors(name: str, tensors: Iterable[TensorInfo]) -> None:
    for tensor in tensors:
        if tensor.type in UNUSABLE_TYPES and not any(part in tensor.name for part in _INTEGER_TENSORS):
            text = tensor.name.decode("utf-8", "replace")
            raise ModelLoadError(
                f"{name}: tensor {text} is stored as {UNUSABLE_TYPES[tensor.type]}, which weights cannot be"
            )
        if tensor.type != _TYPE_F32 and _PLAIN.search(tensor.name):
            text = tensor.name.decode("utf-8", "replace")
            raise ModelLoadError(
                f"{name}: tensor {text} has tensor type {tensor.type}; norms, biases and the like must be F32 (0)"
            )
