"""Prefixes that survive a restart: the disk cache beside llama-server's slot files, and the cost of both directions.

python -m benchmarks.disk_cache --model FILE [--part session|restart|write] [--tokens 16000] [--turns 10] [--rounds 3]
                                [--servers NAMES] [--llama-server FILE] [--folder FOLDER]

session  an agent's session: a prompt of --tokens tokens, then turns that add --added tokens to it and to the reply of
         --output tokens. The server is started anew for each turn. Servers take their turns in alternation:
             paceline            with the disk cache
             paceline@none       without one
             llama-server        its slot is saved to a file after each turn and restored before the next
             llama-server@none   without slot files
restart  first token of a prompt of --tokens tokens: computed, and by the next engine, with no file of the disk cache in the
         page cache. Read speed beside plain reads of the same files, also in no page cache; bytes of a token on the disk.
write    tokens/s of 8 streams with prompts of their own, with the disk cache and without, in alternation.

The file of the model is in the page cache throughout. --folder: on the disk that is measured; by default a temporary folder.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mean_ratio import MeanRatio
from benchmarks.peers import builds
from benchmarks.peers.client import Call, LlamaServerDialect, Reply, stream
from benchmarks.peers.driver import PromptMaker
from benchmarks.peers.servers import Launch, Running, serving
from benchmarks.peers.workloads import Segment
from paceline import LLM, Model

SERVERS = ("paceline", "paceline@none", "llama-server", "llama-server@none")
SPARE_TOKENS = 256  # of the context, for the chunk at its end
PLAIN_BYTES = 1 << 20  # of one plain read
NUM_STREAMS = 8
STREAM_TOKENS = 128
SLOT_FILE = "slot.bin"


# ---- a session


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of a turn. load: until the server is ready; restore, save: of slot files; stop: until its processes have ended."""

    load_s: float
    restore_s: float
    first_token_s: float
    reply_s: float
    save_s: float
    stop_s: float

    @property
    def total_s(self) -> float:
        """From the start of the server to its end."""
        return self.load_s + self.restore_s + self.reply_s + self.save_s + self.stop_s


@dataclass(slots=True)
class Session:
    """The session of one server. ids: the tokens so far."""

    name: str
    launch: Launch
    folder: Path
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def take_turn(self, added: Sequence[int], num_output: int) -> None:
        """Start the server, send the tokens so far with the added ones, and end the server."""
        has_slots, slot = self.name == "llama-server", self.folder / SLOT_FILE
        self.ids += added
        with serving(self.launch, self.folder / f"turn-{len(self.turns)}.log") as running:
            restore_s = _timed(lambda: act(running, "restore")) if has_slots and slot.is_file() else 0.0
            reply = asyncio.run(completed(running, self.ids, num_output))
            self.ids += reply.token_ids
            save_s = _timed(lambda: act(running, "save")) if has_slots else 0.0
            end_s = time.perf_counter()
        self.turns.append(
            Turn(
                load_s=running.load_s,
                restore_s=restore_s,
                first_token_s=reply.times_s[0] - reply.start_s,
                reply_s=reply.end_s - reply.start_s,
                save_s=save_s,
                stop_s=time.perf_counter() - end_s,
            )
        )

    @property
    def num_file_bytes(self) -> int:
        """The bytes in its files, logs aside."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".log"]
        return sum(path.stat().st_size for path in files)


def act(running: Running, action: str) -> None:
    """Save or restore the slot of llama-server."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.port}/slots/0?action={action}",
        data=json.dumps({"filename": SLOT_FILE}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        response.read()


async def completed(running: Running, ids: list[int], num_output: int) -> Reply:
    """Return the reply to a prompt. Fails if it is not complete."""
    call = Call(token_ids=ids, text="", max_tokens=num_output)
    reply = await stream(running.port, LlamaServerDialect(), call, on_events=lambda _: None)
    if reply.status != "complete" or reply.num_prompt != len(ids):
        raise SystemExit(f"{reply.num_prompt} of {len(ids)} tokens of a prompt: {reply.status} {reply.problem}")
    return reply


def session(options: argparse.Namespace, prompts: PromptMaker, folder: Path) -> None:
    """Print the seconds of each turn, and their sums."""
    n_ctx = options.tokens + options.turns * (options.added + options.output) + SPARE_TOKENS
    sessions = []
    for name in options.servers.split(","):
        own = folder / name
        own.mkdir()
        sessions.append(Session(name, launch(name, options, own, n_ctx), own))
    for number in range(options.turns):
        length = options.added if number else options.tokens
        added = prompts.token_ids((Segment(1 + number, length),))
        for each in sessions if number % 2 else reversed(sessions):
            each.take_turn(added, options.output)
            print(f"{each.name} turn {number}: {_shown(each.turns[-1])}", flush=True)
    for each in sessions:
        later = each.turns[1:] or each.turns
        print(
            f"session of {len(each.turns)} turns, {each.name}: {sum(turn.total_s for turn in each.turns):.1f} s in all, "
            f"{sum(turn.total_s for turn in later):.1f} s after the first turn; first token after a restart "
            f"{statistics.median(turn.restore_s + turn.first_token_s for turn in later):.2f} s (median, with restoring), "
            f"most {max(turn.restore_s + turn.first_token_s for turn in later):.2f} s; {each.num_file_bytes / 1e6:.0f} MB "
            f"of files for {len(each.ids)} tokens"
        )


def _shown(turn: Turn) -> str:
    return (
        f"load {turn.load_s:.2f}, restore {turn.restore_s:.2f}, first token {turn.first_token_s:.2f}, "
        f"reply {turn.reply_s:.2f}, save {turn.save_s:.2f}, stop {turn.stop_s:.2f}, in all {turn.total_s:.2f} s"
    )


def launch(name: str, options: argparse.Namespace, folder: Path, n_ctx: int) -> Launch:
    """Return the command of a server with one slot. Other settings are its defaults, but for the threads."""
    model = ("-m", str(options.model), "-c", str(n_ctx), "-np", "1", "-t", str(options.threads))
    match name:
        case "paceline":
            flags: tuple[str, ...] = ("--disk-cache", str(folder / "kv"))
        case "paceline@none":
            flags = ("--no-disk-cache",)
        case "llama-server":
            flags = ("--slot-save-path", f"{folder}/")
        case "llama-server@none":
            flags = ()
        case _:
            raise SystemExit(f"{name!r} is no server: choose from {', '.join(SERVERS)}")
    if name.startswith("paceline"):
        command = (sys.executable, "-m", "paceline", "serve", *model, *flags)
    else:
        command = (str(llama_server(options)), *model, *flags)
    return Launch(command=command, dialect=LlamaServerDialect())


def llama_server(options: argparse.Namespace) -> Path:
    """Return the path of llama-server: given, or as `benchmarks.peers` has built it."""
    found: Path | None = options.llama_server
    found = found or builds.find_llama_server(builds.build_info(Path(sys.executable)), builds.Variant())
    if found is None:
        raise SystemExit("llama-server is not there: python -m benchmarks.peers build llama-server, or give its path")
    return found


# ---- a restart


def restart(options: argparse.Namespace, prompts: PromptMaker, folder: Path) -> None:
    """Print the first token of a prompt before and after a restart, and the speed of reading."""
    model, ratios, speeds = Model.load(options.model), list[float](), list[float]()
    for number in range(options.rounds):
        ids, kv = prompts.token_ids((Segment(1, options.tokens),), number), folder / f"kv-{number}"
        settings: dict[str, Any] = {
            "disk_cache": kv,
            "disk_cache_bytes": 1 << 40,
            "n_ctx": options.tokens + SPARE_TOKENS,
            "num_slots": 1,
            "n_threads": options.threads,
        }
        warm_up = prompts.token_ids((Segment(0, 24),))
        with LLM(model, **settings) as llm:
            computed_s, text = first_token(llm, warm_up, ids)
            begin_s = time.perf_counter()
        written_s = time.perf_counter() - begin_s
        files = [path for path in kv.rglob("*") if path.suffix in (".cells", ".state")]
        num_bytes = sum(path.stat().st_size for path in files)
        plain_s = 0.0 if number % 2 else plain_read_s(files)
        leave_page_cache(files)
        with LLM(model, **settings) as llm:
            after_s, again = first_token(llm, warm_up, ids)
            number_of = llm.stats().number
        if not number_of("paceline_prefix_hits_total", "disk"):
            raise SystemExit("the prefix was computed, as reading took longer: give a larger model, or a quiet machine")
        num_read = number_of("paceline_disk_cache_block_bytes_total", "read")
        speed = num_read / number_of("paceline_disk_cache_read_seconds_total")
        plain_speed = num_bytes / (plain_s or plain_read_s(files))
        ratios.append(after_s / computed_s)
        speeds.append(speed / plain_speed)
        print(
            f"first token of {len(ids)} tokens: computed {computed_s:.2f} s, after a restart {after_s:.3f} s, "
            f"the text is {'the same' if again == text else 'another'}; {num_bytes / len(ids):,.0f} bytes a token in "
            f"{len(files)} files, written in {written_s:.2f} s at the end; "
            f"read at {speed / 1e9:.2f} GB/s, plainly at {plain_speed / 1e9:.2f} GB/s",
            flush=True,
        )
    print(f"first token after a restart, of computing it: {_mean(ratios)}; read speed, of plain reads: {_mean(speeds)}")


def first_token(llm: LLM, warm_up: list[int], ids: list[int]) -> tuple[float, str]:
    """Return the seconds to the first token of a prompt, and the text of 16 tokens. The prompt warm_up is sent before."""
    llm.generate(warm_up, max_tokens=4, ignore_eos=True)
    begin_s, first_s, text = time.perf_counter(), 0.0, ""
    for chunk in llm.stream(ids, max_tokens=16, temperature=0, ignore_eos=True):
        first_s = first_s or time.perf_counter() - begin_s
        text += chunk.text
    return first_s, text


def leave_page_cache(paths: Sequence[Path]) -> None:
    """Have the system forget the contents of files that are on the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read_s(paths: Sequence[Path]) -> float:
    """Return the seconds of reading whole files from the disk, one after another."""
    leave_page_cache(paths)
    begin_s, buffer = time.perf_counter(), bytearray(PLAIN_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin_s


# ---- writing


def write(options: argparse.Namespace, prompts: PromptMaker, folder: Path) -> None:
    """Print the tokens/s of streams with the disk cache, and without, and the mean of their ratios."""
    model, ratios = Model.load(options.model), list[float]()
    for number in range(options.rounds):
        kinds = {"with": folder / f"write-{number}", "without": None}
        speeds = {}
        for name in kinds if number % 2 else reversed(kinds):
            with LLM(
                model,
                num_slots=NUM_STREAMS,
                n_ctx=options.stream_tokens + STREAM_TOKENS + SPARE_TOKENS,
                n_threads=options.threads,
                disk_cache=kinds[name],
            ) as llm:
                speeds[name] = tokens_per_s(llm, prompts, options)
                num_written = llm.stats().number("paceline_disk_cache_tokens_total", "written")
            print(
                f"{name} the disk cache: {speeds[name]:.1f} tokens/s; {num_written:.0f} tokens were written", flush=True
            )
        ratios.append(speeds["with"] / speeds["without"])
    print(f"tokens/s of {NUM_STREAMS} streams with the disk cache, of those without: {_mean(ratios)}")


def tokens_per_s(llm: LLM, prompts: PromptMaker, options: argparse.Namespace) -> float:
    """Return the generated tokens a second of 8 streams at once, for waves of other prompts, so that each wave is written."""
    llm.generate(prompts.token_ids((Segment(0, 24),)), max_tokens=4, ignore_eos=True)
    begin_s = time.perf_counter()
    for wave in range(options.waves):
        batch = [
            prompts.token_ids((Segment(1 + number, options.stream_tokens),), wave) for number in range(NUM_STREAMS)
        ]
        llm.generate(batch, max_tokens=STREAM_TOKENS, ignore_eos=True)
    took_s = time.perf_counter() - begin_s
    return float(options.waves * NUM_STREAMS * STREAM_TOKENS / took_s)


def _timed(function: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    function()
    return time.perf_counter() - begin_s


def _mean(ratios: Sequence[float]) -> str:
    found = MeanRatio.of(ratios)
    return f"{found.mean:.4f} +- {found.error:.4f} (median {statistics.median(ratios):.4f}, {len(ratios)} times)"


PARTS: dict[str, Callable[[argparse.Namespace, PromptMaker, Path], None]] = {
    "session": session,
    "restart": restart,
    "write": write,
}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append", help="by default all, in turn")
    parser.add_argument("--tokens", type=int, default=16_000, help="of the first prompt")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--added", type=int, default=400, help="tokens of each later turn")
    parser.add_argument("--output", type=int, default=100, help="tokens of each reply")
    parser.add_argument("--rounds", type=int, default=3, help="of restart and write")
    parser.add_argument("--stream-tokens", type=int, default=512, help="of the prompts of write")
    parser.add_argument("--waves", type=int, default=2, help="of 8 streams, in write")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--servers", default=",".join(SERVERS), help="of session")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--folder", type=Path, help="for all files; a folder in it is made and deleted")
    options = parser.parse_args()
    prompts = PromptMaker(options.model)
    for part in options.part or PARTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            PARTS[part](options, prompts, Path(folder))


if __name__ == "__main__":
    main()
