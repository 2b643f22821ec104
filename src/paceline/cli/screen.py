"""Pictures of an engine in the terminal: slots, last ticks, shared prefixes, memory, latencies, and streams of the demo."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli import terminal

_MOST_COLUMNS: Final = 1024

Members = Mapping[str, Any]


@dataclass(slots=True)
class TopState:
    """The members of the latest snapshot with all updates since. columns: the last ticks; is_over: the stream has ended."""

    members: dict[str, Any] = field(default_factory=dict)
    columns: deque[Members] = field(default_factory=lambda: deque(maxlen=_MOST_COLUMNS))
    is_over: bool = False

    def take(self, name: str, members: Members) -> None:
        """Take in an event."""
        if name == "end":
            self.is_over = True
            return
        if name == "snapshot":
            self.members = {}
            self.columns.clear()
        rest = dict(members)
        self.columns.extend(rest.pop("ticks", ()))
        rest.pop("marks", None)
        self.members |= rest

    def get(self, name: str) -> Any:
        """Return a member that is an object; an empty one before it came."""
        found = self.members.get(name)
        return {} if found is None else found


_STATES: Final = {"prefilling": "cyan", "decoding": "green", "paused": "yellow"}
_ALIVE: Final = {"idle": "green", "ticking": "green", "starting": "yellow", "sleeping": "blue"}
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_TICK_ROWS: Final = 4
_LOW: Final = 30  # lines of a terminal, below which ticks take half as many
_LEGEND: Final = ("cyan: with prefill", "green: decode", "red: over the target", "magenta: embedding")
_KEYS: Final = "q quits · ? shows or hides the keys · Ctrl-C quits"
_NARROW: Final = 90
_MOST_SHARED: Final = 5


@dataclass(frozen=True, slots=True)
class TopPicture:
    """The screen.

    Attributes:
        source: The URL, or a name for an engine of this process.
        status: A sentence if there is nothing to show, or the state is old.
        shows_keys: Whether the last line names the keys.
    """

    state: TopState
    source: str
    status: str = ""
    shows_keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.size.height
        parts: list[Text | Table] = [*self._title(width)]
        if self.status:
            parts.append(_line(self.status, "yellow", width))
        keys = [_line(_KEYS, "dim", width)] if self.shows_keys else []
        if self.state.members:
            ticks = [*_ticks(self.state, width, _TICK_ROWS if height >= _LOW else _TICK_ROWS // 2)]
            below = [*ticks, Text(""), *self._numbers(width)]
            # Beside these: two blank lines, the heads of slots and tree, and a line that counts what is left out.
            room = max(1, height - len(parts) - len(below) - len(keys) - 6)
            num_slots = min(room, max(1, len(self.state.members["slots"])))
            shared = [*self._shared(width, room - num_slots)]
            parts += [Text(""), *self._slots(width, room), Text(""), *below, *shared]
        yield Group(*parts, *keys)

    def _title(self, width: int) -> Iterator[Text]:
        engine, rates = self.state.get("engine"), self.state.get("rates")
        title = Text("paceline top ", "bold", no_wrap=True)
        title.append(terminal.printable(f"{self.state.members.get('model', '')} · {self.source}"))
        pace = Text(no_wrap=True)
        if engine:
            state = str(engine["state"])
            pace.append(state, _ALIVE.get(state, "red"))
            if engine["num_restarts"]:
                pace.append(f" · {engine['num_restarts']} restarts", "yellow")
            pace.append(f" · {rates['generated_per_s']:,.0f} tok/s", "bold")
            pace.append(f" · prefill {rates['prefill_per_s']:,.0f} tok/s · {rates['ticks_per_s']:,.0f} ticks/s")
        lines = [title, pace] if title.cell_len + 3 + pace.cell_len > width else [Text(" · ").join([title, pace])]
        for line in filter(None, lines):
            line.truncate(width, overflow="ellipsis")
            yield line

    def _slots(self, width: int, room: int) -> Iterator[Text | Table]:
        slots: Sequence[Members] = self.state.members["slots"]
        others, queue = self.state.get("others"), self.state.get("queue")
        num_busy = len(slots) + others.get("slots", 0)
        counted = f"slots {num_busy}/{self.state.get('config')['num_slots']}"
        waiting = f" · {queue['waiting']} waiting" if queue.get("waiting") else ""
        embeds = f" · {queue['embeddings']} embedding" if queue.get("embeddings") else ""
        rest = f" · {others['slots']} of other tenants, {others['tokens_per_s']:,.0f} tok/s" if others else ""
        yield _line(f"{counted}{waiting}{embeds}{rest}", "bold", width)
        if slots:
            yield _slot_table(slots[:room], width)
        if len(slots) > room:
            yield _line(f"  and {len(slots) - room} more", "dim", width)

    def _numbers(self, width: int) -> Iterator[Text]:
        memory, config = self.state.get("memory"), self.state.get("config")
        if memory:
            yield from _parts("memory", _memory_words(memory, config), width)
        for name, title in (("ttft_s", "first token"), ("itl_s", "next token")):
            found = self.state.get("histograms").get(name)
            if found:
                shown = " · ".join(f"{q} {terminal.duration(found[q])}" for q in ("p50", "p95", "p99"))
                yield _line(f"{title:<12}{shown}", "", width)
        counts = self.state.get("counts")
        if counts:
            yield from _parts("since start", _count_words(counts), width)

    def _shared(self, width: int, room: int) -> Iterator[Text]:
        tree = self.state.get("tree")
        if not tree:
            return
        more = "" if tree["is_complete"] else ", and more"
        yield _line(f"radix tree  {tree['num_nodes']:,} nodes, {tree['num_tokens']:,} tokens{more}", "", width)
        shared = [node for node in tree["nodes"] if len(node["running"]) + node["cached"] > 1]
        shared.sort(
            key=lambda node: (node["end"] - node["start"]) * (len(node["running"]) + node["cached"]), reverse=True
        )
        for node in shared[: min(room, _MOST_SHARED)]:
            running = " ".join(f"#{key}" for key, _ in node["running"])
            cached = f"{node['cached']} cached" if node["cached"] else ""
            where = f"tokens {node['start']} to {node['end']}"
            yield _line(f"  {where:<24}{' '.join(filter(None, (running, cached)))}", "dim", width)


_STREAM_STYLES: Final = {
    "prefill": "cyan", "decode": "green", "stop": "dim green", "length": "dim green", "paused": "yellow", "unread": "yellow",
    "cancelled": "red", "refused": "red", "error": "red",
}  # fmt: skip
_DEMO_ROWS: Final = 14  # lines of everything but the streams
_LABEL, _STATE, _BAR, _COUNT = 5, 9, 18, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLine:
    """A stream of the demo. label: request and choice; state: in a word; max_tokens: None without a limit."""

    label: str
    state: str
    num_tokens: int
    max_tokens: int | None
    text: str
    is_live: bool


@dataclass(frozen=True, slots=True)
class DemoPicture:
    """The picture of `paceline demo`: its streams, and below them the engine. hint: what keys do; empty if nothing runs."""

    state: TopState
    title: str
    lines: Sequence[StreamLine]
    hint: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, room = options.max_width, max(1, options.size.height - _DEMO_ROWS)
        shown, hidden = self.lines[:room], len(self.lines) - room
        parts: list[Text | Table] = [_line(f" {self.title}", "bold", width), Text(""), _streams(shown, width)]
        parts += [_line(f"   and {hidden} more", "dim", width)] if hidden > 0 else []
        if self.state.members:
            parts += [Text(""), *_ticks(self.state, width)]
        requests = {line.label.partition(".")[0] for line in self.lines}
        live = {line.label.partition(".")[0] for line in self.lines if line.is_live}
        rates, queue = self.state.get("rates"), self.state.get("queue")
        words = [f" {len(requests) - len(live)}/{len(requests)} ended"]
        if live and rates:
            words += [f"queue {queue.get('waiting', 0)}", f"{rates['generated_per_s']:,.0f} tok/s"]
            counts, memory = self.state.get("counts"), self.state.get("memory")
            words += [f"{memory['cells']:,} cells"] if memory else []
            drafts = counts.get("draft_tokens")
            words += [f"drafts {drafts}, accepted {counts['accepted_tokens'] / drafts:.0%}"] if drafts else []
        parts += [Text(""), _line(" · ".join(words), "", width)]
        yield Group(*parts, *([_line(self.hint, "dim", width)] if self.hint else []))


def _streams(lines: Sequence[StreamLine], width: int) -> Table:
    bar, count = (8, 4) if width < _NARROW else (_BAR, _COUNT)
    text = max(4, width - (_LABEL + _STATE + bar + count + 9))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for cells in (_LABEL, _STATE, bar, count, text):
        table.add_column(width=cells, no_wrap=True, overflow="crop")
    for line in lines:
        style, faded = _STREAM_STYLES.get(line.state, "dim"), "" if line.is_live else "dim"
        both = f"{line.num_tokens}/{line.max_tokens}"
        counted = str(line.num_tokens) if line.max_tokens is None or len(both) > count else both
        progress: ProgressBar | Text = Text("")
        if line.max_tokens is not None:
            total, done = max(1, line.max_tokens), line.num_tokens
            progress = ProgressBar(total=total, completed=done, width=bar, complete_style=style, finished_style=style)
        found = (Text(f" {line.label}", faded), Text(line.state, style), progress, Text(f"{counted:>{count}}", faded))
        table.add_row(*found, Text(tail(line.text, text), faded))
    return table


def tail(text: str, width: int) -> str:
    """Return the last words of a text that fit into so many columns, on one line; "…" stands for the rest."""
    words = terminal.printable(" ".join(text.split())).replace("\t", " ")
    if cell_len(words) <= width:
        return words
    kept: list[str] = []
    room = width - 2
    for word in reversed(words.split(" ")):
        room -= cell_len(word) + 1
        if room < -1:
            break
        kept.append(word)
    if kept:
        return "… " + " ".join(reversed(kept))
    while cell_len(words) > width - 1:
        words = words[1:]
    return "…" + words if width else ""


def _slot_table(slots: Sequence[Members], width: int) -> Table:
    is_wide = width >= _NARROW
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", justify="right", no_wrap=True)
    for name in ("request", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=24)
    for name in ("prompt", "cached", "tokens", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("", width=18)
        table.add_column("", no_wrap=True)
    for slot in slots:
        table.add_row(*_slot_row(slot, is_wide=is_wide))
    return table


def _slot_row(slot: Members, *, is_wide: bool) -> list[Text | ProgressBar]:
    style = _STATES.get(slot["state"], "")
    choice = f".{slot['choice']}" if slot["choice"] else ""
    name = terminal.printable(slot["request_id"] or "")
    rate = "" if slot["tokens_per_s"] is None else f"{slot['tokens_per_s']:,.1f}"
    row: list[Text | ProgressBar] = [
        Text(f"{slot['id']}"),
        Text(f"#{slot['key']}{choice} {name}".rstrip()),
        Text(slot["state"], style),
        Text(f"{slot['prompt_tokens']:,}"),
        Text(f"{slot['cached_tokens']:,}", "" if slot["cached_tokens"] else "dim"),
        Text(f"{slot['generated_tokens']:,}"),
        Text(rate, "bold"),
    ]
    if is_wide:
        preempted = f"preempted {slot['num_preempted']} times" if slot["num_preempted"] else ""
        row += [_progress(slot, style), Text(preempted, "magenta")]
    return row


def _progress(slot: Members, style: str) -> ProgressBar | Text:
    """Return how far a slot is: through its prompt, or to its limit of tokens, if it has one."""
    done, total = slot["generated_tokens"], slot["max_tokens"]
    if slot["state"] == "prefilling":
        done, total = slot["computed_tokens"], slot["prompt_tokens"] + slot["generated_tokens"]
    if total is None:
        return Text("")
    return ProgressBar(
        total=max(1, total), completed=min(done, total), width=18, complete_style=style, finished_style=style
    )


def _ticks(state: TopState, width: int, num_rows: int = _TICK_ROWS) -> Iterator[Text]:
    """Yield the last ticks as columns, the newest at the right: their height is time, up to the target or the longest one."""
    columns = list(state.columns)[-max(1, width - 10) :]
    target_ms = float(state.get("config").get("itl_target_ms") or 0)
    longest_ms = max((_longest_ms(column) for column in columns), default=0.0)
    if not columns:
        yield _line("ticks       none yet", "dim", width)
        return
    is_long = longest_ms > target_ms
    top_ms = longest_ms if is_long or longest_ms > target_ms / 4 else max(longest_ms, 1e-3)
    over = " (over it)" if is_long and target_ms else ""
    head = f"longest {longest_ms:,.1f} ms, target {target_ms:,.0f} ms{over}"
    yield from _parts("ticks", [head, *_LEGEND], width, "bold")
    for row in range(num_rows, 0, -1):
        line = Text(f"{top_ms * row / num_rows:7.1f} │", "dim", no_wrap=True)
        for column in columns:
            filled = _longest_ms(column) / top_ms * num_rows - (row - 1)  # the column's part in this row
            block = _BLOCKS[round(min(max(filled, 0.0), 1.0) * (len(_BLOCKS) - 1))]
            line.append(block, _column_style(column, target_ms))
        yield line


def _longest_ms(column: Members) -> float:
    return float(column.get("longest_ms", column["ms"]))


def _column_style(column: Members, target_ms: float) -> str:
    if target_ms and _longest_ms(column) > target_ms:
        return "red"
    if "embed" in column:
        return "magenta"
    num_prefill = sum(row[3] for row in column["rows"]) + column.get("others", [0, 0])[1]
    return "cyan" if num_prefill else "green"


def _memory_words(memory: Members, config: Members) -> list[str]:
    most = config.get("num_cells")
    cells = f"{memory['cells']:,}" + (f" of {most:,}" if most is not None else "")
    parts = [f"cells {cells} ({memory['running_cells']:,} running, {memory['cached_cells']:,} cached)"]
    if config.get("host_bytes"):
        parts.append(f"host {_mib(memory['host_bytes'])} of {_mib(config['host_bytes'])}")
    if memory["rss_bytes"] is not None:
        parts.append(f"process {_mib(memory['rss_bytes'])}")
    return parts


def _count_words(counts: Mapping[str, Any]) -> list[str]:
    named = ("completed", "cancelled", "failed", "preemptions")
    parts = [f"{counts[name]:,} {name}" for name in named if counts[name] or name == "completed"]
    prompt = counts["prompt_tokens"]
    share = f" ({counts['cached_prompt_tokens'] / prompt:.0%} cached)" if prompt else ""
    parts += [f"{prompt:,} prompt tokens{share}", f"{counts['generated_tokens']:,} generated"]
    if counts["draft_tokens"]:
        parts.append(f"{counts['accepted_tokens'] / counts['draft_tokens']:.0%} of drafts accepted")
    return parts


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def _parts(head: str, parts: Sequence[str], width: int, style: str = "") -> Iterator[Text]:
    """Yield parts with dots between them, on as many lines as they need, below each other."""
    line = f"{head:<12}{parts[0]}"
    for part in parts[1:]:
        if cell_len(line) + 3 + cell_len(part) > width:
            yield _line(line, style, width)
            line = f"{'':<12}{part}"
        else:
            line = f"{line} · {part}"
    yield _line(line, style, width)


def _line(text: str, style: str, width: int) -> Text:
    line = Text(terminal.printable(text), style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
