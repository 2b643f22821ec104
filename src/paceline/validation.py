"""Checks of single values from a caller: each returns the value in its plain Python type, or raises.

A wrong type raises `InvalidType`, a wrong value `InvalidParams`; the message names the field, the allowed values and
the value: "temperature must be a finite number >= 0, not -1". A bool is no number, and neither NaN nor an
infinity is one; nothing is ever clamped. NumPy's integers and floats count as `int` and `float`.

Standard library only. Knows nothing of models: limits are handed in.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import math
import os
import select
import stat
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache, reduce
from io import BufferedReader, FileIO
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from paceline.errors import InvalidParams, InvalidType

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIPE_WAIT_S: Final = 10.0
"""Longest wait for a program that writes to a pipe which is given in place of a file."""
MAX_CONFIG_BYTES: Final = 4 << 20
"""Largest TOML file."""

_T = TypeVar("_T")

_MAX_LISTED = 4096  # files of a folder that a missing one is compared with
_MAX_SHOWN = 80  # characters of a refused value that go into the message
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # as which the native core keeps numbers


def integer(
    name: str, value: object, low: float | None = None, high: float | None = None, hint: str | None = None
) -> int:
    """Return the value as an `int` in [low, high]; `hint` is appended to the message."""
    if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
        return value  # params have dozens of fields: no words for an error that there is none of
    wanted = _wanted("an integer", low, high)
    if isinstance(value, bool) or not isinstance(value, Integral):
        _refuse(InvalidType, name, wanted, value, hint)
    result = int(value)
    if (low is not None and result < low) or (high is not None and result > high):
        _refuse(InvalidParams, name, wanted, value, hint)
    return result


def number(  # noqa: PLR0913 - two kinds of bounds on each side
    name: str,
    value: object,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    hint: str | None = None,
) -> float:
    """Return the value as a finite `float`: at least `low`, at most `high`, more than `above`, less than `below`.

    It must be one that 32 bits can keep: beyond 3.4e38 it would become infinite there, and an open bound holds for what
    it is rounded to.
    """
    is_closed = above is None and below is None
    if type(value) is float and is_closed and _is_between(value, low, high) and abs(value) <= _FLOAT32_MAX:
        return value
    wanted = _wanted("a finite number", low, high, above, below)
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(InvalidType, name, wanted, value, hint)
    try:
        result = float(value)
    except OverflowError:  # an int or a fraction beyond the range of a float
        result = math.inf
    if math.isfinite(result) and abs(result) > _FLOAT32_MAX:
        _refuse(InvalidParams, name, wanted, value, hint or "it has 32 bits, whose numbers end at 3.4e38")
    if not (math.isfinite(result) and _is_between(result, low, high) and _within(result, above, below)):
        _refuse(InvalidParams, name, wanted, value, hint)
    return result


def boolean(name: str, value: object, default: bool | None = None) -> bool:
    """Return the value, which must be True or False itself: 0, 1 and "yes" are refused. None is the default, if there is one."""
    if value is None and default is not None:
        return default
    if not isinstance(value, bool):
        _refuse(InvalidType, name, "True or False", value)
    return value


def text(name: str, value: object) -> str:
    """Return the value as a plain `str` that UTF-8 can encode; refuse a lone surrogate, naming its position."""
    if not isinstance(value, str):
        _refuse(InvalidType, name, "a str", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(
            f"{name} has a lone surrogate (U+{ord(value[error.start]):04X}) at position {error.start}, which UTF-8 "
            "cannot carry; replace it before, for instance with "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None
    return _plain_text(value)


def path(name: str, value: object) -> Path:
    """Return the value, a `str` or path-like object, as a `Path`, with "~" expanded; refuse a NUL character."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        _refuse(InvalidType, name, "a path", value)
    if "\0" in given:
        raise InvalidParams(f"{name} has a NUL character: {_shown(given)}")
    return Path(os.path.expanduser(text(name, given)))  # noqa: PTH111 - pathlib's raises for an unknown user


def open_file(path: Path, *, pipes: bool = False) -> BufferedReader:
    """Open a regular file for reading. A pipe, a device, a socket or a folder raises `OSError` at once: none is waited for.

    pipes: whether a pipe or a character device, such as /dev/stdin or /dev/null, is opened as well. A pipe that no program has
    opened for writing is waited for, but not longer than `PIPE_WAIT_S`. A program that has opened it may write later.
    """
    raw = FileIO(path, "rb", opener=_open_at_once)
    mode = os.fstat(raw.fileno()).st_mode
    if stat.S_ISREG(mode):
        return BufferedReader(raw)
    with raw:
        if not pipes or not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
        pipe = _Pipe(os.dup(raw.fileno()))
    file: BufferedReader = BufferedReader(pipe)
    if stat.S_ISFIFO(mode) and not _has_writer(file, pipe):
        file.close()
        raise OSError(errno.ETIMEDOUT, f"no program has written to this pipe for {PIPE_WAIT_S:g} s", str(path))
    os.set_blocking(file.fileno(), True)
    return file


def read_file(path: Path, max_bytes: int, *, pipes: bool = False) -> bytes:
    """Return the content of a file of at most `max_bytes`. pipes: see `open_file`.

    Raises `OSError` with a `strerror`: also for a file of another kind, and for a file that is too large.
    """
    with open_file(path, pipes=pipes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(len(data), size) > max_bytes:
        raise OSError(
            errno.EFBIG, f"it has more than {max_bytes} bytes, the most that are read of such a file", str(path)
        )
    return data


class _Pipe(FileIO):
    """A pipe or a device. is_ended: whether the last reading found no bytes and no program that may write some."""

    is_ended = False

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = super().readinto(buffer)
        self.is_ended = count == 0
        return count


def _has_writer(file: BufferedReader, pipe: _Pipe) -> bool:
    """Return whether a program has opened a pipe for writing, or has written to it. Waits for that; no byte is lost."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if waiting.poll(PIPE_WAIT_S * 1000):
        return True
    file.peek(1)
    return not pipe.is_ended


def _open_at_once(path: str, flags: int) -> int:
    """Open a path without waiting: a blocking opening of a pipe lasts until another program opens it, too."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def nearest_names(word: str, names: Collection[str], most: int = 1, min_similarity: float = 0.6) -> list[str]:
    """Return the names that are most similar to a word, the nearest first; names of the same letters come before others."""
    near = difflib.get_close_matches(word, names, n=max(1, len(names)), cutoff=min_similarity)
    return sorted(near, key=lambda name: sorted(name) != sorted(word))[:most]


def similar_files(path: Path) -> str:
    """Return a hint for the message about a missing file: "; did you mean ...?" with files of its folder, or nothing."""
    try:
        if not path.parent.is_dir():
            return f"; there is no folder {path.parent}"
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_LISTED) if entry.is_file()]
    except OSError:
        return ""
    wanted = path.name.removesuffix(".gguf").lower()
    by_stem = {name.removesuffix(".gguf").lower(): name for name in names if name.endswith(".gguf") or "." in path.name}
    near = [by_stem[stem] for stem in nearest_names(wanted, by_stem, most=3)]
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def addresses(name: str, value: object, most: int) -> tuple[str, ...]:
    """Return the "host:port" of a list, or of a text with commas. A host is a name or an IPv4 address; none comes twice."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        _refuse(InvalidType, name, 'a list of addresses such as "10.0.0.2:50052"', value)
    found = [_address(name, address) for address in given]
    if len(found) > most:
        raise InvalidParams(f"{name} has {len(found)} addresses; at most {most} are possible")
    for address in found:
        if found.count(address) > 1:
            raise InvalidParams(f"{name} has {address} twice; leave one of them out")
    return tuple(found)


def _address(name: str, value: object) -> str:
    given = text(name, value).strip()
    host, _, port = given.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16
    if not host or not is_port or any(not letter.isprintable() or letter in " :/@[]," for letter in host):
        _refuse(
            InvalidParams, name, 'addresses of a host name or IPv4 address and a port, such as "10.0.0.2:50052"', value
        )
    return given


def instance(name: str, value: object, kind: type[_T]) -> _T:
    """Return the value, which must be an instance of the class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        _refuse(InvalidType, name, f"{article} {kind.__name__}", value)
    return value


def choice(name: str, value: object, options: Collection[str]) -> str:
    """Return the value, which must be one of `options`; the message suggests the nearest."""
    if type(value) is str and value in options:
        return value
    wanted = "one of " + ", ".join(map(repr, options))
    if not isinstance(value, str):
        _refuse(InvalidType, name, wanted, value)
    if value not in options:
        _refuse(InvalidParams, name, wanted, value, _did_you_mean(value, options))
    return _plain_text(value)


def token_ids(name: str, values: object, n_vocab: int) -> list[int]:
    """Return the token ids as a new list of `int`, each in [0, n_vocab).

    Accepts any sequence of integers but `str` and `bytes`, and one-dimensional integer arrays of NumPy. The error names
    the first bad index.
    """
    dtype = getattr(values, "dtype", None)
    if dtype is not None:  # an array, duck-typed so that this module needs no NumPy
        if getattr(values, "ndim", None) != 1 or getattr(dtype, "kind", None) not in ("i", "u"):
            shape = getattr(values, "shape", "?")
            raise InvalidType(f"{name} must be a one-dimensional array of integers, not {dtype} of shape {shape}")
        array: Any = values
        ids: list[Any] = array.tolist()
    elif isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Sequence):
        _refuse(InvalidType, name, "a sequence of token ids", values)
    else:
        ids = list(values)
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < n_vocab)):
        return ids
    hint = f"the vocabulary has {n_vocab} tokens"
    return [integer(f"{name}[{index}]", value, 0, n_vocab - 1, hint) for index, value in enumerate(ids)]


def given(options: Mapping[str, _T], keep: Collection[str] = ()) -> dict[str, _T]:
    """Return the options that are not None; the others count as left out.

    keep: options in which None has a meaning of its own.
    """
    return {name: value for name, value in options.items() if value is not None or name in keep}


def set_defaults(record: Any, keep: Collection[str] = ()) -> None:
    """Replace None by the default in the fields of a frozen dataclass, except the fields in `keep`."""
    for field in _fields_with_default(record.__class__):
        if getattr(record, field.name) is None and field.name not in keep:
            make = field.default_factory
            object.__setattr__(record, field.name, field.default if make is MISSING else make())


@cache
def _fields_with_default(kind: type) -> tuple[Field[Any], ...]:
    """Return the fields of a dataclass that have a default other than None."""
    required = [field for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    return tuple(field for field in fields(kind) if field not in required and field.default is not None)


def reject_unknown(
    names: Iterable[str],
    known: Collection[str],
    see: str | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `InvalidType`, which is a `TypeError`, for the first unknown name, with the nearest known name.

    Args:
        names: The names to check.
        known: The known names.
        see: The place that documents the known names; the error names it if no known name is near.
        elsewhere: Names of other packages, with the known name of the same meaning, or with a sentence about it.

    Raises:
        InvalidType: A name is unknown.
    """
    for name in names:
        if name in known:
            continue
        hint = elsewhere.get(name)
        if hint is None:
            others = "known are " + ", ".join(sorted(known)) if see is None else f"there are {len(known)}, see {see}"
            hint = _did_you_mean(name, known) or others
        elif hint in known:
            hint = f"did you mean {hint!r}?"
        raise InvalidType(f"unknown option {_shown(name)}; {hint}")


def no_attribute(owner: object, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error of a missing attribute. elsewhere: the attributes to use for names of other packages."""
    hint = f"; use {elsewhere[name]}" if name in elsewhere else ""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}{hint}"
    return AttributeError(message, name=name, obj=owner)


def _is_between(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _within(value: float, above: float | None, below: float | None) -> bool:
    """Return whether a number lies between open bounds, also when rounded to 32 bits."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return all((above is None or x > above) and (below is None or x < below) for x in (value, rounded))


def _plain_text(value: str) -> str:
    """Return a plain `str`, also for a subclass, which could not be sent to another process."""
    return str.__str__(value)


def import_named(name: str) -> Any:
    """Import the object that `module:attr` names; `attr` may have dots.

    Raises `InvalidParams` for another form, and whatever the import raises.
    """
    module, _, attributes = name.partition(":")
    if not module or not attributes:
        raise InvalidParams(f"{name!r} must be of the form 'module:attr'")
    return reduce(getattr, attributes.split("."), importlib.import_module(module))


def _wanted(
    kind: str, low: float | None, high: float | None, above: float | None = None, below: float | None = None
) -> str:
    bounds = ((">=", low), (">", above), ("<=", high), ("<", below))
    return " ".join([kind, " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)]).rstrip()


def _refuse(error: type[InvalidParams], name: str, wanted: str, value: object, hint: str | None = None) -> NoReturn:
    raise error(f"{name} must be {wanted}, not {_shown(value)}" + (f"; {hint}" if hint else ""))


def _did_you_mean(word: str, options: Collection[str]) -> str | None:
    nearest = nearest_names(word[:_MAX_SHOWN], options)
    return f"did you mean {nearest[0]!r}?" if nearest else None


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - an int of 5,000 digits, or an object whose repr fails
        return f"a {type(value).__name__}"
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."
