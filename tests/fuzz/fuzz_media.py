"""Decodes damaged images and sounds: `python -m tests.fuzz.fuzz_media --count 1000 --seed 1`."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random

import PIL.Image
from tests.fuzz.outcomes import Outcome, report, run_forked
from tests.pictures import bmp, picture, png
from tests.sounds import flac_file, int16, lame_frame, mp3_file, tone, wav_file

from paceline import Audio, Image
from paceline.runtime import decoded_pixels, decoded_samples

_NUMBERS = (0, 1, 2, 255, 256, 32767, 65535, 65536, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def bases() -> dict[str, bytes]:
    """Small files of every format, and of the kinds within it."""
    pixels = picture(1, 61, 43)
    drawn = PIL.Image.fromarray(pixels)

    def written(image: PIL.Image.Image, kind: str, **options: object) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return {
        "png": png(pixels),
        "png palette": written(drawn.convert("P"), "PNG"),
        "png alpha": written(drawn.convert("RGBA"), "PNG"),
        "png gray": written(drawn.convert("L"), "PNG"),
        "jpeg": written(drawn, "JPEG"),
        "jpeg progressive": written(drawn, "JPEG", progressive=True),
        "jpeg gray": written(drawn.convert("L"), "JPEG"),
        "gif": written(drawn, "GIF"),
        "bmp": bmp(pixels),
        "bmp palette": written(drawn.convert("P"), "BMP"),
        "wav": wav_file(int16(tone(0.2))),
        "wav floats": wav_file(tone(0.2, channels=2)),
        "mp3": lame_frame(9, 576, 1000) + mp3_file(9),
        "mp3 bare": mp3_file(12),
        "flac": flac_file(int16(tone(8000 / 16000))),
    }


def use(kind: str, data: bytes) -> None:
    """Read the header, and decode."""
    if kind.startswith(("wav", "mp3", "flac")):
        samples = decoded_samples(Audio(data), 16000)
        assert samples.ndim == 1
    else:
        image = Image(data)
        pixels = decoded_pixels(image)
        assert pixels.shape == (image.extent.height, image.extent.width, 3)


def _flipped(random: Random, data: bytearray) -> str:
    places = [
        random.randrange(min(len(data), random.choice((64, 512, len(data)))))
        for _ in range(random.choice((1, 1, 3, 20)))
    ]
    for place in places:
        data[place] ^= 1 << random.randrange(8)
    return f"bits flipped at {places[:5]}"


def _overwritten(random: Random, data: bytearray) -> str:
    place, width = random.randrange(min(len(data), random.choice((64, 1024)))), random.choice((1, 2, 4))
    number, order = random.choice(_NUMBERS) % (1 << 8 * width), random.choice(("little", "big"))
    data[place : place + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
    return f"{number} over {width} bytes at {place}, {order}"


def _cut(random: Random, data: bytearray) -> str:
    place = random.randrange(len(data))
    del data[place:]
    return f"cut at {place}"


def _shortened(random: Random, data: bytearray) -> str:
    place, size = random.randrange(len(data)), random.randrange(1, 200)
    del data[place : place + size]
    return f"{size} bytes missing at {place}"


def _repeated(random: Random, data: bytearray) -> str:
    place, size, times = random.randrange(len(data)), random.randrange(1, 400), random.choice((1, 2, 50))
    data[place:place] = data[place : place + size] * times
    return f"{size} bytes at {place} {times} times more"


def _noisy(random: Random, data: bytearray) -> str:
    place, size = random.randrange(len(data)), random.choice((1, 16, 1000))
    data[place : place + size] = random.randbytes(size)
    return f"{size} random bytes at {place}"


_DAMAGES: tuple[Callable[[Random, bytearray], str], ...] = (_flipped, _overwritten, _cut, _shortened, _repeated, _noisy)


def damaged(random: Random, files: Mapping[str, bytes]) -> tuple[str, bytes, str]:
    """Return the kind of a random file, its content with damage, and a description of the damage."""
    kind = random.choice(list(files))
    data = bytearray(files[kind])
    damages = random.choices(_DAMAGES, k=random.choice((1, 1, 2)))
    words = "; ".join(damage(random, data) for damage in damages if data)
    return kind, bytes(data), words


def fuzz(seed: int, count: int) -> Iterator[tuple[int, str, Outcome]]:
    """`count` damaged files, each with a number, its damage, and its outcome."""
    files = bases()
    for number in range(count):
        kind, data, words = damaged(Random(f"{seed}/{number}"), files)
        yield number, f"{kind}: {words}", run_forked(partial(use, kind, data))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return report(options.seed, fuzz(options.seed, options.count))


if __name__ == "__main__":
    raise SystemExit(main())
