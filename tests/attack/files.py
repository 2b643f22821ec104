"""Attacks through files and names: a hostile hub, pipes in place of files, damaged files, names that drive a terminal."""

from __future__ import annotations

import base64
import io
import ipaddress
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from urllib.parse import quote

import httpx
import PIL.Image
from tests.attack.harness import MB, Attack, figure, measured, post
from tests.e2e.commands import COMMAND, environment
from tests.e2e.served import LONG_S, Served
from tests.fuzz.document import Document
from tests.fuzz.fuzz_media import bases, damaged
from tests.fuzz.mutations import damage
from tests.hub.stand_in_hub import CHUNKED, HostileServer, chunked, endless, listing_bytes
from tests.pictures import gif_header, jpeg_header, png_chunk
from tests.sounds import flac_file, int16, mp3_file, tone, wav_file

from paceline.demo import demo_model_path, demo_vision_model_path
from paceline.server.request_media import is_public
from paceline.testing.models import CHAT_TEMPLATE, KINDS, LlamaSpec, UltravoxAudioSpec, write_model

FLAGS = ("-np", "1", "-c", "512", "-t", "1", "--no-spare-worker")
STRANGE = "m\x1b[2J\x07\x85\u202egpj\u2028\n2026-01-01T00:00:00 ERROR paceline.server: forged\r"
LISTED_BYTES = 1 << 20
PROMPT = "Once upon a time there was a little"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-attack-") as name:
        yield Path(name)


@contextmanager
def _router(folder: Path, *flags: str, **env: str) -> Iterator[Served]:
    """Yield a server of the models in a folder, with empty caches."""
    models = folder / "models"
    models.mkdir(exist_ok=True)
    caches = dict.fromkeys(
        ("HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"), str(folder / "cache")
    )
    with Served("--models-dir", str(models), *FLAGS, *flags, is_ready=False, **caches, **env) as server:
        yield server


# ---- a hub


def _download_event(server: Served, model: str) -> str:
    """Have a router download a model, and return its last event, or the status of a refusal."""
    with server.client() as client, client.stream("GET", "/models/sse") as events:
        pieces, data = events.iter_bytes(), b""
        data += next(pieces)
        response = post(server, "/models", {"model": model})
        if not response.is_success:
            return str(response.status_code)
        for piece in pieces:
            data += piece
            for line in data.split(b"\n")[:-1]:  # `iter_lines` would also break at separators within a name
                if line.startswith(b"data: ") and "progress" not in (event := json.loads(line[6:])["event"]):
                    return str(event)
    return "no event"


def endless_download() -> str:
    """Download a file with a listed size of 1 MiB and an endless body; then an endless listing."""
    body = b"GGUF".ljust(1 << 16, b"x")

    def pieces(line: str) -> Iterator[bytes]:
        if "endless" in line:
            return endless(chunked(b"[" * 65_536), first=CHUNKED)
        if " /api/" in line:
            return iter([listing_bytes(size=LISTED_BYTES)])
        return endless(chunked(body), first=CHUNKED)

    with _folder() as folder, HostileServer(pieces) as hub, _router(folder, HF_ENDPOINT=hub.url) as server:
        with measured(server) as now:
            outcome = _download_event(server, "user/tiny:Q4_K_M")
            num_sent = hub.num_sent
            listing = _download_event(server, "user/endless:Q4_K_M")
        kept = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    held = (
        (outcome, listing) == ("download_failed", "503") and num_sent < 32 * MB and kept < 1000 and now.server_mb < 100
    )
    return figure(
        f"{outcome} after {num_sent / MB:.1f} MB, {kept} bytes kept; endless listing: {listing}; {now}", held=held
    )


def names_in_the_log() -> str:
    """Name a model, a path, a request and a file of a hub so that a terminal would be driven; look at the server's log."""
    listed = f"{STRANGE.replace('/', '')}-Q4_K_M.gguf"

    def pieces(line: str) -> Iterator[bytes]:
        return iter(
            [listing_bytes(rfilename=listed) if " /api/" in line else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"]
        )

    with _folder() as folder, HostileServer(pieces) as hub, _router(folder, HF_ENDPOINT=hub.url) as server:
        events = [_download_event(server, "user/tiny:Q4_K_M")]
        for body in ({"model": STRANGE, "prompt": STRANGE, "user": STRANGE}, {STRANGE: STRANGE}):
            post(server, "/v1/completions", body, **{"x-request-id": "m%1b", "user-agent": "\x1b[2J"})
        httpx.get(f"{server.url}/{quote(STRANGE)}?{quote(STRANGE)}", timeout=LONG_S)
        httpx.get(f"{server.url}/props?model={quote(STRANGE)}", timeout=LONG_S)
        time.sleep(0.5)  # the log is written by a thread
    lines = [line.removesuffix("\n") for line in server.lines]
    forged = [line for line in lines if not line.isprintable() or line.startswith("2026-01-01T00:00:00 ")]
    named = sum("[2J" in line for line in lines)
    return figure(
        f"{len(forged)} of {len(lines)} lines with control characters or forged, {named} with escaped names; {events[0]}",
        held=not forged and named >= 2 and events == ["download_failed"],
    )


# ---- what stands in place of a file


def places_of_prefixes() -> str:
    """Restore a pipe, a device, a folder, a loop of links, a terabyte of nothing, and 3 GB that are no prefix."""
    with _folder() as folder:
        os.mkfifo(folder / "pipe")
        (folder / "zero").symlink_to("/dev/zero")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "folder").mkdir()
        for name, magic, size in (
            ("sparse", b"", 1 << 40),
            ("magic", b"PLPR\2\0\0\0\1\0\0\0\0\0\0\0", 1 << 40),
            ("big", b"x", 3 << 30),
        ):
            with (folder / name).open("wb") as file:
                file.write(magic)
                file.truncate(size)
        longest_s, statuses = 0.0, Counter[int]()
        with Served(*FLAGS, "--slot-save-path", str(folder)) as server, measured(server) as now:
            for name in ("pipe", "zero", "loop", "folder", "sparse", "magic", "big", "missing"):
                began_s = time.monotonic()
                statuses[post(server, "/slots/0?action=restore", {"filename": name}).status_code] += 1
                longest_s = max(longest_s, time.monotonic() - began_s)
    held = set(statuses) == {400} and longest_s < 5 and now.server_mb < 60 and (now.worker_mb or 0) < 60
    return figure(f"{dict(statuses)}, the slowest after {longest_s:.2f} s; {now}", held=held)


def damaged_prefixes() -> str:
    """Restore 150 copies of a saved prefix with flipped bits and cut ends, then the original."""
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "id_slot": 0, "cache_prompt": True}
    with _folder() as folder, Served(*FLAGS, "--slot-save-path", str(folder)) as server:
        worker = server.children()
        expected = post(server, "/completion", body).json()["content"]
        assert post(server, "/slots/0?action=save", {"filename": "whole"}).status_code == 200
        whole = (folder / "whole").read_bytes()
        statuses = Counter[int]()
        with measured(server) as now:
            for number in range(150):
                random, data = Random(number), bytearray(whole)
                for _ in range(random.choice((1, 1, 8))):
                    data[random.randrange(random.choice((64, 200, len(data))))] ^= 1 << random.randrange(8)
                (folder / "damaged").write_bytes(data[: random.randrange(len(data)) if number % 5 == 0 else None])
                statuses[post(server, "/slots/0?action=restore", {"filename": "damaged"}).status_code] += 1
        restored = post(server, "/slots/0?action=restore", {"filename": "whole"}).status_code
        same = post(server, "/completion", body).json()["content"] == expected
        survived = server.children() == worker
    held = set(statuses) == {400} and restored == 200 and same and survived
    return figure(
        f"{dict(statuses)}; the original: {restored}, {'the same' if same else 'another'} text, "
        f"{'the same' if survived else 'another'} worker; {now}",
        held=held,
    )


def hostile_settings() -> str:
    """Give commands hostile configuration files and traces, each within 1.5 GB and 60 s."""
    deep, many = "[" * 200_000, "a." * 100_000
    contents = {
        "config": (
            f"a = {deep}", f"a = {'9' * 2_000_000}", f"{many}a = 1", "a = \"\x1b[2J\"", "\0" * 1000, "a = 1\n" * 200_000,
            f"a = {'{b=' * 50_000}", "\ufeffa = 1", "[serve]\n" + "x\u202e = 1",
        ),
        "trace": (
            "", "{}\n", "[" * 100_000 + "\n", '{"paceline_trace": 1e999}\n', "x" * 20_000_000, "\0" * 1_000_000 + "\n",
            '{"paceline_trace": 3, "version": "\x1b[2J"}\n' * 3,
        ),
    }  # fmt: skip
    limit = 1_500 * MB
    codes, faults = Counter[int](), []
    with _folder() as folder:
        for kind, texts in contents.items():
            for number, text in enumerate(texts):
                path = folder / f"{kind}-{number}"
                path.write_text(text, encoding="utf-8")
                argv = ("--config", str(path), "tokenize", "x") if kind == "config" else ("trace", "show", str(path))
                ran = subprocess.run(
                    [*COMMAND, *argv],
                    capture_output=True,
                    check=False,
                    timeout=60,
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
                )
                codes[ran.returncode] += 1
                if ran.returncode <= 0 or b"Traceback" in ran.stderr or b"\x1b" in ran.stderr:
                    faults.append(f"{path.name}: {ran.returncode} {ran.stderr[-200:]!r}")
    return figure(f"exit codes {dict(codes)}; {faults or 'an error of one line each'}", held=not faults)


# ---- damaged files


def damaged_models() -> str:
    """Have a router load 60 damaged models in a row, and then a good model."""
    statuses = Counter[int]()
    with _folder() as folder:
        documents = [Document.read(write_model(folder / f"{kind}.gguf", spec)) for kind, spec in KINDS.items()]
        (folder / "models").mkdir()
        for number in range(60):
            (folder / "models" / f"m{number}.gguf").write_bytes(damage(Random(f"attack/{number}"), documents)[0])
        shutil.copy(demo_model_path(), folder / "models" / "good.gguf")
        with _router(folder, "--models-max", "1") as server, measured(server) as now:
            for number in range(60):
                body = {"model": f"m{number}", "prompt": [1, 2, 3], "n_predict": 2}
                statuses[post(server, "/completion", body).status_code] += 1
            good = post(server, "/completion", {"model": "good", "prompt": PROMPT, "n_predict": 2}).status_code
    held = good == 200 and now.server_mb < 150 and set(statuses) <= {200, 400, 404, 500, 501, 503}
    return figure(f"{dict(statuses)}; a good model then: {good}; {now}", held=held)


def _bombs() -> dict[str, bytes]:
    """Small files with headers or streams that promise very many pixels."""

    def png(width: int, height: int, rows: bytes) -> bytes:
        head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\1\0\0\0\0"  # one bit a pixel
        chunks = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunks

    blank = zlib.compress(bytes(8192 * 1025), 9)
    frames = [PIL.Image.new("P", (2000, 2000), color) for color in range(40)]
    gif = io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:])
    webp = b"RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f\xff\xff\xff\x0f" + bytes(12)
    return {
        "png of 8,192 x 8,192": png(8192, 8192, blank),
        "png of 2^31 x 2^31": png(2**31 - 1, 2**31 - 1, blank),
        "png of 16,385 x 1": png(16_385, 1, blank),
        "png of 64 MB of zeros": png(64, 64, zlib.compress(bytes(64 * MB), 9)),
        "jpeg of 65,535 x 65,535": jpeg_header(65_535, 65_535),
        "gif of 65,535 x 65,535": gif_header(65_535, 65_535),
        "gif of 40 frames": gif.getvalue(),
        "webp of 16,384 x 16,384": webp,
    }


def damaged_media() -> str:
    """Send bombs and 120 damaged images to a model that sees, then a good image."""
    model = demo_vision_model_path()
    projector = model.with_name("mmproj-paceline-demo-vision.gguf")
    flags = ("-np", "1", "-c", "1024", "-t", "1", "-m", str(model), "--mmproj", str(projector), "--no-spare-worker")
    images = {kind: data for kind, data in bases().items() if not kind.startswith(("wav", "mp3", "flac"))}

    def send(server: Served, _: str, data: bytes) -> int:
        url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return post(server, "/v1/chat/completions", body).status_code

    return _survived(flags, send, _bombs(), images, "png")


def _survived(
    flags: Sequence[str],
    send: Callable[[Served, str, bytes], int],
    bombs: Mapping[str, bytes],
    files: Mapping[str, bytes],
    whole: str,
) -> str:
    """Return the figure of bombs, then of 120 damaged files, then of a whole file, sent to one server.

    Args:
        flags: Flags of the server.
        send: Sends a file of a kind and returns the status.
        bombs: Files that promise more than they have, by kind.
        files: Files to damage, by kind.
        whole: The kind of the file that is sent undamaged, before and after.
    """
    statuses = Counter[int]()
    with Served(*flags) as server:
        worker = server.children()
        first = send(server, whole, files[whole])
        with measured(server) as bombed:
            refused = {kind: send(server, kind, data) for kind, data in bombs.items()}
        with measured(server) as fuzzed:
            for number in range(120):
                kind, data, _ = damaged(Random(f"attack/{number}"), files)
                statuses[send(server, kind, data)] += 1
        good, survived = send(server, whole, files[whole]), server.children() == worker
    held = (
        set(statuses) | set(refused.values()) <= {200, 400}
        and (first, good) == (200, 200)
        and survived
        and bombed.server_mb < 100
        and bombed.worker_mb is not None
        and bombed.worker_mb < 700
    )
    return figure(
        f"bombs {dict(Counter(refused.values()))}, {bombed}; damaged {dict(statuses)}, {fuzzed}; a whole file then: {good}, "
        f"{'the same' if survived else 'another'} worker",
        held=held,
    )


def damaged_sounds() -> str:
    """Send sounds that promise hours, and 120 damaged sounds, to a tiny model that hears, then a good sound."""
    sounds = {kind: data for kind, data in bases().items() if kind.startswith(("wav", "mp3", "flac"))}
    samples = int16(tone(0.1))
    bombs = {
        "wav that promises 4 GB": wav_file(samples, size=2**32 - 1),
        "wav of one sample a second": wav_file(int16(tone(0.5)), rate=1),
        "flac that promises 2^36 samples": flac_file(samples, told=2**36 - 1),
        "mp3 of 20,000 frames of silence": mp3_file(20_000),
    }

    def send(server: Served, kind: str, data: bytes) -> int:
        if not kind.startswith("wav"):
            file = {"file": (f"x.{kind.partition(' ')[0]}", data)}
            with server.client() as client:
                return client.post("/v1/audio/transcriptions", files=file, data={"max_tokens": "2"}).status_code
        audio = {"data": base64.b64encode(data).decode(), "format": "wav"}
        content = [{"type": "input_audio", "input_audio": audio}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return post(server, "/v1/chat/completions", body).status_code

    with _folder() as folder:
        projector = write_model(folder / "mmproj-hearing.gguf", UltravoxAudioSpec())
        model = write_model(
            folder / "hearing.gguf", LlamaSpec(n_ctx_train=2048), metadata={"tokenizer.chat_template": CHAT_TEMPLATE}
        )
        flags = ("-np", "1", "-c", "2048", "-t", "1", "-m", str(model), "--mmproj", str(projector), "--no-spare-worker")
        return _survived(flags, send, bombs, sounds, "wav")


# ---- full and read-only folders


def no_room_on_the_disk() -> str:
    """Serve with saved prefixes and a log on a disk of 256 KiB, as a process of its own mounts it (needs root)."""
    if os.geteuid():
        return "not tried: only root mounts a disk"
    with _folder() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
        )
        if mounted.returncode:
            return f"not tried: {mounted.stderr.decode().strip()}"
        try:
            with Served(*FLAGS, "--slot-save-path", str(folder), "--log-file", str(folder / "log")) as server:
                worker = server.children()
                post(server, "/completion", {"prompt": PROMPT * 8, "n_predict": 4, "id_slot": 0, "cache_prompt": True})
                (folder / "filler").write_bytes(bytes(64 << 10))
                saved = [post(server, "/slots/0?action=save", {"filename": f"p{number}"}) for number in range(4)]
                left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
                texts = {
                    post(server, "/completion", {"prompt": PROMPT, "n_predict": 2}).status_code for _ in range(300)
                }
                good, survived = server.get("/health").status_code, server.children() == worker
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    statuses = Counter(response.status_code for response in saved)
    words = [response.json()["error"]["message"] for response in saved if response.status_code != 200]
    is_said = bool(words) and all("No space left on device" in each for each in words)
    held = is_said and not left and texts == {200} and good == 200 and survived
    return figure(
        f"saves {dict(statuses)} ({words[0] if words else 'no error'}), {len(left)} halves left, completions {texts} with a "
        "full log",
        held=held,
    )


def read_only_folders() -> str:
    """Have the server write its log, trace, socket, saved prefixes and downloads into a read-only folder (needs root)."""
    if os.geteuid():
        return "not tried: only root mounts a disk"
    with _folder() as folder:
        options = ["-t", "tmpfs", "-o", "ro,size=64k", "tmpfs"]
        mounted = subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)
        if mounted.returncode:
            return f"not tried: {mounted.stderr.decode().strip()}"
        try:
            ended = {}
            for name, argv in {
                "log": ("--log-file", str(folder / "log")),
                "trace": ("--trace", str(folder / "trace")),
                "socket": ("--host", str(folder / "x.sock")),
            }.items():
                ran = subprocess.run(
                    [*COMMAND, "serve", "--port", "0", *FLAGS, *argv],
                    capture_output=True,
                    check=False,
                    timeout=LONG_S,
                    env=environment(),
                )
                ended[name] = ran.returncode > 0 and b"Read-only file system" in ran.stderr
            with Served(*FLAGS, "--slot-save-path", str(folder), XDG_STATE_HOME=str(folder)) as server:
                post(server, "/completion", {"prompt": PROMPT * 8, "n_predict": 4, "id_slot": 0, "cache_prompt": True})
                saved = post(server, "/slots/0?action=save", {"filename": "p"})
                ended["saved prefix"] = saved.status_code == 400 and "Read-only file system" in saved.text
                ended["state, and still ready"] = server.get("/health").status_code == 200
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    return figure(f"clear errors: {ended}", held=all(ended.values()))


def special_addresses() -> str:
    """Ask for the first and last address of every special-purpose block whether images may be fetched from there."""
    from tests.unit.server.test_media_fetcher import REGISTRIES

    blocks = [ipaddress.ip_network(block) for block in REGISTRIES]
    public = sorted({str(block) for block in blocks for end in (block[0], block[-1]) if is_public(str(end))})
    return figure(f"{len(public)} of {len(blocks)} blocks count as public {public or ''}".strip(), held=not public)


ATTACKS = (
    Attack(
        "hub",
        "A hub's body and listing without an end are cut at what was announced, and end in an event.",
        "written until the disk was full; an error that was not ours left no download_failed",
        endless_download,
        sample=True,
    ),
    Attack(
        "names",
        "Names that strangers choose neither drive a terminal that shows the log nor forge lines.",
        "escape characters of a hub's file names reached the log",
        names_in_the_log,
    ),
    Attack(
        "places",
        "What stands in place of a saved prefix is refused at once, and no more than its beginning is read.",
        "restoring a pipe hung, and a file of 3 GB was read whole",
        places_of_prefixes,
        sample=True,
    ),
    Attack(
        "prefixes",
        "Damaged saved prefixes are refused, and the worker goes on with the original.",
        "held",
        damaged_prefixes,
    ),
    Attack(
        "settings",
        "Hostile configuration files and traces end commands with an error, in bounded memory and time.",
        "not measured",
        hostile_settings,
    ),
    Attack(
        "models",
        "Damaged GGUF files end in an error of their load, and a router goes on with others.",
        "held: 900 bit-flipped models without an abort",
        damaged_models,
    ),
    Attack(
        "media",
        "Bombs and damaged images are refused in bounded memory, and the worker goes on.",
        "held; 67 million pixels, the most that are decoded, take 600 MB of the worker, one image at a time",
        damaged_media,
    ),
    Attack(
        "sounds",
        "Sounds that promise hours and damaged sounds are refused in bounded memory, and the worker goes on.",
        "held but for 4 of 120: samples of 1e30 made the model's output no number, a 500",
        damaged_sounds,
    ),
    Attack(
        "full",
        "A full disk is an error of a save, leaves no half of a file, and stops no completion.",
        "held; not measured with a full log",
        no_room_on_the_disk,
    ),
    Attack(
        "readonly",
        "A folder that cannot be written is an error that names it, of a start or of a request.",
        "500 for a save: the removal of the file that was not written failed, too",
        read_only_folders,
    ),
    Attack(
        "addresses",
        "Images are fetched from no address of IANA's special-purpose registries.",
        "11 of 53 blocks counted as public, such as 192.88.99.0/24",
        special_addresses,
        sample=True,
    ),
)
