"""The workloads: their requests, with all lengths, and the targets.

A workload is data. Its requests begin when their conditions hold: a time, or the progress of other requests. Prompts are
made of segments: segments with the same seed are the same tokens, so shared prefixes are segments that requests have in common.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Figure = Literal[
    "tokens_per_s", "total_s", "ttft_p50_s", "ttft_max_s", "itl_p50_s", "itl_p99_s", "longest_gap_s", "complete", "goodput_per_s",
    "load_s", "peak_mib", "import_s", "cpu_s",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of random tokens; the seed stands for them."""

    seed: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request. `role` groups requests in the figures.

    It begins `at_s` seconds after its conditions hold: every request of `after` has had `after_events` events (None: has ended).
    With `continues` the prompt is that request's prompt and output, then the segments.
    """

    role: str
    segments: tuple[Segment, ...]
    max_tokens: int
    at_s: float = 0.0
    after: tuple[int, ...] = ()
    after_events: int | None = None
    continues: int | None = None
    leaves_after: int | None = None
    is_structured: bool = False
    adapter: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for paceline's figure: as a ratio to another server's, as a difference from it, or (`beside` None) for itself."""

    figure: Figure
    bound: float
    at_least: bool
    role: str = "all"
    beside: str | None = "llama-server"
    of_role: str | None = None  # the other figure is of this role
    is_difference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, their limits, and flags that tune llama-server for them.

    `width`: number of concurrent requests; the next begins when another ends (a closed loop). None: each begins in its own
    time. `limits`: flags of the case, for every server. `slots`: llama-server's slots in any case, as its own choice is 4.
    `tuned`: further flags of llama-server at its best.
    """

    name: str
    title: str
    requests: tuple[PlannedRequest, ...]
    tuned: tuple[str, ...]
    headline: Figure
    headline_role: str = "all"
    width: int | None = None
    limits: tuple[str, ...] = ()
    slots: int | None = None
    targets: tuple[Target, ...] = ()
    kills_engine: bool = False
    num_adapters: int = 0
    is_for_states: bool = False  # for models whose memory is a window or a state
    max_gap_s: float = 0.3  # of a request that counts as good


PACELINE = ("-np", "32", "-c", "32768", "--no-disk-cache")
"""The one configuration of paceline for every workload; a workload's own limits come behind it."""

SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {f"answer_{number}": {"enum": ["yes", "no", "perhaps"]} for number in range(8)},
    "required": [f"answer_{number}" for number in range(8)],
    "additionalProperties": False,
}


def _unique(seed: int, length: int) -> tuple[Segment, ...]:
    return (Segment(seed, length),)


def _cells(width: int, tokens_each: int) -> tuple[str, ...]:
    """Return llama-server's flags for a cache no larger than needed, with a part of its own for every slot."""
    return ("-c", str(width * tokens_each), "--no-kv-unified")


STEADY = (
    Target(figure="tokens_per_s", bound=1.0, at_least=True),
    Target(figure="tokens_per_s", bound=0.97, at_least=True, beside="llama-server@tuned"),
)


def steady(width: int) -> Workload:
    """Equal lengths, twice as many requests as streams."""
    return Workload(
        name=f"steady-{width}",
        title=f"{width} stream{'s' if width > 1 else ''}, 128 + 64 tokens each",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(1000 + number, 128), max_tokens=64)
            for number in range(2 * width)
        ),
        width=width,
        slots=width,
        tuned=_cells(width, 256),
        headline="tokens_per_s",
        targets=STEADY,
    )


def mixed(width: int) -> Workload:
    """Mixed lengths, four requests a stream."""
    draw = random.Random(12)
    shapes = [(draw.randint(64, 192), draw.randint(32, 96)) for _ in range(4 * width)]
    return Workload(
        name=f"mixed-{width}",
        title=f"{width} stream{'s' if width > 1 else ''}, 64-192 + 32-96 tokens each",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(2000 + number, prompt), max_tokens=output)
            for number, (prompt, output) in enumerate(shapes)
        ),
        width=width,
        slots=width,
        tuned=_cells(width, 512),
        headline="tokens_per_s",
        targets=STEADY,
    )


def shared_prefix(*, is_warm: bool) -> Workload:
    """Sixteen requests that share 768 tokens of 800: all at once, or after one that computed the prefix."""
    prefix = Segment(3000, 768)
    first = PlannedRequest(role="first", segments=(prefix, Segment(3001, 32)), max_tokens=16)
    burst = tuple(
        PlannedRequest(
            role="burst", segments=(prefix, Segment(3002 + number, 32)), max_tokens=32, after=(0,) if is_warm else ()
        )
        for number in range(16)
    )
    return Workload(
        name="shared-warm" if is_warm else "shared-cold",
        title=f"16 requests share 768 tokens of 800, {'already computed' if is_warm else 'all at once'}",
        requests=(first, *burst) if is_warm else burst,
        slots=16,
        tuned=("-c", "16384", "--kv-unified"),
        headline="total_s",
        headline_role="burst",
        targets=() if is_warm else (Target(figure="total_s", bound=1 / 3, at_least=False, role="burst"),),
    )


def labels(width: int) -> Workload:
    """Four hundred texts that get a label each: an instruction of 800 tokens before every text, and few tokens of output."""
    instruction = Segment(18_000, 800)
    draw = random.Random(18)
    return Workload(
        name=f"labels-{width}",
        title=f"400 texts of 16-64 tokens behind 800 shared ones, 4 of output, {width} at a time",
        requests=tuple(
            PlannedRequest(
                role="label", segments=(instruction, Segment(18_001 + number, draw.randint(16, 64))), max_tokens=4
            )
            for number in range(400)
        ),
        width=width,
        slots=width,
        tuned=("-c", str(width * 1024), "--kv-unified"),
        headline="total_s",
        targets=(Target(figure="total_s", bound=1 / 4, at_least=False, beside="llama-server@tuned"),),
    )


def forks() -> Workload:
    """Five forks of a conversation of 1,500 tokens that is still generating."""
    parent = PlannedRequest(role="conversation", segments=_unique(4000, 1500), max_tokens=96)
    children = tuple(
        PlannedRequest(
            role="fork", segments=(Segment(4000, 1500), Segment(4001 + number, 8)), max_tokens=16, after=(0,), after_events=16
        )
        for number in range(5)
    )  # fmt: skip
    return Workload(
        name="forks",
        title="5 forks of a running conversation of 1,500 tokens",
        requests=(parent, *children),
        slots=8,
        tuned=("-c", "16384", "--kv-unified"),
        headline="ttft_p50_s",
        headline_role="fork",
        targets=(Target(figure="ttft_p50_s", bound=1 / 50, at_least=False, role="fork"),),
    )


def long_among_streams() -> Workload:
    """Compute a prompt of 2,048 tokens alone, then another one while seven streams decode."""
    alone = PlannedRequest(role="alone", segments=_unique(5000, 2048), max_tokens=8)
    streams = tuple(
        PlannedRequest(role="stream", segments=_unique(5001 + number, 64), max_tokens=160, after=(0,))
        for number in range(7)
    )
    late = PlannedRequest(
        role="long", segments=_unique(5100, 2048), max_tokens=8, after=tuple(range(1, 8)), after_events=16
    )
    return Workload(
        name="long-among",
        title="a prompt of 2,048 tokens among 7 streams",
        requests=(alone, *streams, late),
        slots=8,
        tuned=(*_cells(8, 2560), "-b", "256", "-ub", "256"),
        headline="longest_gap_s",
        headline_role="stream",
        targets=(
            Target(figure="longest_gap_s", bound=0.1, at_least=False, role="stream"),
            Target(figure="ttft_p50_s", bound=1.4, at_least=False, role="long", beside=None, of_role="alone"),
        ),
    )


def short_behind_long() -> Workload:
    """Four prompts of 32 tokens, 0.1 s after a prompt of 2,048."""
    late = PlannedRequest(role="long", segments=_unique(6000, 2048), max_tokens=8)
    short = tuple(
        PlannedRequest(role="short", segments=_unique(6001 + number, 32), max_tokens=16, at_s=0.1)
        for number in range(4)
    )
    return Workload(
        name="short-behind",
        title="4 short prompts behind one of 2,048 tokens",
        requests=(late, *short),
        slots=8,
        tuned=(*_cells(8, 2560), "-b", "256", "-ub", "256"),
        headline="ttft_p50_s",
        headline_role="short",
    )


def _turns(
    count: int,
    num_turns: int,
    *,
    seed: int,
    lengths: tuple[int, int],
    max_tokens: int,
    common: tuple[Segment, ...] = (),
) -> tuple[PlannedRequest, ...]:
    """Return conversations, each of which sends its history again; `lengths`: new tokens of the first and of later turns."""
    first, later = lengths
    requests: list[PlannedRequest] = []
    for turn in range(num_turns):
        for number in range(count):
            own, earlier = seed + 100 * turn + number, (turn - 1) * count + number
            requests.append(
                PlannedRequest(
                    role=f"turn {turn + 1}",
                    segments=_unique(own, later) if turn else (*common, Segment(own, first)),
                    max_tokens=max_tokens,
                    after=(earlier,) if turn else (),
                    continues=earlier if turn else None,
                )
            )
    return tuple(requests)


def conversations() -> Workload:
    """Sixteen conversations of three turns on eight slots: each sends its history again."""
    return Workload(
        name="conversations",
        title="16 conversations of 3 turns, 8 slots",
        requests=_turns(16, 3, seed=7000, lengths=(192, 32), max_tokens=32),
        width=8,
        limits=("-np", "8", "-c", "8192"),
        tuned=("--kv-unified",),
        headline="tokens_per_s",
        targets=(Target(figure="tokens_per_s", bound=1.2, at_least=True),),
    )


def little_kv() -> Workload:
    """Eight streams of 320 tokens in 1,280 cells."""
    return Workload(
        name="little-kv",
        title="8 streams of 256 + 64 tokens in 1,280 cells",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(8000 + number, 256), max_tokens=64) for number in range(8)
        ),
        limits=("-np", "8", "-c", "1280"),
        tuned=("--kv-unified",),
        headline="complete",
        targets=(Target(figure="complete", bound=8, at_least=True, beside=None),),
    )


def hang_ups() -> Workload:
    """Of 24 requests every second leaves after eight tokens of 128."""
    return Workload(
        name="hang-ups",
        title="24 requests of 64 + 128 tokens on 8 streams, every second leaves after 8 tokens",
        requests=tuple(
            PlannedRequest(
                role="leaves" if number % 2 else "stays",
                segments=_unique(9000 + number, 64),
                max_tokens=128 if number % 2 else 48,
                leaves_after=8 if number % 2 else None,
            )
            for number in range(24)
        ),
        width=8,
        slots=8,
        tuned=_cells(8, 256),
        headline="total_s",
    )


def overload() -> Workload:
    """Eighty requests at once on eight slots."""
    return Workload(
        name="overload",
        title="80 requests of 64 + 16 tokens at once on 8 slots",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(10_000 + number, 64), max_tokens=16) for number in range(80)
        ),
        limits=("-np", "8", "-c", "8192"),
        tuned=("--no-kv-unified",),
        headline="tokens_per_s",
        targets=(Target(figure="complete", bound=80, at_least=True, beside=None),),
    )


def adapters() -> Workload:
    """Eight streams with two LoRA adapters in turn."""
    return Workload(
        name="two-loras",
        title="16 requests of 64 + 48 tokens on 8 streams, two LoRA adapters in turn",
        requests=tuple(
            PlannedRequest(
                role=f"adapter {number % 2}", segments=_unique(11_000 + number, 64), max_tokens=48, adapter=number % 2
            )
            for number in range(16)
        ),
        width=8,
        num_adapters=2,
        slots=8,
        tuned=_cells(8, 256),
        headline="tokens_per_s",
    )


def structured() -> Workload:
    """Eight streams, every fourth bound to a JSON schema."""
    return Workload(
        name="json-schema",
        title="16 requests of 128 + 64 tokens on 8 streams, every fourth by a JSON schema",
        requests=tuple(
            PlannedRequest(
                role="stream" if number % 4 else "structured",
                segments=_unique(12_000 + number, 128),
                max_tokens=64 if number % 4 else 96,
                is_structured=number % 4 == 0,
            )
            for number in range(16)
        ),
        width=8,
        slots=8,
        tuned=_cells(8, 256),
        headline="tokens_per_s",
    )


def engine_death() -> Workload:
    """Kill the process that computes while eight streams run."""
    return Workload(
        name="engine-death",
        title="the engine's process is killed while 8 streams run",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(13_000 + number, 64), max_tokens=48) for number in range(8)
        ),
        slots=8,
        tuned=_cells(8, 256),
        headline="complete",
        kills_engine=True,
        targets=(Target(figure="complete", bound=8, at_least=True, beside=None),),
    )


def startup() -> Workload:
    """Nothing but one short request: load time and memory."""
    return Workload(
        name="startup",
        title="load time and peak memory, with one short request",
        requests=(PlannedRequest(role="stream", segments=_unique(14_000, 16), max_tokens=8),),
        slots=8,
        tuned=_cells(8, 4096),
        headline="load_s",
        targets=(
            Target(figure="load_s", bound=1.0, at_least=False, is_difference=True),
            Target(figure="peak_mib", bound=150, at_least=False, is_difference=True),
            Target(figure="load_s", bound=1.0, at_least=False, is_difference=True, beside="llama-server@tuned"),
            Target(figure="peak_mib", bound=150, at_least=False, is_difference=True, beside="llama-server@tuned"),
            Target(figure="import_s", bound=0.12, at_least=False, beside=None),
        ),
    )


def arrivals(per_s: float) -> Workload:
    """Forty requests as a Poisson process, a fifth of them with prompts of 768 tokens; the clients do not wait for each other."""
    draw = random.Random(15)
    at_s, requests = 0.0, []
    for number in range(40):
        at_s += draw.expovariate(per_s)
        is_long = draw.random() < 0.2
        requests.append(
            PlannedRequest(
                role="long" if is_long else "short",
                segments=_unique(15_000 + number, 768 if is_long else draw.randint(32, 128)),
                max_tokens=draw.randint(24, 64),
                at_s=at_s,
            )
        )
    return Workload(
        name=f"arrivals-{per_s:g}",
        title=f"40 requests, {per_s:g} a second, a fifth with prompts of 768 tokens",
        requests=tuple(requests),
        slots=16,
        tuned=(*_cells(16, 1024), "-b", "256", "-ub", "256"),
        headline="goodput_per_s",
        targets=(Target(figure="goodput_per_s", bound=2.0, at_least=True),),
    )


WINDOW_FLAGS = ("--kv-unified", "--swa-full")
"""llama-server at its best where requests share prefixes: one cache, and windows that keep everything."""


def shared_states() -> Workload:
    """Twenty-four requests, eight at a time, that share 1,024 tokens of 1,056."""
    prefix = Segment(16_000, 1024)
    return Workload(
        name="states-shared",
        title="24 requests share 1,024 tokens of 1,056, 8 at a time",
        requests=tuple(
            PlannedRequest(role="stream", segments=(prefix, Segment(16_001 + number, 32)), max_tokens=32)
            for number in range(24)
        ),
        width=8,
        slots=8,
        tuned=("-c", "16384", *WINDOW_FLAGS),
        headline="total_s",
        targets=(Target(figure="total_s", bound=1 / 2.5, at_least=False),),
        is_for_states=True,
    )


def forked_states() -> Workload:
    """Compute 3,008 tokens alone, then four forks of a conversation of 3,000 tokens that is still generating."""
    alone = PlannedRequest(role="alone", segments=_unique(17_000, 3008), max_tokens=4)
    parent = PlannedRequest(role="conversation", segments=_unique(17_001, 3000), max_tokens=64, after=(0,))
    children = tuple(
        PlannedRequest(
            role="fork", segments=(Segment(17_001, 3000), Segment(17_002 + number, 8)), max_tokens=8, after=(1,), after_events=8
        )
        for number in range(4)
    )  # fmt: skip
    return Workload(
        name="states-forks",
        title="4 forks of a running conversation of 3,000 tokens",
        requests=(alone, parent, *children),
        slots=8,
        tuned=("-c", "32768", *WINDOW_FLAGS),
        headline="ttft_p50_s",
        headline_role="fork",
        targets=(
            Target(figure="ttft_p50_s", bound=1 / 20, at_least=False, role="fork"),
            Target(figure="ttft_p50_s", bound=0.02, at_least=False, role="fork", beside=None, of_role="alone"),
        ),
        is_for_states=True,
    )


def state_conversations() -> Workload:
    """Twelve conversations of four turns on four slots, with a common beginning of 200 tokens."""
    return Workload(
        name="states-turns",
        title="12 conversations of 4 turns, 4 slots",
        requests=_turns(12, 4, seed=18_001, lengths=(40, 24), max_tokens=24, common=(Segment(18_000, 200),)),
        width=4,
        limits=("-np", "4", "-c", "8192"),
        tuned=WINDOW_FLAGS,
        headline="total_s",
        targets=(Target(figure="total_s", bound=1 / 1.2, at_least=False),),
        is_for_states=True,
    )


def steady_states() -> Workload:
    """Eight streams that share nothing."""
    return Workload(
        name="states-steady",
        title="8 streams, 64 + 48 tokens each, nothing in common",
        requests=tuple(
            PlannedRequest(role="stream", segments=_unique(19_000 + number, 64), max_tokens=48) for number in range(16)
        ),
        width=8,
        slots=8,
        tuned=_cells(8, 256),
        headline="tokens_per_s",
        targets=STEADY,
        is_for_states=True,
    )


_ALL: Sequence[Workload] = (
    *(steady(width) for width in (1, 2, 4, 8, 16, 32)),
    *(mixed(width) for width in (1, 8, 16, 32)),
    shared_prefix(is_warm=False),
    shared_prefix(is_warm=True),
    *(labels(width) for width in (4, 8, 16, 32)),
    forks(),
    long_among_streams(),
    short_behind_long(),
    conversations(),
    little_kv(),
    hang_ups(),
    overload(),
    adapters(),
    structured(),
    engine_death(),
    arrivals(0.5),
    arrivals(1),
    arrivals(8),
    startup(),
    shared_states(),
    forked_states(),
    state_conversations(),
    steady_states(),
)

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
