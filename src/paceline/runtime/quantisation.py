"""Quantising the file of a model: `quantize`, which llama.cpp computes, and the importance matrices that it takes.

llama.cpp chooses the type of each tensor, and tells its choices in the log of a run that writes nothing. Such a plan precedes
every run: values on which llama.cpp would assert, and runs that would fail after minutes, are refused by it.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.errors import DiskFull, InvalidParams, InvalidType, ModelLoadError
from paceline.runtime.device import physical_cores
from paceline.runtime.gguf_check import UNUSABLE_TYPES, check_gguf, files_beside
from paceline.runtime.gguf_file import MAGIC, GgufFile, TensorInfo, ValueType, read_gguf, tensor_bytes
from paceline.runtime.model import PathLike, progress_function

# fmt: off
FILE_TYPES: Final[dict[int | None, str]] = {  # general.file_type: most of the tensors are of this type
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}
# fmt: on
COPY: Final = "COPY"
QUANTISATIONS: Final[Mapping[str, int]] = {  # names of llama-quantize; a file of NVFP4 is made by converters alone
    **{name: number for number, name in FILE_TYPES.items() if number is not None and name != "NVFP4"},
    "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, COPY: 0,
}  # fmt: skip
_FLOATS: Final = ("F32", "F16", "BF16")
_NUM_TYPES: Final = 256  # more than llama.cpp has
_ALIGNMENT: Final = 32  # of the files that llama.cpp's quantisation writes, whatever the source says
_MAX_THREADS: Final = 512
_MAX_WEIGHT: Final = np.float32(1e9)  # scales are half-precision numbers, up to 65504
_MAX_EXPONENT: Final = 154  # of a block of MXFP4: its weights are up to 12 * 2 ** (exponent - 128)
_MAX_IMPORTANCE: Final = np.float32(1e20)  # of an activation's mean square: its own square is computed with 32 bits
_SLAB: Final = 1 << 24  # weights that are looked at together
_MAX_METADATA: Final = 127  # bytes of a text
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_LINE: Final = re.compile(
    r"\[ *(?P<number>\d+)/ *\d+\] (?P<name>.*?) *- \[[ \d,]+\], type = +\w+, (?:size = .*?(?:\((?P<type>\w+)\))?$)?"
)
_EMBEDDINGS: Final = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT: Final = "output.weight"
_NEED_IMPORTANCES: Final = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
_NEED_THEM_EVERYWHERE: Final = ("IQ1_S", "IQ2_XXS", "IQ2_XS")  # embeddings and output too, by an assertion

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorTypeUse:
    """The tensors of one type in a file.

    Attributes:
        num_tensors: Number of tensors.
        size_bytes: Bytes of all of them.
    """

    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """A file that `quantize` has written, or with `dry_run` would write.

    Attributes:
        paths: The file, or the parts of a split set in order.
        quantisation: The name of the quantisation, such as "Q4_K_M".
        n_params: Number of weights.
        source_types: The tensors of the source by their type, such as "F16".
        tensor_types: The tensors of the new file by their type, such as "Q4_K", those with most bytes first.
        refusal: Why the same call without `dry_run` would be refused; empty if it would not.
    """

    paths: tuple[Path, ...]
    quantisation: str
    n_params: int
    source_types: Mapping[str, TensorTypeUse]
    tensor_types: Mapping[str, TensorTypeUse]
    refusal: str

    @property
    def source_bytes(self) -> int:
        """Bytes of the source's tensors."""
        return sum(use.size_bytes for use in self.source_types.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the new file's tensors."""
        return sum(use.size_bytes for use in self.tensor_types.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of the new file's tensors for each weight."""
        return 8 * self.size_bytes / self.n_params

    @property
    def source_bits_per_weight(self) -> float:
        """Bits of the source's tensors for each weight."""
        return 8 * self.source_bytes / self.n_params


def quantize(  # noqa: PLR0913 - the options of llama-quantize, all by keyword
    model: PathLike,
    quantisation: str,
    output: PathLike | None = None,
    *,
    n_threads: int | None = None,
    imatrix: PathLike | None = None,
    allow_requantize: bool = False,
    leave_output_tensor: bool = False,
    pure: bool = False,
    output_tensor_type: str | None = None,
    token_embedding_type: str | None = None,
    tensor_types: Mapping[str, str] | None = None,
    keep_split: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Callable[[float], object] | None = None,
    cancel: threading.Event | None = None,
) -> QuantizedModel:
    """Write the file of a model with its weights in a smaller type. Blocking; other threads run meanwhile.

    The file gets its name when it is complete: an error, a cancellation or a crash leaves no incomplete file under it.

    Args:
        model: A GGUF file, best in F32, F16 or BF16; of a split set the first part.
        quantisation: A name of llama.cpp's, in upper or lower case: "Q4_K_M", "Q8_0", "IQ4_XS", "F16" and others; "COPY" keeps
            all types, and makes one file of a split set.
        output: The new file, or a folder for it; None: beside the model, with the quantisation in its name.
        n_threads: Threads that compute; None: one for each physical core.
        imatrix: A file with an importance matrix, as llama-imatrix writes it (GGUF or the older .dat).
        allow_requantize: Whether tensors that are quantised already may be quantised again, which loses more quality.
        leave_output_tensor: Whether output.weight stays as it is.
        pure: Whether all tensors get the same type, in place of a mixture that llama.cpp has found to be better.
        output_tensor_type: The type of output.weight, such as "Q8_0".
        token_embedding_type: The type of the token embeddings.
        tensor_types: Types of other tensors, by patterns of their names (regular expressions of ECMAScript, searched in names
            like "blk.3.ffn_up.weight"); the first match counts.
        keep_split: Whether the new file has the parts of the source.
        dry_run: Whether nothing is written, and only the tensors and sizes are returned.
        overwrite: Whether a file with the name of the output is replaced.
        progress: Called with 0.0 to 1.0 after each tensor, on this thread; returning False cancels.
        cancel: An event that any thread may set. The call ends after the tensor that is being computed.

    Returns:
        The paths and sizes of the new file.

    Raises:
        InvalidParams: An option is wrong, needs an importance matrix, or does not fit this model.
        ModelLoadError: A file cannot be read, is no model or no importance matrix, or has weights that are no numbers.
        DiskFull: The folder of the output has no space for it.
        Aborted: The call was cancelled.
    """
    source = validation.path("model", model)
    parts = files_beside(source)
    check_gguf(parts, needs_weights=True)
    files = [read_gguf(part) for part in parts]
    name = validation.choice("quantisation", _upper(quantisation), tuple(QUANTISATIONS))
    try:
        targets = _targets(parts, name, output, keep_split=validation.boolean("keep_split", keep_split))
        if not validation.boolean("dry_run", dry_run):
            _check_targets(parts, targets, overwrite=validation.boolean("overwrite", overwrite))
    except OSError as error:
        raise InvalidParams(f"output {error.filename}: {error.strerror or error}; give another path") from None
    matrix = None if imatrix is None else read_importance_matrix(validation.path("imatrix", imatrix))
    threads = physical_cores() if n_threads is None else n_threads
    options: dict[str, Any] = {
        "file_type": QUANTISATIONS[name],
        "n_threads": validation.integer("n_threads", threads, 1, _MAX_THREADS),
        "output_type": _tensor_type("output_tensor_type", output_tensor_type),
        "embedding_type": _tensor_type("token_embedding_type", token_embedding_type),
        "tensor_types": _tensor_types(tensor_types),
        "importances": [] if matrix is None else list(matrix.values.items()),
        "metadata": _metadata(files[0], matrix),
        "allow_requantize": validation.boolean("allow_requantize", allow_requantize),
        "quantize_output": not validation.boolean("leave_output_tensor", leave_output_tensor),
        "pure": validation.boolean("pure", pure),
        "only_copy": name == COPY,
        "keep_split": keep_split,
    }
    goes_on = progress_function(progress, cancel)
    tensors = {_text(tensor.name): tensor for file in files for tensor in file.tensors}
    _check_types(name, options, tensors)
    plan = _plan(source, tensors, options)
    refusal = _refusal(source, plan, name, matrix, allow_requantize=allow_requantize)
    if refusal and not dry_run:
        raise InvalidParams(refusal)
    if not dry_run:
        _check_weights(parts, files, plan)
        _write(source, targets, plan, options, goes_on)
    return QuantizedModel(
        paths=targets,
        quantisation=name,
        n_params=sum(math.prod(old.shape) for old, _ in plan),
        source_types=_uses(source, [old for old, _ in plan]),
        tensor_types=_uses(source, [new for _, new in plan]),
        refusal=refusal,
    )


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


# ---- the new file


def _targets(parts: tuple[Path, ...], name: str, output: PathLike | None, *, keep_split: bool) -> tuple[Path, ...]:
    """Return the paths of the new file, or of its parts."""
    if keep_split and len(parts) == 1:
        raise InvalidParams(f"keep_split keeps the parts of a split set, but {parts[0].name} is one file")
    target = parts[0].parent if output is None else validation.path("output", output)
    if target.is_dir():
        target /= f"{quantized_stem(parts[0].stem, name)}.gguf"
    if not target.parent.is_dir():
        raise InvalidParams(f"output: there is no folder {target.parent}")
    if not keep_split:
        return (target,)
    stem, count = target.name.removesuffix(".gguf"), len(parts)
    return tuple(target.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))


def quantized_stem(stem: str, name: str) -> str:
    """Return the model's name with this quantisation in place of its own; both names are without an ending."""
    stem = _PART.sub("", stem)
    known = "|".join(sorted(QUANTISATIONS, key=len, reverse=True))
    match = re.fullmatch(rf"(.+[-_.])(?:{known})", stem, re.IGNORECASE)
    return f"{match[1] if match else f'{stem}-'}{name}"


def _check_targets(parts: tuple[Path, ...], targets: tuple[Path, ...], *, overwrite: bool) -> None:
    for target in targets:
        if not target.exists():
            continue
        if target.is_dir():
            raise InvalidParams(f"output {target} is a folder; give the path of a file")
        if any(target.samefile(part) for part in parts):
            raise InvalidParams(f"output {target} is the model itself; give another path")
        if not overwrite:
            raise InvalidParams(
                f"output {target} exists; give another path, or overwrite it with overwrite=True (--force)"
            )


def _write(
    source: Path,
    targets: tuple[Path, ...],
    plan: _Plan,
    options: Mapping[str, Any],
    goes_on: Callable[[float], bool] | None,
) -> None:
    """Write the new file in a folder beside its place, check it, and move it there."""
    done = list(itertools.accumulate(tensor_bytes(source, old) for old, _ in plan))
    missing = sum(tensor_bytes(source, new) + _ALIGNMENT for _, new in plan)

    def on_tensor(line: str) -> bool:
        number = int(line[1:].partition("/")[0])
        return goes_on is None or goes_on(done[number - 1] / done[-1])

    with _folder_for(targets[0]) as folder:
        free = shutil.disk_usage(folder).free
        if free < missing:
            raise _full(targets[0], f"it takes {missing} bytes, and {free} are free")
        written = [folder / target.name for target in targets]
        prefix = _PART.sub("", written[0].stem) if options["keep_split"] else written[0].name
        try:
            _native.quantize_file(str(source), str(folder / prefix), **options, dry_run=False, on_tensor=on_tensor)
        except ModelLoadError as error:
            if "iostream error" in str(error):
                raise _full(targets[0], "a write failed") from None
            raise
        wanted = {new.name: new.type for _, new in plan}
        for path, target in zip(written, targets, strict=True):
            _check_written(path, target, wanted)
        for path, target in zip(written, targets, strict=True):
            path.replace(target)


def _check_written(path: Path, target: Path, wanted: Mapping[bytes, int]) -> None:
    """Raise if a file is not whole: llama.cpp does not notice every write that fails."""
    file = read_gguf(path)
    ends = (tensor.offset + tensor_bytes(path, tensor) for tensor in file.tensors)
    if _data_start(file) + max(ends, default=0) > path.stat().st_size:
        raise _full(target, "it was not written completely")
    wrong = [_text(tensor.name) for tensor in file.tensors if wanted.get(tensor.name) != tensor.type]
    if wrong:
        raise ModelLoadError(f"llama.cpp wrote {path.name} with another type of {wrong[0]} than it had planned")


def _full(path: Path, reason: str) -> DiskFull:
    return DiskFull(
        f"{path.parent} has no space for {path.name}: {reason}; free some, or give an output on another disk"
    )


@contextmanager
def _folder_for(target: Path) -> Iterator[Path]:
    """Make a folder beside the target, and remove it in the end. Files that a killed process left in it are removed first."""
    folder = target.with_name(f".{target.name}.partial")
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # what it holds is removed
    except OSError as error:
        raise InvalidParams(f"output: cannot make the folder {folder}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidParams(f"output: another process writes {target}; wait for it, or give another path") from None
        except OSError:  # a file system without locks
            pass
        try:
            for entry in folder.iterdir():
                entry.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


# ---- the types of tensors

_Plan = list[tuple[TensorInfo, TensorInfo]]
"""Each tensor as it is in the source, and in the new file."""


@cache
def tensor_type_names() -> Mapping[int, str]:
    """Return llama.cpp's names of tensor types, such as "Q4_K" and "F16", by their numbers."""
    names = ((number, _native.tensor_type_name(number)) for number in range(_NUM_TYPES))
    return MappingProxyType({number: name.upper() for number, name in names if name is not None})


def _tensor_type(option: str, value: object) -> int | None:
    if value is None:
        return None
    known = {name: number for number, name in tensor_type_names().items() if number not in UNUSABLE_TYPES}
    return known[validation.choice(option, _upper(value), tuple(known))]


def _tensor_types(given: Mapping[str, str] | None) -> list[tuple[str, int]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidType(
            f'tensor_types must be a mapping of patterns to types, such as {{"ffn_down": "Q6_K"}}, not {type(given).__name__}'
        )
    found = []
    for pattern, value in given.items():
        validation.text("tensor_types: a pattern", pattern)
        number = _tensor_type(f"tensor_types[{pattern!r:.80}]", value)
        if number is None:
            raise InvalidType(f"tensor_types[{pattern!r:.80}] must be a type such as 'Q6_K', not None")
        found.append((pattern, number))
    return found


def _check_types(name: str, options: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse options that llama.cpp ignores, and types of blocks that do not fit the rows of a tensor."""
    given = {
        "tensor_types": options["tensor_types"],
        "pure": options["pure"],
        "output_tensor_type": options["output_type"] is not None and name == COPY,
        "token_embedding_type": options["embedding_type"] is not None and name == COPY,
    }
    ignored = next((option for option, value in given.items() if value), None)
    if ignored and name in (*_FLOATS, COPY):
        raise InvalidParams(f"{ignored} has no effect on {name}: leave it out, or choose a quantisation such as Q8_0")
    names = tensor_type_names()
    for option, number, places in (
        ("token_embedding_type", options["embedding_type"], _EMBEDDINGS),
        ("output_tensor_type", options["output_type"], (_OUTPUT,)),
    ):
        for place in places if number is not None else ():
            _, block_values = _native.tensor_type_size(number) or (0, 1)
            columns = math.prod(tensors[place].shape[:1]) if place in tensors else 0
            if columns % block_values:
                raise InvalidParams(
                    f"{option} {names[number]} stores rows in blocks of {block_values} values, and {place} has rows of "
                    f"{columns}; Q8_0 has blocks of 32"
                )


def _plan(source: Path, tensors: Mapping[str, TensorInfo], options: Mapping[str, Any]) -> _Plan:
    """Return the tensors in llama.cpp's order, with the types that it chooses. Raises `ModelLoadError` and `InvalidParams`."""
    lines: list[str] = []

    def on_tensor(line: str) -> bool:
        lines.append(line)
        return True

    _native.quantize_file(str(source), "", **options, dry_run=True, on_tensor=on_tensor)
    numbers = {name: number for number, name in tensor_type_names().items()}
    plan: _Plan = []
    for match in map(_LINE.fullmatch, lines):
        old = tensors.get(match["name"]) if match else None
        if match is not None and old is not None:
            plan.append((old, replace(old, type=numbers[match["type"].upper()]) if match["type"] else old))
    if len(plan) != len(tensors):
        raise ModelLoadError(f"{source}: llama.cpp has planned {len(plan)} of {len(tensors)} tensors")
    return plan


def _refusal(source: Path, plan: _Plan, name: str, matrix: ImportanceMatrix | None, *, allow_requantize: bool) -> str:
    """Return why llama.cpp would fail at a tensor in the middle of the run, or assert; empty if it would not."""
    names = tensor_type_names()
    again = [old for old, new in plan if old.type != new.type and names[old.type] not in _FLOATS]
    if again and not allow_requantize:
        types = ", ".join(sorted({names[tensor.type] for tensor in again}))
        return (
            f"{source.name} is quantised already ({len(again)} of the tensors to quantise are {types}); quantise the F16, BF16 "
            "or F32 file of the model, or lose more quality with allow_requantize (--allow-requantize)"
        )
    values = {} if matrix is None else matrix.values
    for old, new in plan:
        tensor, new_type, found = _text(old.name), names[new.type], values.get(_text(old.name))
        if 0 in old.shape[:1]:
            return f"{source.name}: {tensor} has no columns, and llama.cpp cannot copy it"
        if old.type == new.type:
            continue
        if math.prod(old.shape[3:]) != 1:
            return f"{source.name}: {tensor} has four dimensions, and llama.cpp cannot make it {new_type}"
        wanted = math.prod(old.shape[:1] + old.shape[2:3])
        if found is not None and len(found) != wanted and tensor not in _EMBEDDINGS:
            return f"imatrix: {tensor} has {len(found)} values there, and {wanted} in {source.name}: it is of another model"
        is_large = tensor not in (*_EMBEDDINGS, _OUTPUT)
        needs = new_type in (_NEED_IMPORTANCES if is_large else _NEED_THEM_EVERYWHERE)
        if (needs or (is_large and name == "Q2_K_S" and new_type == "Q2_K")) and (
            found is None or len(found) != wanted
        ):
            lacks = "has no values of this tensor" if matrix is not None else "is missing"
            return (
                f"{name} makes {tensor} {new_type}, which needs an importance matrix, and imatrix (--imatrix) {lacks}; "
                "llama-imatrix computes one, and repositories of such quantisations have it"
            )
    return ""


def _check_weights(parts: tuple[Path, ...], files: list[GgufFile], plan: _Plan) -> None:
    """Raise `ModelLoadError` for weights on which llama.cpp would assert while it searches the grids of IQ1, IQ2 and IQ3."""
    names = tensor_type_names()
    new_types = {old.name: names[new.type] for old, new in plan if old.type != new.type}
    for part, file in zip(parts, files, strict=True):
        for tensor in file.tensors:
            new_type, old_type = new_types.get(tensor.name, ""), names[tensor.type]
            if not (new_type.startswith(("IQ1", "IQ2", "IQ3")) and old_type in ("F32", "BF16", "MXFP4")):
                continue
            # The bits whose order is that of the weights' magnitudes: of floats all but the sign, of MXFP4 a block's exponent.
            kind, mask, limit = "<u4", 0x7FFFFFFF, int(_MAX_WEIGHT.view(np.uint32))
            if old_type == "BF16":
                kind, mask, limit = "<u2", 0x7FFF, limit >> 16
            num, step = math.prod(tensor.shape), 1
            if old_type == "MXFP4":
                kind, mask, limit, num, step = "u1", 0xFF, _MAX_EXPONENT, num // 32 * 17, 17
            bits = np.memmap(part, kind, "r", _data_start(file) + tensor.offset, (num,))[::step]
            for first in range(0, len(bits), _SLAB):
                if int((bits[first : first + _SLAB] & mask).max()) > limit:
                    raise ModelLoadError(
                        f"{part}: {_text(tensor.name)} has weights of {_MAX_WEIGHT:g} and more, which {new_type} cannot keep"
                    )


def _uses(source: Path, tensors: list[TensorInfo]) -> Mapping[str, TensorTypeUse]:
    sizes: dict[str, list[int]] = {}
    for tensor in tensors:
        sizes.setdefault(tensor_type_names()[tensor.type], []).append(tensor_bytes(source, tensor))
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return MappingProxyType({name: TensorTypeUse(len(each), sum(each)) for name, each in ordered})


# ---- importance matrices


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """The mean squares of the activations that each weight is multiplied with, by the names of tensors.

    Attributes:
        path: Its file.
        values: One value for each column of a tensor, for all matrices of experts one after another.
        dataset: The text that it was computed with, as the file names it; empty if it does not.
        num_chunks: Chunks of this text; 0 if unknown.
    """

    path: Path
    values: Mapping[str, Floats]
    dataset: str
    num_chunks: int


def read_importance_matrix(path: Path) -> ImportanceMatrix:
    """Read a file that llama-imatrix has written, as GGUF or in the older format. Raises `ModelLoadError`."""
    try:
        with validation.open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            matrix = _read_matrix(path, data) if data[:4] == MAGIC else _read_old_matrix(path, data)
    except OSError as error:
        raise ModelLoadError(f"imatrix: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelLoadError(f"imatrix: {path} is no importance matrix: {error}") from None
    for name, values in matrix.values.items():
        if not ((values >= 0) & (values <= _MAX_IMPORTANCE)).all():  # nor NaN
            raise ModelLoadError(
                f"imatrix: {path}: the values of {name!r:.80} are not all between 0 and {_MAX_IMPORTANCE:g}"
            )
    return matrix


def _read_matrix(path: Path, data: mmap.mmap) -> ImportanceMatrix:
    file = read_gguf(path)
    tensors = {_text(tensor.name): tensor for tensor in file.tensors}
    start = _data_start(file)

    def values_of(name: str) -> Floats:
        tensor = tensors.get(name)
        if tensor is None or tensor.type != 0 or not math.prod(tensor.shape):
            raise ValueError(f"the tensor {name!r:.80} is missing, is not F32 or is empty")
        first, count = start + tensor.offset, math.prod(tensor.shape)
        if first + 4 * count > len(data):
            raise ValueError(f"it ends before the values of {name!r:.80}")
        return np.frombuffer(data, np.float32, count, first).copy()

    found: dict[str, Floats] = {}
    for name in tensors:
        base = name.removesuffix(".in_sum2")
        if base == name:
            continue
        sums, counts = values_of(name), values_of(f"{base}.counts")
        if len(sums) % len(counts):
            raise ValueError(f"{name!r:.80} has {len(sums)} values for {len(counts)} counts")
        rows = sums.reshape(len(counts), -1)
        # Experts that no token was sent to have no values: all columns count the same.
        means = np.where(counts[:, None] > 0, rows / np.maximum(counts[:, None], 1), np.float32(1))
        found[base] = np.ascontiguousarray(means.reshape(-1), np.float32)
    if not found:
        raise ValueError("it is a GGUF file without tensors named *.in_sum2")
    dataset, chunks = (file.metadata.get(key) for key in (b"imatrix.datasets", b"imatrix.chunk_count"))
    texts = dataset.value if dataset is not None and dataset.item_type is ValueType.STRING else []
    number = chunks.value if chunks is not None and chunks.type is ValueType.UINT32 else 0
    return ImportanceMatrix(path, found, _text(texts[0]) if texts else "", number)


def _read_old_matrix(path: Path, data: mmap.mmap) -> ImportanceMatrix:
    """Read the format of before 2025: numbers of 32 bits, names and values, without a magic number."""
    at = 0

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack_from("<i", data, at)
        at += 4
        return int(found)

    def chunk(num_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= num_bytes <= len(data) - at:
            raise ValueError("it is neither GGUF nor the older format of llama-imatrix")
        at += num_bytes
        return data[at - num_bytes : at]

    found: dict[str, Floats] = {}
    try:
        for _ in range(number()):
            name = chunk(number()).decode()
            num_calls, count = number(), number()
            values = np.frombuffer(chunk(4 * count), np.float32)
            found[name] = values / np.float32(max(1, num_calls))
        is_longer = at < len(data)
        num_chunks = number() if is_longer else 0
        dataset = _text(chunk(number())) if at < len(data) else ""
    except (struct.error, UnicodeDecodeError):
        raise ValueError("it is neither GGUF nor the older format of llama-imatrix") from None
    if not found:
        raise ValueError("it has no entries")
    return ImportanceMatrix(path, found, dataset, num_chunks)


def _data_start(file: GgufFile) -> int:
    alignment = file.metadata.get(b"general.alignment")
    is_number = alignment is not None and alignment.type is ValueType.UINT32
    step = (alignment.value if alignment is not None and is_number else 0) or _ALIGNMENT
    return -(-file.header_bytes // step) * step


def _metadata(file: GgufFile, matrix: ImportanceMatrix | None) -> list[tuple[str, int | str]]:
    """Return the metadata that the new file has besides the source's."""
    found: list[tuple[str, int | str]] = []
    alignment = file.metadata.get(b"general.alignment")
    if alignment is not None and alignment.value != _ALIGNMENT:
        found.append(("general.alignment", _ALIGNMENT))
    if matrix is not None:
        texts = {"file": matrix.path.name, "dataset": matrix.dataset}
        cut = {key: text.encode()[:_MAX_METADATA].decode(errors="ignore") for key, text in texts.items() if text}
        found += [(f"quantize.imatrix.{key}", text) for key, text in cut.items() if "\0" not in text]
        found += [("quantize.imatrix.entries_count", len(matrix.values))]
        found += [("quantize.imatrix.chunks_count", matrix.num_chunks)] if matrix.num_chunks > 0 else []
    return found
