"""What lies where in memory, and what has to move: sequence ids, cells, kept paths, blobs in host memory.

    running sequences ──ended──> kept paths (device) ──saved in pieces──> blobs (host) ──oldest first──> gone
            ^                          │ shared                              │ loaded
            └──────────────────────────┴─────────────────────────────────────┘

Notes down operations, in order; the executor carries them out before the next pass. Whatever a sequence is given is written
down at once as if it had happened.
"""

from __future__ import annotations

from paceline.scheduling.ahead import Ahead
from paceline.scheduling.device import Device
from paceline.scheduling.exporting import Exporting
from paceline.scheduling.host import Host
from paceline.scheduling.kept import Kept
from paceline.scheduling.leaving import Leaving, Way
from paceline.scheduling.limits import Limits
from paceline.scheduling.moving import Moving
from paceline.scheduling.placement import (
    LEAST_HOST_TOKENS,
    NOTHING,
    WAIT,
    Placement,
    Wait,
    place,
    place_whole,
)
from paceline.scheduling.plan import Copy, Load, Operation, Remove, Save
from paceline.scheduling.prefix_tree import WIDTH, Match, Namespace, Node, PrefixTree, common
from paceline.scheduling.reports import Reports
from paceline.scheduling.room import Room
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.sharing import sibling_source
from paceline.scheduling.view import TickCost

_INSTABILITY_TOKENS = 64  # shorter known paths say nothing about a prompt that is different after a tenth to a half


class Memory:
    """The memory of one context as the scheduler sees it."""

    def __init__(self, limits: Limits, reports: Reports, cost: TickCost) -> None:
        self._limits, self._reports, self._cost = limits, reports, cost
        self._tree, self._device = PrefixTree(), Device(limits.num_seq_ids)
        self._leaving = Leaving(limits, self._device, self._tree, reports)
        self._kept, self._seq_ids = self._leaving.kept, self._device.seq_ids
        self._cells, self._operations = self._device.cells, self._device.operations
        self.moving = Moving(limits.itl_target_s)
        self._ahead = Ahead(self._device)
        self.exporting = Exporting(self._device, self._match, can_share_part=limits.can_share_part)
        self._running: dict[Sequence, Node] = {}  # and where each ends in the tree
        self.room = Room(limits, self._cells, self._running.keys())
        self.host = Host(limits, self._tree, reports)

    # ---- a sequence's life

    def placement(self, sequence: Sequence, now_s: float) -> Placement | Wait:
        """Where the beginning of a waiting sequence can come from now."""
        if not sequence.reads_cache:
            return NOTHING
        if sequence.waits_for is not None and sequence.waits_for.stands:  # nothing better can have come meanwhile
            return WAIT
        whole = NOTHING if self._limits.can_share_part else self._sibling(sequence)
        if whole is WAIT or whole is not NOTHING:
            return whole
        tokens = sequence.token_bytes(sequence.num_known - 1)
        match = self._match(sequence.namespace, tokens)
        self._report_instability(sequence, match, now_s)
        if self._limits.can_share_part:
            return place(match, sequence.num_known - 1, sequence)
        return place_whole(match, sequence.num_known - 1)

    def touch(self, placement: Placement) -> None:
        """It is about to be used: what it comes from makes way last."""
        if isinstance(placement.source, Kept):
            self._kept.touch(placement.source)
        if placement.node is not None:
            self._tree.touch(placement.node)

    def start(self, sequence: Sequence, placement: Placement, now_s: float) -> None:
        """Gives a sequence an id and the beginning that was found for it."""
        while not self._seq_ids.num_free:  # there are more ids than slots: never the path that it starts from
            self._leaving.give_way(now_s)
        seq_id = sequence.seq_id = self._seq_ids.take()
        if placement.source is not None:
            assert placement.source.seq_id is not None  # noqa: S101 - it has tokens
            self._operations.append(Copy(placement.source.seq_id, seq_id, placement.num_device, sequence))
            self._cells.share(placement.source.seq_id, seq_id, placement.num_device)
        for part in placement.parts:
            self._operations.append(Load(seq_id, part.blob.data, part.start, part.end, sequence))
            self._cells.extend(seq_id, part.end - part.start)
        sequence.num_computed = placement.num_tokens
        sequence.has_snapshot = sequence.has_snapshot or placement.num_tokens == sequence.num_prompt - 1
        self._running[sequence] = self._promise(sequence)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """A row was computed."""
        assert sequence.seq_id is not None  # noqa: S101 - it had a row
        self._cells.extend(sequence.seq_id, num_tokens)

    def snapshot(self, sequence: Sequence) -> None:
        """Saves the state of a sequence as it is, where memory can only be saved whole."""
        if self._limits.can_share_part or not sequence.writes_cache or sequence.num_computed < LEAST_HOST_TOKENS:
            return
        self._save_whole(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence runs no longer: its path is kept, if it may be."""
        self._keep(sequence)

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """As `end`, of one that will go on: its path goes to host memory at once, or nowhere, whichever takes less in all."""
        kept = self._keep(sequence)
        if kept is None:
            return
        num_missing = self._leaving.num_missing(kept)
        if num_missing and self.moving.seconds_to_and_fro(num_missing) > self._cost.seconds(
            num_missing, self.num_cells
        ):
            self._leaving.let_go(kept, now_s)
        else:
            self._leaving.evict(kept, now_s)

    def forget(self, sequence: Sequence) -> None:
        """What a sequence was to start from could not be had: it has nothing, and will compute everything itself."""
        self._drop(sequence, self._running.pop(sequence))
        self._ahead.forget(sequence)
        sequence.seq_id = None
        sequence.num_computed = 0
        sequence.computes_all = True

    def forget_kept(self, seq_id: int, now_s: float) -> None:
        """The same of one that has ended meanwhile: its path is not what it was taken for."""
        for kept in self._kept.under(seq_id):
            self._leaving.let_go(kept, now_s)

    def empty_all(self) -> None:
        """Has every sequence id emptied, whatever lies there."""
        self._operations += [Remove(seq_id) for seq_id in range(self._limits.num_seq_ids)]

    # ---- room

    def begin_tick(self, *, is_generating: bool) -> None:
        """Another tick; where somebody generates, moving keeps to a share of it."""
        self._leaving.begin_tick(self.moving.tokens_for_room(is_generating=is_generating))

    def give_way(self, now_s: float) -> bool:
        """Memory is full: moves the kept path that was used longest ago off the device; answers whether there was one."""
        return self._leaving.give_way(now_s)

    def make_way(self, now_s: float) -> Way:
        """As `give_way`, for somebody who can wait some ticks."""
        return self._leaving.make_way(now_s)

    def tidy(self, idle_cells: int, now_s: float, *, is_generating: bool) -> None:
        """Moves kept paths to host memory, the oldest first and a piece a tick.

        While they fill more than idle_cells, or would have to go at once when memory is full. And whatever is wanted outside.
        """
        most = self.moving.tokens_to_tidy(is_generating=is_generating)
        self._leaving.tidy(idle_cells, self.room.seq_ids, most, self.room.num_ticks, now_s)
        if self.exporting.is_waiting:
            self.exporting.plan(self.moving.tokens_for_room(is_generating=is_generating))

    def save_ahead(self, sequence: Sequence, *, is_generating: bool) -> None:
        """Saves, a piece a tick, what this running sequence would have to leave behind when memory is full."""
        if not (sequence.writes_cache and self._limits.can_share_part and self._limits.host_bytes):
            return
        most, num_ticks = self.moving.tokens_to_tidy(is_generating=is_generating), self.room.num_ticks_of_running
        if sequence.num_computed <= most * (num_ticks - 1) or self._is_sooner_computed(sequence.num_computed):
            return
        self._extend(sequence)
        self._ahead.save(sequence, self._running[sequence], most, num_ticks)

    def _is_sooner_computed(self, num_tokens: int) -> bool:
        """Whether it takes less to compute so many tokens again than to save and to load them."""
        moving_s = self.moving.seconds_to_and_fro(num_tokens)
        return num_tokens > 0 and moving_s > self._cost.seconds(num_tokens, self.num_cells)

    def is_saving(self, sequence: Sequence, placement: Placement) -> bool:
        """Whether the next tick has more for a waiting sequence than this one: what is on its way to host memory."""
        if not sequence.reads_cache:
            return False
        saves = [one for one in self._operations if isinstance(one, Save)]
        tokens = sequence.token_bytes(sequence.num_known - 1) if saves else b""
        for one in saves:
            if one.namespace == sequence.namespace:
                shared = common(one.tokens, tokens, 0) // WIDTH
                if one.is_whole and shared < one.end:
                    continue
                least = 1 if one.is_whole else LEAST_HOST_TOKENS
                if shared - placement.num_tokens >= least:
                    return True
        return False

    # ---- what the executor does

    @property
    def is_moving(self) -> bool:
        """Whether something is about to be saved."""
        return self._device.is_moving

    @property
    def is_freeing(self) -> bool:
        """Whether something is about to be removed."""
        return self._device.is_freeing

    @property
    def moving_s(self) -> float:
        """What the moves that are noted down are going to take."""
        return self.moving.seconds(self._operations)

    def take_operations(self) -> list[Operation]:
        """What has to be done before the next pass."""
        return self._device.take_operations()

    @property
    def num_cells(self) -> int:
        """Cells in use."""
        return self._cells.num_used

    @property
    def host_bytes(self) -> int:
        """Bytes of all that lies there."""
        return self.host.num_bytes

    @property
    def num_kept(self) -> int:
        """Paths that are kept on the device."""
        return len(self._kept)

    def check(self) -> None:
        """Asserts that every id is in one place and the tree names nothing that is not there."""
        running = self.room.seq_ids
        assert len(running) == len(self._running)  # noqa: S101 - our own invariants
        self._seq_ids.check(running + self._kept.seq_ids)
        self._tree.check()
        for node in self._tree.nodes():
            for holder in node.holders:
                assert holder.seq_id is not None  # noqa: S101
                assert self._cells.length(holder.seq_id) == holder.num_computed  # noqa: S101
        assert self._limits.num_cells is None or self.num_cells <= self._limits.num_cells  # noqa: S101
        assert self._tree.num_bytes <= self._limits.host_bytes  # noqa: S101

    # ---- inside

    def _report_instability(self, sequence: Sequence, match: Match, now_s: float) -> None:
        """Tells, once a request, of a prompt that is another soon after it began like a long known one."""
        request = sequence.request
        if request.is_matched:
            return
        request.is_matched = True
        if match.cached >= _INSTABILITY_TOKENS and match.cached <= 10 * match.length <= 5 * match.cached:
            self._reports.watch.prefix_instability(request.key, match.cached, match.length, now_s)

    def _sibling(self, sequence: Sequence) -> Placement | Wait:
        source = sibling_source(sequence)
        if source is WAIT or source is None:
            return WAIT if source is WAIT else NOTHING
        return Placement(source, source.num_computed, (), source.num_computed, None)

    def _promise(self, sequence: Sequence) -> Node:
        """Where the prompt of a sequence that starts ends in the tree: others can wait for it."""
        node = self._insert_end(sequence.namespace, sequence.token_bytes(sequence.num_prompt))
        self._tree.hold(sequence, node)
        return node

    def _match(self, namespace: Namespace, tokens: bytes) -> Match:
        """The longest known beginning of these tokens, among them what running sequences have generated."""
        match = self._tree.match(namespace, tokens)
        while behind := self._behind(match):
            for sequence in behind:
                self._extend(sequence)
            match = self._tree.match(namespace, tokens)
        return match

    def _behind(self, match: Match) -> list[Sequence]:
        """Running sequences of whom the tree knows no more than lies on the way of a match, though there is more."""
        on_the_way = frozenset(match.nodes)
        return [
            one
            for one, end in self._running.items()
            if end.end <= match.length and one.num_computed > end.end and end in on_the_way
        ]

    def _extend(self, sequence: Sequence) -> None:
        """Tells the tree of generated tokens that were computed since it was told last."""
        node = self._running[sequence]
        if sequence.num_computed > node.end:
            tokens = sequence.token_bytes(sequence.num_computed)
            self._running[sequence] = self._tree.grow(sequence, node, tokens[node.end * WIDTH :])

    def _insert_end(self, namespace: Namespace, tokens: bytes) -> Node:
        node = self._tree.insert(namespace, tokens)
        assert node is not None  # noqa: S101 - there are tokens
        return node

    def _keep(self, sequence: Sequence) -> Kept | None:
        """A sequence runs no longer; answers its path, where that stays on the device."""
        num_tokens, kept = sequence.num_computed, None
        self._extend(sequence)
        node = self._running.pop(sequence)
        self._ahead.forget(sequence)
        if not sequence.writes_cache or num_tokens < LEAST_HOST_TOKENS:
            self._drop(sequence, node)
        elif not self._limits.can_share_part:
            self._save_whole(sequence)
            self._drop(sequence, node)
        else:
            kept = self._kept_path(sequence, num_tokens)
            self._tree.let_go(sequence, node)
        sequence.seq_id = None
        sequence.num_computed = 0
        sequence.computes_all = False
        return kept

    def _kept_path(self, sequence: Sequence, num_tokens: int) -> Kept:
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        tokens, namespace = sequence.token_bytes(num_tokens), sequence.namespace
        node = self._insert_end(namespace, tokens)
        kept = Kept(seq_id=sequence.seq_id, namespace=namespace, tokens=tokens, num_computed=num_tokens, node=node)
        self._tree.hold(kept, node)
        self._kept.add(kept)
        return kept

    def _drop(self, sequence: Sequence, node: Node) -> None:
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        self._tree.let_go(sequence, node)
        self._device.free(sequence.seq_id)

    def _save_whole(self, sequence: Sequence) -> None:
        if self._limits.host_bytes and sequence.seq_id is not None:
            tokens = sequence.token_bytes(sequence.num_computed)
            save = Save(sequence.seq_id, 0, sequence.num_computed, sequence.namespace, tokens, is_whole=True)
            self._operations.append(save)
