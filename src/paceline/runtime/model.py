"""A loaded GGUF model: the facts of its file, its tensors' places, its LoRA adapters and chat templates, and a remote model."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from paceline import _native, validation
from paceline.errors import AdapterError, Closed, InvalidParams, InvalidType, ModelLoadError
from paceline.runtime.gguf_check import Override, check_adapter, check_gguf, files_beside
from paceline.runtime.gguf_file import content_fingerprint, file_fingerprint
from paceline.runtime.matmul import PackedCache, use_kernel_of_environment
from paceline.runtime.native_core import Closeable, SharedOwners, native_fact
from paceline.runtime.tokenizer import Tokenizer

ChatParser = _native.ChatParser
ChatPrompt = _native.ChatPrompt

SplitMode = Literal["none", "layer", "row", "tensor"]
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"]
PathLike = str | os.PathLike[str]

# The numbers are llama.cpp's.
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3, "direct_io": 4}


class MemoryClass(StrEnum):
    """The kind of memory a model keeps of a sequence; it decides whether a part can be shared, truncated or saved."""

    ATTENTION = "attention"  # keys and values of every position: any prefix can be shared, and the end truncated
    SLIDING_WINDOW = "sliding_window"  # as attention, but layers drop positions that have left their window
    RECURRENT = "recurrent"  # one state that every token changes: only whole copies and saved states
    HYBRID = "hybrid"  # attention and recurrent state side by side: as recurrent
    NONE = "none"  # encoders keep nothing


class Adapter(Closeable):
    """A LoRA adapter in memory, made by `Model.load_adapter`. Keeps its model alive; free it with `close()`.

    A closed adapter that a context applies is freed when the context drops it. `fingerprint` has 16 bytes that identify the
    content of its file.
    """

    def __init__(self, native: _native.Adapter, path: Path, fingerprint: bytes) -> None:
        self._native: _native.Adapter | None = native
        self.path = path
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, model: Model, path: Path) -> Self:
        """Load an adapter file for a model. Raises `AdapterError` if the file is no adapter or does not fit the model.

        The whole file is read before llama.cpp reads it, under a lock for which passes may wait: then from the page cache.
        """
        check_adapter(path)
        try:
            fingerprint = content_fingerprint(path)
        except OSError as error:
            raise AdapterError(f"cannot read the adapter {path}: {error.strerror or error}") from None
        return cls(_native.Adapter.load(model.native, str(path)), path, fingerprint)

    @property
    def native(self) -> _native.Adapter:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed(f"the adapter {self.path.name} was closed")
        return self._native

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The scalar metadata of the adapter's file, as text."""
        return MappingProxyType(dict(self.native.metadata))

    def close(self) -> None:
        """Free the memory; idempotent."""
        self._native = None

    def __repr__(self) -> str:
        return f"Adapter({self.path.name!r}{', closed' if self._native is None else ''})"


class Model(Closeable):
    """A loaded model. Contexts, samplers, tokenizers and adapters made from it keep it alive.

    Constant once loaded and safe to use from any thread. `close()` (or the end of a `with` block, or garbage
    collection) releases this object's share of the memory, which is freed with the last object made from the model.
    `free()` closes the tokenizer, the chat templates and the samplers as well. `metadata`, `paths`, `modalities` and
    `fingerprint` can be read after either.
    """

    def __init__(
        self, native: _native.Model, paths: tuple[Path, ...], overrides: Mapping[str, Override] | None = None
    ) -> None:
        self._native: _native.Model | None = native
        self.paths = paths
        self.owners = SharedOwners()
        self._packed_cache: PackedCache | None = None
        self._modalities = frozenset({"text"})
        self._overrides = {key: _as_text(value) for key, value in (overrides or {}).items()}
        facts = (f"{key}={value}" for key, value in sorted(self._overrides.items()))
        files = files_beside(paths[0]) if len(paths) == 1 else paths
        self._fingerprint = file_fingerprint(files, *facts)
        self.written_ns = tuple(path.stat().st_mtime_ns for path in files)
        self.metadata: Mapping[str, str] = MappingProxyType(dict(native.metadata) | self._overrides)
        """The scalar metadata of the file as text, overrides included."""

    @classmethod
    def load(  # noqa: PLR0913 - the options of llama.cpp, all by keyword
        cls,
        path: PathLike | Sequence[PathLike],
        *,
        n_gpu_layers: int | None = None,
        devices: Sequence[str] | None = None,
        split_mode: SplitMode = "layer",
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
        load_mode: LoadMode = "auto",
        vocab_only: bool = False,
        check_tensors: bool = False,
        use_extra_bufts: bool = True,
        packed_cache: str | os.PathLike[str] | None = None,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        tensor_overrides: Mapping[str, str] | None = None,
        cpu_moe: bool = False,
        n_cpu_moe: int = 0,
        n_cpu_ffn: int = 0,
        no_alloc: bool = False,
        draft_heads: bool = False,
        progress: Callable[[float], object] | None = None,
        cancel: threading.Event | None = None,
    ) -> Self:
        """Load a GGUF file, or a split set by its first part (with the others beside it) or by all parts in order.

        n_gpu_layers: layers on the GPU; -1 and None mean all (an engine replaces None by a number that fits).
        devices: names from `paceline.runtime.devices()`; None takes all, ["CPU"] none but the CPU.
        split_mode, tensor_split, main_gpu: how several GPUs share the model, as in llama.cpp.
        load_mode: how the file is read; "auto" maps it into memory if that is best.
        vocab_only: loads no weights: enough for a `Tokenizer` and a chat template.
        check_tensors: checks the weights for invalid values while loading.
        use_extra_bufts: packs weights on a CPU for faster products if there is a kernel for them (see `runtime.matmul`);
        packed weights are no longer mapped from the file. False keeps all weights as in the file.
        packed_cache: a folder for packed weights. The first load writes them there, and later loads of the same file with the
        same options map them: nothing is packed, and processes share the memory.
        kv_overrides: metadata that replaces or adds to the file's own.
        tensor_overrides: patterns of tensor names (regular expressions of ECMAScript, searched in names like
        "blk.3.ffn_up_exps.weight") with the type of buffer for each, like {"_exps": "CPU"}; the first match counts.
        cpu_moe: keeps the weights of all experts of a mixture in host memory. n_cpu_moe: the number of
        first layers with experts in host memory; n_cpu_ffn: with dense feed-forward weights in host memory.
        no_alloc: reads the header and places every tensor, but loads no weights: enough for `plan_memory`.
        draft_heads: loads the layers that predict the tokens after the next one, too; for `Context(draft_heads=...)`.
        progress: called with 0.0 to 1.0 on this thread; returning False cancels.
        cancel: an event that any thread may set to end the load.

        Raises `ModelLoadError` (no such file, no model, damaged), `Aborted` (cancelled), `InvalidParams`, and the
        errors of `progress`.
        """
        use_kernel_of_environment()
        if kv_overrides is not None and not isinstance(kv_overrides, Mapping):
            raise InvalidType(f"kv_overrides must be a mapping, not {type(kv_overrides).__name__}")
        overrides = [_checked_override(key, value) for key, value in (kv_overrides or {}).items()]
        paths = _checked_paths(path, dict(overrides), needs_weights=not validation.boolean("vocab_only", vocab_only))
        placements = tensor_placements(tensor_overrides, cpu_moe=cpu_moe, n_cpu_moe=n_cpu_moe, n_cpu_ffn=n_cpu_ffn)
        folder = None if packed_cache is None else validation.path("packed_cache", packed_cache)
        loads_weights = not (validation.boolean("no_alloc", no_alloc) or vocab_only)
        packs = validation.boolean("use_extra_bufts", use_extra_bufts) and loads_weights
        cache = None
        if folder is not None and packs and _native.own_matmul():
            files = files_beside(paths[0]) if len(paths) == 1 else paths
            cache = PackedCache(folder, files, overrides, n_gpu_layers, devices, tensor_split, placements, draft_heads)
        with nullcontext() if cache is None else cache.loading():
            native = _native.Model.load(
                [str(part) for part in paths],
                None if devices is None else [validation.text("devices", name) for name in _listed("devices", devices)],
                None if n_gpu_layers is None else validation.integer("n_gpu_layers", n_gpu_layers, -1, 2**31 - 1),
                _SPLIT_MODES[validation.choice("split_mode", split_mode, _SPLIT_MODES)],
                _LOAD_MODES[validation.choice("load_mode", load_mode, _LOAD_MODES)],
                validation.integer("main_gpu", main_gpu, 0, 2**31 - 1),
                _checked_shares(tensor_split),
                overrides,
                vocab_only,
                validation.boolean("check_tensors", check_tensors),
                use_extra_bufts,
                progress_function(progress, cancel),
                placements,
                no_alloc,
                **({"draft_heads": True} if validation.boolean("draft_heads", draft_heads) else {}),
            )
        model = cls(native, paths, dict(overrides))
        model._packed_cache = cache
        return model

    @property
    def native(self) -> _native.Model:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed(f"the model {self.paths[0].name} was closed")
        return self._native

    @property
    def modalities(self) -> frozenset[str]:
        """The modalities of prompts: "text", and with an engine's projector "image", "audio" or both."""
        return self._modalities

    def with_modalities(self, more: Iterable[str]) -> Self:
        """Return a second object for this model with more modalities of prompts. Close each by itself."""
        found = copy.copy(self)
        found._modalities = self._modalities | frozenset(more)  # noqa: SLF001 - of the same class
        return found

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.owners.add(Tokenizer(self.native))

    def load_adapter(self, path: PathLike) -> Adapter:
        """Load a LoRA adapter for this model; apply it with `Context.set_adapters`. Raises `AdapterError`."""
        return Adapter.load(self, validation.path("path", path))

    @property
    def desc(self) -> str:
        """Architecture, size and quantisation in a few words, like "llama 1B Q8_0"."""
        native = self.native
        return native.desc.replace(
            "?B", _in_words(native.n_params)
        )  # llama.cpp knows the sizes of well-known models alone

    size_bytes: int = native_fact("size_bytes")
    """Bytes of all tensors."""
    n_params: int = native_fact("n_params")
    """Number of parameters."""
    n_vocab: int = native_fact("n_vocab")
    """Number of tokens in the vocabulary."""
    n_ctx_train: int = native_fact("n_ctx_train")
    """Tokens of context that the model was trained with."""
    n_embd: int = native_fact("n_embd")
    """Width of the hidden state."""
    n_embd_out: int = native_fact("n_embd_out")
    """Width of an embedding."""
    n_layer: int = native_fact("n_layer")
    """Number of layers."""
    n_head: int = native_fact("n_head")
    """Attention heads of the first layer."""
    n_head_kv: int = native_fact("n_head_kv")
    """Key and value heads of the first layer."""
    n_swa: int = native_fact("n_swa")
    """Width of the sliding attention window in tokens; 0 without one."""
    n_cls_out: int = native_fact("n_cls_out")
    """Outputs of the classification head of a reranker or classifier."""

    @property
    def class_labels(self) -> tuple[str, ...]:
        """Names of a classifier's outputs from its file, or "LABEL_0" and so on."""
        native = self.native
        return tuple(
            label if (label := native.class_label(index)) is not None else f"LABEL_{index}"
            for index in range(native.n_cls_out)
        )

    ftype: str = native_fact("ftype")
    """Name of the file's quantisation, like "Q4_K - Medium"."""
    is_recurrent: bool = native_fact("is_recurrent")
    """Whether the model keeps a recurrent state and no attention (Mamba, RWKV)."""
    is_hybrid: bool = native_fact("is_hybrid")
    """Whether layers with attention and with recurrent state are mixed (Jamba, Granite 4)."""
    is_diffusion: bool = native_fact("is_diffusion")
    """Whether the model refines a whole text over many passes (Dream, LLaDA, RND1): it embeds, but cannot generate here."""
    has_encoder: bool = native_fact("has_encoder")
    """Whether there is an encoder that `Context.encode` runs (T5)."""

    @property
    def has_decoder(self) -> bool:
        """Whether the model can generate. Encoders (BERT and others) and diffusion models cannot."""
        return self.native.has_decoder and self.memory_class is not MemoryClass.NONE

    @property
    def memory_class(self) -> MemoryClass:
        """The kind of memory that the model keeps of a sequence."""
        return MemoryClass(self.native.memory_class)

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the default or the named chat template of the file (Jinja); None if there is none."""
        return self.native.chat_template(None if name is None else validation.text("name", name))

    def compile_chat_template(self, source: str) -> CompiledTemplate:
        """Compile the Jinja source of a chat template for this vocabulary; see `paceline.chat.ChatFormat`."""
        return self.owners.add(CompiledTemplate(self.native, source))

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """All chat templates of the file by name; the plain one is "default"."""
        prefix = "tokenizer.chat_template"
        found = {
            key.removeprefix(prefix + "."): text for key, text in self.metadata.items() if key.startswith(prefix + ".")
        }
        return MappingProxyType(({"default": self.metadata[prefix]} if prefix in self.metadata else {}) | found)

    @property
    def is_packed_cache_used(self) -> bool:
        """Whether the packed weights are mapped from a file of `packed_cache`, which an earlier load wrote."""
        return self._packed_cache is not None and self._packed_cache.is_mapped

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that identify the model: a hash of samples of the files and of overrides, not of every weight."""
        return self._fingerprint

    def close(self) -> None:
        """Release this object's share of the model; idempotent. Objects made from it keep working.

        Waits until a file of `packed_cache` is written.
        """
        if self._native is not None and self._packed_cache is not None:
            self._packed_cache.finish()
        self._native = None
        self.__dict__.pop("tokenizer", None)  # holds a share as well

    def free(self) -> None:
        """Close this object with the tokenizer, the chat templates and the samplers made from it; idempotent.

        The memory is free when this returns, unless a native call is running, or a `Context`, `Adapter` or `MediaProjector` of
        the model is still open.
        """
        self.owners.close()
        self.close()

    def __repr__(self) -> str:
        return f"Model({self.paths[0].name!r}{', closed' if self._native is None else ', ' + self.desc})"


def _checked_paths(
    path: PathLike | Sequence[PathLike], overrides: Mapping[str, Override], *, needs_weights: bool
) -> tuple[Path, ...]:
    single = isinstance(path, (str, os.PathLike))
    paths = tuple(validation.path("path", part) for part in ([path] if single else _listed("path", path)))
    if not paths:
        raise ModelLoadError("path is an empty list; name at least one GGUF file")
    check_gguf(files_beside(paths[0]) if single else paths, overrides, needs_weights=needs_weights)
    return paths


def _listed(name: str, values: object) -> list[Any]:
    """Return the values as a list; a str is refused, although it is iterable."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise InvalidType(f"{name} must be a list, not {values!r:.80}")
    return list(values)


def _checked_shares(shares: object) -> list[float]:
    listed = _listed("tensor_split", shares)
    if len(listed) > _native.max_devices():
        raise InvalidParams(
            f"tensor_split has {len(listed)} entries, but at most {_native.max_devices()} devices are possible"
        )
    return [validation.number(f"tensor_split[{i}]", share, 0, 1e30) for i, share in enumerate(listed)]


def _in_words(n_params: int) -> str:
    """Return a number of parameters in the notation of model names: 1.5B, 3.4M, 12K."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if n_params >= size:
            return f"{n_params / size:.1f}{unit}"
    return f"{n_params // 1000}K"


def _as_text(value: Override) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked_override(key: str, value: Override) -> tuple[str, Override]:
    name = f"kv_overrides[{validation.text('kv_overrides key', key)!r}]"
    if isinstance(value, bool):
        return key, value
    if isinstance(value, int):
        return key, validation.integer(name, value, -(2**63), 2**63 - 1)
    if isinstance(value, float):
        return key, validation.number(name, value)
    if isinstance(value, str):
        return key, validation.text(name, value)
    raise InvalidType(f"{name} must be a bool, an int, a float or a str, not {value!r}")


def progress_function(
    progress: Callable[[float], object] | None, cancel: threading.Event | None
) -> Callable[[float], bool] | None:
    """Return a function that reports progress and returns whether to go on; None if there is nothing to call or to look at."""
    if progress is not None and not callable(progress):
        raise InvalidType(f"progress must be a function, not {progress!r:.80}")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise InvalidType(f"cancel must be a threading.Event, not {cancel!r:.80}")
    if progress is None and cancel is None:
        return None

    def go_on(share: float) -> bool:
        if cancel is not None and cancel.is_set():
            return False
        return progress is None or progress(share) is not False

    return go_on


HOST_BUFFER: Final = "CPU"
# The experts of a mixture, and dense feed-forward weights, as llama.cpp's common/common.h has them for --cpu-moe and the like.
_EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE: Final = r"\.ffn_(up|down|gate)\."
_MAX_LAYERS: Final = 512


def tensor_placements(
    tensor_overrides: Mapping[str, str] | None, *, cpu_moe: bool = False, n_cpu_moe: int = 0, n_cpu_ffn: int = 0
) -> list[tuple[str, str]]:
    """Return patterns of tensor names and the buffer type of each, in the order in which they are tried.

    Raises `InvalidParams` and `InvalidType`; the native core checks the patterns when it gets them.
    """
    placed = _checked_overrides(tensor_overrides)
    if validation.boolean("cpu_moe", cpu_moe):
        placed.append((_EXPERTS, HOST_BUFFER))
    for name, count, weights in (("n_cpu_moe", n_cpu_moe, _EXPERTS), ("n_cpu_ffn", n_cpu_ffn, _DENSE)):
        layers = range(validation.integer(name, count, 0, _MAX_LAYERS))
        placed += [(rf"blk\.{layer}{weights}", HOST_BUFFER) for layer in layers]
    return placed


def _checked_overrides(overrides: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping):
        raise InvalidType(
            "tensor_overrides must be a mapping of patterns to buffer types, such as "
            f'{{"ffn_.*_exps": "CPU"}}, not {type(overrides).__name__}'
        )
    known = _native.buffer_types()
    found = []
    for pattern, buffer in overrides.items():
        validation.text("tensor_overrides: a pattern", pattern)
        if validation.text(f"tensor_overrides[{pattern!r:.80}]", buffer) not in known:
            raise InvalidParams(
                f"tensor_overrides[{pattern!r:.80}]: there is no buffer type {buffer!r:.80}; this build has "
                f"{', '.join(known)}"
            )
        found.append((pattern, buffer))
    return found


class CompiledTemplate(Closeable):
    """The chat template of one vocabulary. Keeps its model alive until it is closed.

    After `close()` rendering raises `Closed`; `source`, `bos`, `eos` and `capabilities` stay.
    """

    def __init__(self, model: _native.Model, source: str) -> None:
        """Compile Jinja source. Raises `TemplateError` if it does not parse, and `InvalidParams` for a lone surrogate."""
        native = _native.ChatFormat(model, source)
        self._native: _native.ChatFormat | None = native
        self.source: str = native.source
        self.bos: str = native.bos
        self.eos: str = native.eos
        self.capabilities: Mapping[str, bool] = native.capabilities

    @property
    def native(self) -> _native.ChatFormat:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed("the chat template was closed with its model")
        return self._native

    def apply(self, request: bytes) -> ChatPrompt:
        """Render a conversation, given as JSON; the GIL is released meanwhile. Raises `TemplateError`, `Closed`."""
        return self.native.apply(request)

    def close(self) -> None:
        """Free the memory; idempotent."""
        self._native = None


_OWN_FACTS = ("native", "modalities", "n_vocab", "memory_class", "fingerprint")
FACTS = tuple(name for name, member in vars(Model).items() if isinstance(member, property) and name not in _OWN_FACTS)


def model_facts(model: Model) -> dict[str, Any]:
    """Return the facts that a `RemoteModel` needs, as plain values."""
    facts = {name: getattr(model, name) for name in FACTS}
    return facts | {"memory_class": model.memory_class, "modalities": sorted(model.modalities)}


def _described(name: str) -> Any:
    return property(lambda self: self._facts[name])


class RemoteModel(Model):
    """A model with its weights in another process. Its vocabulary is loaded here; other facts come from `describe`.

    Contexts and adapters cannot be made from it.
    """

    _facts: Mapping[str, Any]

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set the facts from `model_facts` in the process with the weights. Call it once, before they are read."""
        self._modalities = frozenset(facts.get("modalities", ("text",)))
        self._facts = {name: tuple(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}

    @property
    def memory_class(self) -> MemoryClass:
        """The kind of memory that the model keeps of a sequence."""
        return MemoryClass(self._facts["memory_class"])


for _name in FACTS:
    setattr(RemoteModel, _name, _described(_name))
