"""The header of a model's files, read for its memory: its layers, and the memory that each layer keeps of a sequence.

llama.cpp decides by architecture, in code. Its rules are repeated here, and tests/native/test_memory_estimate.py checks them
against its plans. If an architecture keeps more memory than these rules cover, a plan (`plan_memory`) includes it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from paceline.errors import InvalidType, ModelLoadError
from paceline.runtime.gguf_check import MAX_LAYERS, Override
from paceline.runtime.gguf_file import GgufFile, TensorInfo, read_gguf, tensor_bytes
from paceline.runtime.model import MemoryClass

_BLOCK: Final = re.compile(rb"blk\.(\d+)\.(.+)")
_STATE: Final = re.compile(rb"(ssm_|time_mix|shortconv)")
_WITHOUT_MEMORY: Final = frozenset(
    """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding wavtokenizer-dec
    dream llada llada-moe rnd1
    """.split()  # noqa: SIM905 - names read better as words than as literals
)
_RECURRENT: Final = frozenset("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7".split())  # noqa: SIM905
_HYBRID: Final = frozenset(
    """
    jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear bailingmoe3 kimi-k3
    glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01
    """.split()  # noqa: SIM905
)
_ATTENTION_IN_EVERY_LAYER: Final = frozenset({"falcon-h1"})
# The period of layers with full attention if the file has none: the last layer of each period, or the first if negative.
_PERIODS: Final = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": -4, "exaone-moe": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5,
    "gpt-oss": 2, "laguna": -4, "llama4": 4, "mellum": 4, "muse-glimmer": 4, "olmo2": 4, "plamo3": 8, "smallthinker": -4,
}  # fmt: skip
_DEFAULT_WINDOWS: Final = {"gemma2": 4096, "exaone-moe": 128}
_FIXED_WINDOWS: Final = {"llama4": 8192, "smallthinker": 4096}  # if the file names any window
_IGNORED_WINDOWS: Final = frozenset({"phi3"})
_WINDOW_NEEDS_LAYERS: Final = {"exaone4": 64}  # other sizes of it have none
# They keep more than keys and values of heads: keys of an indexer, compressed rows.
_KEEP_MORE: Final = frozenset("deepseek32 deepseek4 dots3note glm-dsa glm5-next hy_v4 minimax-m3 qwen4exp".split())  # noqa: SIM905
_ONE_PART_A_LAYER: Final = frozenset({"nemotron_h", "nemotron_h_moe"})  # attention, a state, or feed-forward weights
_LINEAR_INTERVAL: Final = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
# Their layers that predict further tokens are loaded only on request.
_HEADS_ON_REQUEST: Final = frozenset(
    """
    bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe glm5-next hy_v3 mimo2 nemotron_h nemotron_h_moe
    qwen35 qwen35moe qwen3next step35
    """.split()  # noqa: SIM905
)
# Optional tensors of these layers are loaded in any case.
_HEADS_LOADED_ANYWAY: Final = {
    "hy_v3": re.compile(rb"ffn_(?!norm)|nextn\.(embed_tokens|shared_head)"),
    "step35": re.compile(rb"ffn_(?!norm)|nextn\.(embed_tokens|shared_head)|attn_([qk]_norm|gate)|rope_freqs"),
}
_FLOAT: Final = 4


def _number(key: str) -> Any:
    return property(lambda self: self._integer(key))


class ModelHeader:
    """The header of a model's file, or of all files of a split set in order. Raises `ModelLoadError`."""

    def __init__(self, paths: Sequence[Path], overrides: Mapping[str, Override] | None = None) -> None:
        files = [read_gguf(path) for path in paths]
        self._file: GgufFile = files[0]
        if not isinstance(overrides, Mapping | None):
            raise InvalidType(f"kv_overrides must be a mapping of keys to values, not {type(overrides).__name__}")
        self._overrides = dict(overrides or {})
        self._name = str(paths[0])
        self.tensors: tuple[TensorInfo, ...] = tuple(tensor for file in files for tensor in file.tensors)
        if not 0 <= self.n_layer <= MAX_LAYERS:  # lists and loops of them follow
            raise ModelLoadError(
                f"{self._name}: {self.architecture}.block_count is {self.n_layer}, but a model has 1 to {MAX_LAYERS} layers"
            )

    @cached_property
    def architecture(self) -> str:
        """The name of the architecture; empty if the file has none."""
        found = self._value("general.architecture")
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found if isinstance(found, str) else ""

    n_layer: int = _number("block_count")
    """All layers, including the layers that predict further tokens and are no part of a pass."""

    @cached_property
    def n_running(self) -> int:
        """Layers of a pass."""
        return max(0, self.n_layer - self._integer("nextn_predict_layers"))

    def is_unused(self, tensor: TensorInfo) -> bool:
        """Whether a tensor is loaded only with `draft_heads`, as its layer predicts further tokens."""
        match = _BLOCK.match(tensor.name)
        if match is None or self.architecture not in _HEADS_ON_REQUEST or int(match[1]) < self.n_running:
            return False
        loaded = _HEADS_LOADED_ANYWAY.get(self.architecture)
        return loaded is None or not loaded.match(match[2])

    n_ctx_train: int = _number("context_length")
    """Tokens of context in the training; 0 if the file does not say."""
    n_expert: int = _number("expert_count")
    """Experts of a layer; 0 if the model is no mixture."""

    @cached_property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        found = self._file.metadata.get(b"tokenizer.ggml.tokens")
        return len(found.value) if found is not None and isinstance(found.value, list) else self._integer("vocab_size")

    @cached_property
    def n_swa(self) -> int:
        """Width of the sliding window; 0 without one."""
        named = self._integer("attention.sliding_window")
        architecture = self.architecture
        if self.n_running != _WINDOW_NEEDS_LAYERS.get(architecture, self.n_running):
            return 0
        if architecture in _IGNORED_WINDOWS or (not named and architecture not in _DEFAULT_WINDOWS):
            return 0
        return _FIXED_WINDOWS.get(architecture, named or _DEFAULT_WINDOWS.get(architecture, 0))

    n_embd: int = _number("embedding_length")
    """Width of the hidden state."""
    n_head: int = _number("attention.head_count")
    """Most attention heads of a layer."""

    @property
    def memory_class(self) -> MemoryClass:
        """The kind of memory that the model keeps of a sequence."""
        if self.keeps_nothing:
            return MemoryClass.NONE
        if self.keeps_states:
            return MemoryClass.RECURRENT if self.architecture in _RECURRENT else MemoryClass.HYBRID
        return MemoryClass.SLIDING_WINDOW if self.n_swa else MemoryClass.ATTENTION

    @property
    def keeps_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.architecture in _RECURRENT or self.architecture in _HYBRID

    @property
    def keeps_more(self) -> bool:
        """Whether the cache takes more memory than these rules cover."""
        return self.architecture in _KEEP_MORE

    @property
    def keeps_nothing(self) -> bool:
        """Whether the model keeps no memory of a sequence: encoders and diffusion models."""
        return self.architecture in _WITHOUT_MEMORY

    # ---- what a layer keeps

    def cell_widths(self, layer: int) -> tuple[int, int]:
        """Return the values of a cell's key and value in this layer; zeros if it does not attend."""
        if self.keeps_nothing or layer >= self.n_running or not self._attends(layer):
            return (0, 0)
        shared = self._integer("attention.shared_kv_layers")
        if shared and layer >= self.n_running - shared:  # they use the cells of earlier layers
            return (0, 0)
        return self.widths_of_heads(layer)

    def widths_of_heads(self, layer: int) -> tuple[int, int]:
        """Return the values of a cell's key and value in a layer with attention, or in a layer that predicts further tokens."""
        heads = self._of_layer("attention.head_count_kv", layer, self._of_layer("attention.head_count", layer, 0))
        query_heads = self._of_layer("attention.head_count", 0, 0)
        by_default = self._integer("embedding_length") // query_heads if query_heads else 0
        suffix = "_swa" if self.slides(layer) else ""
        key = self._integer(f"attention.key_length{suffix}") or self._integer("attention.key_length") or by_default
        value = (
            self._integer(f"attention.value_length{suffix}") or self._integer("attention.value_length") or by_default
        )
        if self._integer("attention.key_length_mla"):  # keys and values are one compressed row
            return (heads * key, 0)
        return (heads * key, heads * value)

    def state_bytes(self, layer: int) -> int:
        """Return the bytes of one sequence's recurrent state in this layer."""
        if layer >= self.n_running or not self._has_state(layer):
            return 0
        return _FLOAT * (self._convolution_width() + self._state_width())

    def slides(self, layer: int) -> bool:
        """Whether this layer attends to a sliding window only."""
        if not self.n_swa:
            return False
        pattern = self._value(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return layer < len(pattern) and bool(pattern[layer])
        period = _PERIODS.get(self.architecture, 0)
        if isinstance(pattern, int) and pattern and period:
            period = int(math.copysign(pattern, period))
        if period < 0:
            return layer % -period != 0
        return period > 0 and layer % period < period - 1

    def _attends(self, layer: int) -> bool:
        if self.architecture in _RECURRENT:
            return False
        if self.architecture in _ONE_PART_A_LAYER and self._of_layer("feed_forward_length", layer, 0):
            return False
        return not self._has_state(layer) or self.architecture in _ATTENTION_IN_EVERY_LAYER

    def _has_state(self, layer: int) -> bool:
        if not self.keeps_states:
            return False
        if self.architecture in _RECURRENT or self.architecture in _ATTENTION_IN_EVERY_LAYER:
            return True
        listed = self._value(f"{self.architecture}.attention.recurrent_layers")
        if isinstance(listed, list):
            return layer < len(listed) and bool(listed[layer])
        interval = _LINEAR_INTERVAL.get(self.architecture)
        if interval is not None:
            return (layer + 1) % (self._integer("full_attention_interval") or interval) != 0
        return any(_STATE.match(name) for name in self._names_of_layer[layer])

    @cached_property
    def _names_of_layer(self) -> Mapping[int, list[bytes]]:
        found: defaultdict[int, list[bytes]] = defaultdict(list)
        for tensor in self.tensors:
            match = _BLOCK.match(tensor.name)
            if match:
                found[int(match[1])].append(match[2])
        return found

    def _convolution_width(self) -> int:
        width = self._integer("embedding_length")
        if self._integer("wkv.head_size"):
            return width * (self._integer("token_shift_count") or 2)
        if self._integer("shortconv.l_cache"):
            return width * (self._integer("shortconv.l_cache") - 1)
        kernel = self._integer("ssm.conv_kernel")
        if self._integer("kda.head_dim"):
            heads = self._of_layer("attention.head_count", 0, 0)
            return 3 * (kernel - 1 if kernel else 3) * heads * self._integer("kda.head_dim")
        inner = self._integer("ssm.inner_size") + 2 * self._integer("ssm.group_count") * self._integer("ssm.state_size")
        return max(0, kernel - 1) * inner

    def _state_width(self) -> int:
        width, heads = self._integer("embedding_length"), self._of_layer("attention.head_count", 0, 0)
        if self._integer("wkv.head_size"):
            return width * self._integer("wkv.head_size")
        head = self._integer("kda.head_dim") or (
            self._integer("attention.key_length") if self.architecture == "minimax-01" else 0
        )
        return head * head * heads if head else self._integer("ssm.state_size") * self._integer("ssm.inner_size")

    # ---- metadata

    def _value(self, key: str) -> Any:
        if key in self._overrides:
            return self._overrides[key]
        found = self._file.metadata.get(key.encode())
        return None if found is None else found.value

    def _integer(self, key: str) -> int:
        """Return a number of the architecture, the greatest number of all layers, or 0 without a value."""
        found = self._value(f"{self.architecture}.{key}")
        if isinstance(found, list):
            return max((value for value in found if isinstance(value, int)), default=0)
        return found if isinstance(found, int) else 0

    def _of_layer(self, key: str, layer: int, default: int) -> int:
        found = self._value(f"{self.architecture}.{key}")
        if isinstance(found, list):
            return int(found[layer]) if layer < len(found) and isinstance(found[layer], int) else default
        return found if isinstance(found, int) else default

    def tensor_bytes(self, tensor: TensorInfo) -> int:
        """Return the bytes of a tensor. Raises `ModelLoadError` if llama.cpp does not know its type."""
        return tensor_bytes(self._name, tensor)
