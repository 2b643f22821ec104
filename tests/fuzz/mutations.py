"""Ways to damage a GGUF file: its bytes, and their meaning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random

from tests.fuzz.document import Document, Tensor, Value

from paceline.runtime.gguf_file import ValueType

NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    31,
    33,
    255,
    256,
    257,
    511,
    513,
    1024,
    1025,
    65536,
    10**9,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    -1,
    -2,
)
FLOATS = (0.0, -0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
STRINGS = (
    b"",
    b"\0",
    b"x",
    b"llama",
    b"bert",
    b"none",
    b"gpt2",
    b"linear",
    b"yarn",
    b"\xff\xfe\x80",
    b"a" * 70000,
    b"default",
)


def sweep(base: Document) -> Iterator[tuple[bytes, str]]:
    """Every value left out and set to odd numbers, every tensor left out and stored as other types; one at a time."""
    for place, value in enumerate(base.values):
        yield _without_value(base, place)
        if value.type in (ValueType.UINT32, ValueType.FLOAT32):
            for number in FLOATS if value.type == ValueType.FLOAT32 else NUMBERS:
                document = copy.deepcopy(base)
                document.values[place].value = number
                yield document.to_bytes(), f"{value.key.decode()} = {number}"
    for place, tensor in enumerate(base.tensors):
        document = copy.deepcopy(base)
        del document.tensors[place]
        yield document.to_bytes(), f"without {tensor.name.decode()}"
        for kind, size in ((1, 2), (30, 2), (24, 1), (26, 4), (28, 8)):
            document = copy.deepcopy(base)
            document.tensors[place].type = kind
            document.tensors[place].data = bytes(size * (len(tensor.data) // 4))
            yield document.to_bytes(), f"{tensor.name.decode()} stored as type {kind}"


def _without_value(base: Document, place: int) -> tuple[bytes, str]:
    document = copy.deepcopy(base)
    value = document.values.pop(place)
    return document.to_bytes(), f"without {value.key.decode()}"


def damage(random: Random, bases: Sequence[Document]) -> tuple[bytes, str]:
    """One damaged file and a line that describes the damage."""
    base = random.choice(bases)
    name = base.find(b"general.architecture")
    kind = random.choices((_meaning, _bytes), (3, 1))[0]
    data, words = kind(random, base)
    return data, f"{name.value.decode() if name else '?'}: {words}"


def _meaning(random: Random, base: Document) -> tuple[bytes, str]:
    document = copy.deepcopy(base)
    words = []
    for change in random.choices(list(_CHANGES), list(_CHANGES.values()), k=random.choice((1, 1, 1, 2))):
        with suppress(IndexError):  # nothing of its kind is there
            words.append(change(random, document))
    return document.to_bytes(), "; ".join(words)


def _bytes(random: Random, base: Document) -> tuple[bytes, str]:
    data = bytearray(base.to_bytes())
    header = len(data) - sum(len(tensor.data) for tensor in base.tensors)  # about
    words = random.choice((_cut, _noise, _missing, _overwrite, _flip))(random, data, header)
    return bytes(data), words


def _cut(random: Random, data: bytearray, header: int) -> str:
    at = random.randrange(random.choice((header, len(data))))
    del data[at:]
    return f"cut off at {at}"


def _noise(random: Random, data: bytearray, _header: int) -> str:
    start = random.choice((b"", b"GGUF", b"GGUF" + (3).to_bytes(4, "little")))
    data[:] = start + random.randbytes(random.choice((0, 1, 4, 24, 100, 4096)))
    return f"random bytes after {start!r}"


def _missing(random: Random, data: bytearray, header: int) -> str:
    at, count = random.randrange(header), random.randrange(1, 200)
    del data[at : at + count]
    return f"{count} bytes missing at {at}"


def _overwrite(random: Random, data: bytearray, header: int) -> str:
    at, width = random.randrange(header), random.choice((4, 8))
    number = random.choice(NUMBERS) & (2 ** (8 * width) - 1)
    data[at : at + width] = number.to_bytes(width, "little")
    return f"{number} over {width} bytes at {at}"


def _flip(random: Random, data: bytearray, header: int) -> str:
    count = random.choice((1, 1, 4, 32))
    for _ in range(count):
        data[random.randrange(header)] ^= 1 << random.randrange(8)
    return f"{count} bits of the header flipped"


def _value(random: Random, document: Document) -> Value:
    ours = [value for value in document.values if not value.key.startswith(b"general.name")]
    return random.choice(ours)


def _change_number(random: Random, document: Document) -> str:
    numbers = [value for value in document.values if value.type not in (ValueType.STRING, ValueType.ARRAY)]
    value = random.choice(numbers)
    value.value = (
        random.choice(FLOATS) if value.type in (ValueType.FLOAT32, ValueType.FLOAT64) else random.choice(NUMBERS)
    )
    return f"{value.key.decode()} = {value.value}"


def _change_string(random: Random, document: Document) -> str:
    value = random.choice([value for value in document.values if value.type == ValueType.STRING])
    value.value = random.choice(STRINGS)
    return f"{value.key.decode()} = {value.value[:20]!r}"


def _change_array(random: Random, document: Document) -> str:
    value = random.choice([value for value in document.values if value.type == ValueType.ARRAY])
    items, what = list(value.value), random.randrange(6)
    at = random.randrange(len(items)) if items else 0
    if what == 0:
        items, words = items[:at], f"cut to {at}"
    elif what == 1:
        items, words = [], "emptied"
    elif what == 2 and items:
        items[at], words = items[0], f"item {at} as the first"
    elif what == 3 and items:
        new = random.choice(STRINGS if value.item_type == ValueType.STRING else NUMBERS)
        items[at], words = new, f"item {at} = {str(new)[:20]}"
    elif what == 4:
        items, words = items * random.choice((2, 600)), "repeated"
        items = items[:200000]
    else:
        value.item_type, words = random.choice([*range(14), 255]), "of other items"
        words += f" ({value.item_type})"
    value.value = items
    return f"{value.key.decode()} {words}"


def _number_to_array(random: Random, document: Document) -> str:
    value = random.choice([value for value in document.values if value.type in (ValueType.UINT32, ValueType.FLOAT32)])
    count = random.choice((0, 1, 2, 3, 511, 512, 513, 100000))
    value.item_type, value.type, value.value = value.type, ValueType.ARRAY, [value.value] * count
    return f"{value.key.decode()} as an array of {count}"


def _retype(random: Random, document: Document) -> str:
    value = _value(random, document)
    if value.type == ValueType.ARRAY:
        value.value = 1
    value.type = random.choice([kind for kind in ValueType if kind != ValueType.ARRAY] + [13, 1000])
    return f"{value.key.decode()} as type {value.type}"


def _drop_value(random: Random, document: Document) -> str:
    value = _value(random, document)
    document.values.remove(value)
    return f"without {value.key.decode()}"


def _add_value(random: Random, document: Document) -> str:
    found = document.find(b"general.architecture")
    architecture = found.value if found else b"llama"
    key, kind = random.choice(_OPTIONAL)
    number = random.choice(FLOATS) if kind is ValueType.FLOAT32 else random.choice(NUMBERS)
    value = Value(
        key.replace(b"%s", architecture), kind, random.choice(STRINGS) if kind is ValueType.STRING else number
    )
    document.values = [old for old in document.values if old.key != value.key] + [value]
    return f"{value.key.decode()} = {str(value.value)[:20]}"


def _repeat_value(random: Random, document: Document) -> str:
    value = _value(random, document)
    document.values.append(copy.copy(value))
    return f"{value.key.decode()} twice"


def _drop_tensor(random: Random, document: Document) -> str:
    tensor = document.tensors.pop(random.randrange(len(document.tensors)))
    return f"without {tensor.name.decode()}"


def _rename_tensor(random: Random, document: Document) -> str:
    tensor, other = random.choice(document.tensors), random.choice(document.tensors)
    old, tensor.name = tensor.name, random.choice((other.name, b"", b"x" * 63, b"y" * 64, b"\xff", tensor.name + b"x"))
    return f"{old.decode()} named {tensor.name[:20]!r}"


def _reshape(random: Random, document: Document) -> str:
    tensor = random.choice(document.tensors)
    what = random.randrange(4)
    if what == 0:
        tensor.shape = tensor.shape[::-1]
    elif what == 1:
        tensor.shape[random.randrange(len(tensor.shape))] = random.choice((*NUMBERS, 2**62, 2**40))
    elif what == 2:
        tensor.shape = tensor.shape + [1] * random.choice((1, 2, 3, 4))
    else:
        tensor.shape = tensor.shape[:-1]
    return f"{tensor.name.decode()} of shape {tensor.shape}"


def _retype_tensor(random: Random, document: Document) -> str:
    tensor = random.choice(document.tensors)
    tensor.type = random.choice([*range(45), 255, 2**31, 2**32 - 1])
    return f"{tensor.name.decode()} of type {tensor.type}"


def _refit_type(random: Random, document: Document) -> str:
    """Another type with a fitting amount of data: the output of a broken converter."""
    tensor = random.choice(document.tensors)
    tensor.type, per_value = random.choice(((24, 1), (25, 2), (26, 4), (27, 8), (28, 8), (30, 2), (1, 2)))
    count = len(tensor.data) // 4
    tensor.data = random.randbytes(count * per_value)
    return f"{tensor.name.decode()} stored as type {tensor.type}"


def _move_tensor(random: Random, document: Document) -> str:
    tensor = random.choice(document.tensors)
    tensor.offset = random.choice((0, 1, 31, 32, 2**31, 2**62, 2**64 - 32))
    return f"{tensor.name.decode()} at {tensor.offset}"


def _add_tensor(random: Random, document: Document) -> str:
    tensor = Tensor(
        random.choice(_OPTIONAL_TENSORS), random.choice(([64], [64, 64], [1], [300, 2])), 0, random.randbytes(256)
    )
    tensor.data = bytes(4 * _product(tensor.shape))
    document.tensors.append(tensor)
    return f"with {tensor.name.decode()} {tensor.shape}"


def _bad_weights(random: Random, document: Document) -> str:
    tensor = random.choice(document.tensors)
    tensor.data = random.choice((b"\xff", b"\0", b"\x7f", random.randbytes(8))) * len(tensor.data)
    tensor.data = tensor.data[: 4 * _product(tensor.shape)]
    return f"{tensor.name.decode()} full of odd weights"


def _bad_counts(random: Random, document: Document) -> str:
    number = random.choice((*NUMBERS, len(document.values) + 1, len(document.tensors) - 1))
    field = random.choice(("n_values", "n_tensors", "version"))
    setattr(document, field, number)
    return f"{field} = {number}"


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_OPTIONAL_TENSORS = tuple(
    b"blk.0.attn_qkv.weight output.bias rope_freqs.weight blk.0.attn_q.bias cls.weight blk.99.attn_norm.weight junk"
    b" blk.0.attn_output.bias token_types.weight".split()
)
_COUNTS = (
    b"expert_count expert_used_count expert_group_count expert_group_used_count nextn_predict_layers pooling_type"
    b" attention.key_length attention.value_length rope.dimension_count attention.sliding_window decoder_block_count"
    b" attention.sliding_window_pattern embedding_length_out attention.head_count_kv".split()
)
_REALS = (
    b"rope.scaling.factor rope.freq_base attention.max_alibi_bias attention.clamp_kqv final_logit_softcapping".split()
)
_TEXTS = b"ggml.model ggml.pre ggml.scores chat_template".split()
_TOKENS = b"bos_token_id eos_token_id unknown_token_id token_type_count".split()
_OPTIONAL: tuple[tuple[bytes, ValueType], ...] = (
    *((b"%s." + name, ValueType.UINT32) for name in _COUNTS),
    *((b"%s." + name, ValueType.FLOAT32) for name in _REALS),
    *((b"%s." + name, ValueType.STRING) for name in (b"rope.scaling.type", b"classifier.output_labels")),
    *((b"tokenizer.ggml." + name, ValueType.UINT32) for name in _TOKENS),
    *(
        (b"tokenizer." + name, ValueType.STRING)
        for name in (b"ggml.model", b"ggml.pre", b"ggml.scores", b"chat_template")
    ),
    *((b"general." + name, ValueType.UINT32) for name in (b"alignment", b"file_type")),
    *((b"split." + name, ValueType.UINT16) for name in (b"count", b"no")),
)

Change = Callable[[Random, Document], str]
_CHANGES: dict[Change, int] = {  # with how often each of them is made
    _change_number: 10,
    _change_array: 5,
    _change_string: 2,
    _number_to_array: 3,
    _retype: 2,
    _drop_value: 2,
    _add_value: 8,
    _repeat_value: 1,
    _drop_tensor: 2,
    _rename_tensor: 2,
    _reshape: 3,
    _retype_tensor: 2,
    _refit_type: 3,
    _move_tensor: 1,
    _add_tensor: 2,
    _bad_weights: 2,
    _bad_counts: 1,
}
