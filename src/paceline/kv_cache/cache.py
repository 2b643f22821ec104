"""The entry to the cache: find the prefix from which a sequence starts, and queue the transfers for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial

from paceline.kv_cache.device_cells import (
    CacheSequence,
    CellBudget,
    Copy,
    DeviceCells,
    DiskLookup,
    KVCacheLimits,
    Load,
    LoadState,
    Operation,
    PendingPrefix,
    Remove,
    Save,
    SaveState,
    TransferOutput,
    Truncate,
)
from paceline.kv_cache.disk_lookups import DiskBlocks, DiskLookups, DiskStore
from paceline.kv_cache.offload import (
    MIN_CACHED_TOKENS,
    CachedPrefix,
    CacheTelemetry,
    ComputeCost,
    Eviction,
    HostCache,
    Offloader,
    PrefixExporter,
    RangeSaver,
    TransferCost,
    prompt_token_s,
    ranges_without_block,
)
from paceline.kv_cache.prefix_match import (
    NO_MATCH,
    PREFIX_PENDING,
    CheckpointPlaces,
    NotAdmitted,
    PrefixMatch,
    match_parts,
    match_state,
)
from paceline.kv_cache.prompt_layout import TEXT_LAYOUT, PromptLayout
from paceline.kv_cache.radix_tree import (
    TOKEN_BYTES,
    Namespace,
    Node,
    PrefixDigest,
    RadixTree,
    SavedState,
    SequenceName,
    TenantTree,
    TreeMatch,
    common_prefix_bytes,
    host_segments,
    view_tree,
)

_INSTABILITY_TOKENS = 64  # shorter cached prefixes say nothing about a prompt that diverges after 10 to 50 % of one
_MIN_IDLE_CELLS = 256  # llama.cpp attends to as many at a time, so that fewer idle ones cost nothing
_IDLE_COST = 0.02  # of a lone stream's speed
_MANY_TIMES = 4  # as large as the device's memory, host memory may be full and keeps more without the device's share
# Cost of a cell that belongs to another sequence, and is skipped, relative to one that is attended to: flash attention, CPU.
_SKIPPED = 0.2


class KVCache:
    """The memory of one context: device cells, cached prefixes, host memory. Pure; the scheduler's thread calls it.

    A sequence goes through `match`, `allocate`, `commit` after each pass, then `release` or `preempt`. `take_operations` returns
    the operations for the device, and `complete` takes their outcome. The cache counts an operation as done when it is queued.
    store: keeps what is saved to host memory on a disk as well.
    """

    def __init__(
        self, limits: KVCacheLimits, telemetry: CacheTelemetry, cost: ComputeCost, store: DiskStore | None = None
    ) -> None:
        self._limits, self._telemetry, self._cost = limits, telemetry, cost
        self._tree, self._cells = RadixTree(), DeviceCells(limits.num_seq_ids)
        self._offloader = Offloader(self._cells, self._tree, telemetry, has_host=limits.host_bytes > 0)
        self._host = HostCache(limits, self._tree, telemetry)
        self._lookups = DiskLookups(limits, store)
        self._transfers = TransferCost(limits.itl_target_s)
        self._has_states = not limits.can_share_part
        self._has_cells = limits.can_share_part or limits.has_state_apart
        self._exporter = PrefixExporter(self._cells, self._find, has_cells=self._has_cells, has_states=self._has_states)
        self._places = CheckpointPlaces(limits, self._transfers, cost)
        self._running: dict[CacheSequence, Node] = {}  # with the last node of each in the tree
        self._budget = CellBudget(limits.num_cells, self._cells, self._running.keys())
        self._max_idle_cells = _MIN_IDLE_CELLS
        self._token_s = 0.0  # seconds to compute one token of a prompt
        self._is_generating = False
        self.is_saving_idle = False  # whether idle prefixes are being saved that stay on the device
        self.update_idle_limit()

    # ---- a sequence's life

    def match(self, sequence: CacheSequence, now_s: float, *, is_alone: bool) -> PrefixMatch | NotAdmitted:
        """Find the cached prefix that a waiting sequence starts from, evicting others until its cells are free.

        The prefix itself is evicted last; then the sequence starts from host memory in a later tick. A sequence that
        is_alone, with no other running, may start in any case.
        """
        while True:
            match = self._match(sequence, now_s)
            if isinstance(match, NotAdmitted):
                return match
            if self._is_prefix_being_saved(sequence, match):
                return NotAdmitted.OFFLOAD_PENDING
            if self._waits_for_disk(sequence, match, now_s):
                return NotAdmitted.READ_PENDING
            if sequence.lookup is not None and sequence.lookup.num_read:
                match = dataclasses.replace(match, num_read=min(sequence.lookup.num_read, match.num_tokens))
            self._touch(match)
            has_cells = self._budget.fits(sequence.num_tokens - match.num_device)
            if has_cells and self._can_load(match):
                return match
            max_tokens = self._transfers.pressure_tokens(is_generating=self._is_generating)
            eviction = self._offloader.try_evict(max_tokens, now_s)
            if eviction is Eviction.PENDING:
                return NotAdmitted.OFFLOAD_PENDING
            if eviction is Eviction.NOTHING_CACHED:
                if has_cells:
                    return match.device_part()
                return match if is_alone else NotAdmitted.NO_CELLS

    def num_matched(self, sequence: CacheSequence, now_s: float) -> int:
        """Return how many tokens of a waiting sequence are cached, or about to be; nothing is evicted for it."""
        match = self._match(sequence, now_s)
        if isinstance(match, NotAdmitted):
            return 0 if sequence.waits_for is None else sequence.waits_for.end
        return match.num_tokens

    def allocate(self, sequence: CacheSequence, match: PrefixMatch, now_s: float) -> None:
        """Give a sequence a sequence id and the prefix that was found for it."""
        while not self._cells.seq_ids.num_free:  # there are more ids than slots, so never the prefix it starts from
            self._offloader.evict(now_s)
        seq_id, layout = self._cells.seq_ids.allocate(), sequence.layout
        sequence.seq_id = seq_id
        if match.source is not None:
            assert match.source.seq_id is not None  # noqa: S101 - it has tokens
            self._cells.copy(Copy(match.source.seq_id, seq_id, match.num_device, match.state is not None, layout))
        for segment in match.segments:
            self._cells.load(Load(seq_id, segment.block.data, segment.start, segment.end, layout))
        if match.state is not None:
            load = LoadState(seq_id, match.state, match.num_tokens, layout)
            self._cells.load_state(load, has_cells=not self._has_cells)
        if self._lookups.store is not None and match.num_tokens and sequence.writes_cache:
            self._lookups.store.note_use(sequence.namespace, sequence.token_bytes(match.num_tokens))
        if sequence.lookup is not None:
            sequence.lookup.num_read = 0
        sequence.num_computed_tokens = match.num_tokens
        end = self._tree.insert(sequence.namespace, sequence.token_bytes(sequence.num_prompt_tokens))
        self._tree.add_owner(sequence, end)  # others can wait for its prompt
        self._running[sequence] = end
        if self._has_states:
            self._places.begin(sequence, end)

    def commit(self, sequence: CacheSequence, num_tokens: int) -> None:
        """Count tokens that a pass has computed."""
        assert sequence.seq_id is not None  # noqa: S101 - it had a row
        sequence.num_computed_tokens += num_tokens
        self._cells.extend(sequence.seq_id, num_tokens)
        self._offloader.num_rows += 1

    def may_truncate(self, sequence: CacheSequence, num_tokens: int) -> bool:
        """Return whether a running sequence shares none of its cells after the first num_tokens."""
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        num_behind = self._cells.length(sequence.seq_id) - num_tokens
        return num_behind <= self._cells.num_own(sequence.seq_id)  # shared cells are a prefix

    def truncate(self, sequence: CacheSequence, num_tokens: int) -> None:
        """Free the cells of a sequence after its first num_tokens: accepted drafts after its end.

        If memory has a state that cannot be cut, num_tokens is the start of the row of the last pass.
        """
        assert sequence.seq_id is not None  # noqa: S101 - it had a row
        sequence.num_computed_tokens = num_tokens
        self._cells.truncate(Truncate(sequence.seq_id, num_tokens, sequence.layout))

    def release(self, sequence: CacheSequence) -> None:
        """Free the sequence id of an ended sequence; its tokens become a cached prefix if they may be cached."""
        self._cache(sequence)

    def preempt(self, sequence: CacheSequence, now_s: float) -> None:
        """Free the cells of a sequence that will resume: offloaded before the next pass, or dropped, whichever costs less."""
        prefix = self._cache(sequence)
        if prefix is None:
            return
        if self._is_cheaper_recomputed(self._offloader.num_missing(prefix)):
            self._offloader.drop(prefix, now_s)
        else:
            self._offloader.save_and_drop(prefix, now_s)

    def discard(self, sequence: CacheSequence) -> None:
        """Free a sequence after a failed copy or load; it will compute all of its tokens."""
        self._drop(sequence, self._running.pop(sequence))
        self._offloader.end_eager_offload(sequence)
        self._places.end(sequence)
        sequence.seq_id = None
        sequence.num_computed_tokens = 0
        sequence.computes_all = True

    def discard_cached(self, seq_id: int, now_s: float) -> None:
        """Drop a cached prefix if its copy or load failed after its sequence had ended."""
        prefix = self._offloader.find(seq_id)
        if prefix is not None:
            self._offloader.drop(prefix, now_s)

    def forget(self, is_forgotten: Callable[[Namespace], bool], now_s: float) -> None:
        """Drop all cached tokens and pending saves of the forgotten namespaces; no sequence of them may run."""
        for prefix in [prefix for prefix in self._offloader.prefixes if is_forgotten(prefix.namespace)]:
            self._offloader.drop(prefix, now_s)
        self._cells.operations[:] = [
            operation
            for operation in self._cells.operations
            if not (isinstance(operation, (Save, SaveState)) and is_forgotten(operation.namespace))
        ]
        self._host.forget(is_forgotten, now_s)

    def clear(self) -> None:
        """Empty every sequence id on the device, whatever lies there; for a new cache after a failure."""
        self._cells.operations += [Remove(seq_id) for seq_id in range(self._limits.num_seq_ids)]

    def tokens_to_checkpoint(self, sequence: CacheSequence) -> int | None:
        """Return the number of tokens that a running sequence may compute before its state is saved or taken over.

        None if the sequence need not stop; always None if any part of memory can be shared.
        """
        return self._places.tokens_left(sequence)

    # ---- a tick

    def begin_tick(self, *, is_generating: bool) -> None:
        """Begin a tick. While sequences generate, transfers keep to a share of the tick."""
        self._is_generating = is_generating
        self._offloader.tick += 1

    def take_checkpoints(self) -> None:
        """Save the states of running sequences that have reached a place to stop at."""
        if self._places.places:
            for sequence in self._places.take_due():
                self._save_state(sequence)

    def evict(self, now_s: float) -> bool:
        """Evict the least recently used cached prefix before the next pass; return whether there was one."""
        return self._offloader.evict(now_s)

    def offload(self, next_victim: Callable[[], CacheSequence] | None, now_s: float, *, is_generating: bool) -> None:
        """Save parts of idle prefixes, of requested exports and of the next victim, as much as fits the tick.

        next_victim: returns the running sequence that would be preempted next; called only when cells are low.
        """
        if not (self._offloader.prefixes or self._exporter.exports or self._budget.is_low):
            self.is_saving_idle = False
            return
        max_tokens = self._transfers.idle_tokens(is_generating=is_generating)
        if self._offloader.prefixes:
            self._offloader.offload_idle(
                self._idle_limit(),
                self._max_idle_rows(),
                self._budget.seq_ids,
                max_tokens,
                self._budget.ticks_left,
                now_s,
            )
        if self.is_saving_idle and not self.is_saving:  # else `offload_idle` saves a part in this tick
            self.is_saving_idle = self._offloader.save_idle(max_tokens)
        if self._exporter.exports:
            max_saved = self._transfers.pressure_tokens(is_generating=is_generating)
            self._exporter.save_part(max_saved, partial(self._make_room, now_s=now_s))
        if next_victim is not None and self._budget.is_low:
            self._offload_eagerly(next_victim(), max_tokens)

    def save_idle(self) -> None:
        """Save idle prefixes to host memory in the next ticks, and keep them on the device."""
        self.is_saving_idle = bool(self._offloader.prefixes)

    def _make_room(self, num_cells: int, now_s: float) -> bool:
        """Evict cached prefixes until as many cells are free; return whether they are."""
        while self._budget.num_free < num_cells and self._offloader.evict(now_s):
            pass
        return self._budget.num_free >= num_cells

    def _idle_limit(self) -> int:
        """Return the number of cells that may be idle: few if saving is cheap and host memory is large enough."""
        if self._has_place() and self._transfers.is_saving_cheap(self._token_s):
            return _MIN_IDLE_CELLS
        return self._max_idle_cells

    def _max_idle_rows(self) -> float:
        """Return the rows after which idle cells have cost the time of loading them, or of computing them if they would be lost.

        Before the first save, computing is the price. Infinite if the cost of an idle cell is unknown. Saving does not count: a
        prefix is saved once in any case, at the latest when memory is full.
        """
        idle_cell_s = self._cost.idle_cell_s
        if not idle_cell_s:
            return math.inf
        is_kept = self._has_place() and not self._transfers.is_failing
        return ((self._transfers.load_seconds(1) if is_kept else 0.0) or self._token_s) / idle_cell_s

    def _has_place(self) -> bool:
        """Return whether host memory has room for all cells in use, or is so large that it may evict blocks for them."""
        has_place = self._host.num_bytes + self.num_cells * self._transfers.token_bytes <= self._limits.host_bytes
        if self._limits.num_cells is not None:
            device_bytes = self._limits.num_cells * self._transfers.token_bytes
            has_place |= _MANY_TIMES * device_bytes <= self._limits.host_bytes
        return has_place and self._limits.host_bytes > 0

    def update_idle_limit(self) -> None:
        """Read the cost of a token from the cost model, and set the idle cells that cost a lone stream 2 % of its speed."""
        self._token_s = prompt_token_s(self._cost)
        empty = self._cost.seconds(1, 0)
        per_thousand = _SKIPPED * (self._cost.seconds(1, 1000) - empty)
        most = int(1000 * _IDLE_COST * empty / per_thousand) if per_thousand > 0 else 2**31
        self._max_idle_cells = max(_MIN_IDLE_CELLS, most)

    # ---- transfers

    def take_operations(self) -> list[Operation]:
        """Return the operations for the device before the next pass, in order."""
        return self._cells.take_operations()

    def complete(self, operations: list[Operation], output: TransferOutput, now_s: float) -> None:
        """Take in the outcome of a tick's operations."""
        if operations:
            self._transfers.observe(operations, output)
        for load in output.failed_loads:  # the next sequence would start from it, too
            self._tree.discard(load.data)
        for save, data in output.saved:
            self._host.put(save, data, now_s)
        for state, data in output.saved_states:
            self._host.put_state(state, data, now_s)
        if (store := self._lookups.store) is not None:
            for save, data in output.saved:
                if save.cut_from is None:
                    store.put(save, data)
            for state, data in output.saved_states:
                store.put(state, data)

    @property
    def is_saving(self) -> bool:
        """Whether a save is pending."""
        return bool(self._cells.pending_saves)

    @property
    def is_freeing(self) -> bool:
        """Whether cells are about to be freed."""
        return any(isinstance(operation, Remove) for operation in self._cells.operations)

    @property
    def transfer_s(self) -> float:
        """Expected time of the pending operations."""
        return self._transfers.seconds(self._cells.operations) if self._cells.operations else 0.0

    # ---- the disk

    def end_lookup(self, lookup: DiskLookup, blocks: DiskBlocks, now_s: float) -> None:
        """Take the result of a lookup into host memory, and let the sequences start that wait for it."""
        num_read = max([_num_common(lookup, save) for save, _ in blocks], default=0) - lookup.num_known
        for save, data in blocks:
            if isinstance(save, Save):
                self._host.put(save, data, now_s)
            else:
                self._host.put_state(save, data, now_s)
        self._lookups.end(lookup, max(0, num_read))

    def end_overdue_lookups(self, now_s: float) -> None:
        """Let the sequences start that have waited too long for a disk."""
        self._lookups.end_overdue(now_s)

    @property
    def next_due_s(self) -> float:
        """When the first sequence that waits for a disk starts without it; infinite if none waits."""
        return self._lookups.next_due_s

    def _waits_for_disk(self, sequence: CacheSequence, match: PrefixMatch, now_s: float) -> bool:
        if self._lookups.store is None:
            return False
        num_cells = match.num_tokens
        if self._has_states and sequence.lookup is None:
            found = self._find(sequence.namespace, sequence.token_bytes(sequence.max_cached_tokens))
            segments = host_segments(found.nodes, 0, found.length)
            num_cells = segments[-1].end if segments else 0
        return self._lookups.must_wait(sequence, match.num_tokens, num_cells, self._token_s, now_s)

    # ---- export and import

    def request_export(self, key: int, namespace: Namespace, tokens: bytes, layout: PromptLayout = TEXT_LAYOUT) -> None:
        """Request the saved ranges of a prefix; `take_exports` returns them under this key."""
        self._exporter.request(key, namespace, tokens, layout)

    def take_exports(self) -> list[tuple[int, list[SavedState]]]:
        """Return key and ranges of exports that are complete."""
        return self._exporter.take_done()

    @property
    def is_exporting(self) -> bool:
        """Whether an export is under way."""
        return bool(self._exporter.exports)

    def import_ranges(
        self, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, SavedState], ...], now_s: float
    ) -> list[SavedState]:
        """Put saved ranges (start, end, state) of a prefix into host memory; return the ranges that host memory has."""
        self._host.import_ranges(namespace, tokens, ranges, now_s)
        return self._exporter.saved_ranges(namespace, tokens)

    # ---- what it holds

    def digest(self, max_prefixes: int, block_tokens: int | None = None) -> PrefixDigest:
        """Return hashes of at most max_prefixes cached prefixes; hashes each token of the tree once.

        block_tokens: prefixes end at whole blocks of this size; if None, they end at branches and ends of cached sequences.
        """
        private = {sequence.namespace for sequence in self._running if not sequence.writes_cache}
        if block_tokens is not None:
            return self._tree.block_digest(
                max_prefixes, block_tokens, needs_cells=self._has_cells, needs_state=self._has_states, private=private
            )
        return self._tree.digest(
            max_prefixes, needs_cells=self._has_cells, needs_state=self._has_states, private=private
        )

    def view(
        self, tenant_of: Callable[[Namespace], str], names: Mapping[object, SequenceName], max_nodes: int
    ) -> tuple[TenantTree, ...]:
        """Return the radix tree by tenant, with at most max_nodes nodes of each. names: of running sequences."""
        return view_tree(self._tree.roots, self._running.keys(), self._tree.number_of, tenant_of, names, max_nodes)

    @property
    def num_running_cells(self) -> int:
        """Cells in use by running sequences; the other cells in use belong to cached prefixes alone."""
        return self._cells.num_under(self._budget.seq_ids)

    @property
    def num_cells(self) -> int:
        """Cells in use."""
        return self._cells.num_used

    @property
    def num_free(self) -> float:
        """Cells not in use; infinite if memory is not made of cells."""
        return self._budget.num_free

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return self._host.num_bytes

    def check(self) -> None:
        """Assert that every sequence id is in one place and the tree names nothing that is not there."""
        running = self._budget.seq_ids
        assert len(running) == len(self._running)  # noqa: S101 - our own invariants
        self._cells.seq_ids.check(running + self._offloader.seq_ids)
        self._tree.check()
        for node in self._tree.nodes():
            for owner in node.owners:
                assert owner.seq_id is not None  # noqa: S101
                num_there = self._cells.length(owner.seq_id)
                if isinstance(owner, CachedPrefix):
                    num_there = owner.layout.shareable(num_there)
                assert num_there == owner.num_computed_tokens  # noqa: S101
        assert self._limits.num_cells is None or self.num_cells <= self._limits.num_cells  # noqa: S101
        assert self._tree.num_bytes <= self._limits.host_bytes  # noqa: S101

    # ---- matching

    def _match(self, sequence: CacheSequence, now_s: float) -> PrefixMatch | NotAdmitted:
        max_tokens = sequence.max_cached_tokens
        if max_tokens == 0:
            return NO_MATCH
        if sequence.waits_for is not None and sequence.waits_for.is_pending:  # nothing better can be there yet
            return PREFIX_PENDING
        match = self._find(sequence.namespace, sequence.token_bytes(max_tokens))
        self._report_instability(sequence, match, now_s)
        if not self._has_states:
            return match_parts(match, max_tokens, sequence)
        found = match_state(match, max_tokens, sequence, has_cells=self._has_cells)
        if sequence.waits_for is not None:
            running = sequence.waits_for.sequence
            sequence.waits_for = PendingPrefix(running, self._places.request(running, sequence.waits_for.end))
        return found

    def _find(self, namespace: Namespace, tokens: bytes) -> TreeMatch:
        """Match tokens against the tree after adding the generated tokens of running sequences on the path."""
        match = self._tree.match(namespace, tokens)
        while behind := self._behind(match):
            for sequence in behind:
                self._extend(sequence)
            match = self._tree.match(namespace, tokens)
        return match

    def _behind(self, match: TreeMatch) -> list[CacheSequence]:
        """Return running sequences that end within the match in the tree but have computed more tokens."""
        nodes = frozenset(match.nodes)
        return [
            sequence
            for sequence, end in self._running.items()
            if end.end <= match.length and sequence.num_computed_tokens > end.end and end in nodes
        ]

    def _report_instability(self, sequence: CacheSequence, match: TreeMatch, now_s: float) -> None:
        """Report, once a request, a prompt that diverges soon from a long cached prefix."""
        request, length = sequence.request, match.path_length
        if request.is_matched:
            return
        request.is_matched = True
        if length >= _INSTABILITY_TOKENS and length <= 10 * match.length <= 5 * length:
            self._telemetry.prefix_instability(request.key, length, match.length, now_s)

    def _is_prefix_being_saved(self, sequence: CacheSequence, match: PrefixMatch) -> bool:
        """Return whether host memory will have more for a waiting sequence after this tick."""
        if sequence.max_cached_tokens == 0:
            return False
        saves = self._cells.pending_saves
        if not saves:
            return False
        tokens = sequence.token_bytes(sequence.max_cached_tokens)
        cells = states = match.num_tokens
        for save in saves:
            if save.namespace == sequence.namespace:
                shared = common_prefix_bytes(save.tokens, tokens, 0) // TOKEN_BYTES
                if isinstance(save, Save):
                    cells = max(cells, shared)
                elif save.num_tokens <= shared:
                    states = max(states, save.num_tokens)
        if not self._has_states:
            return cells - match.num_tokens >= MIN_CACHED_TOKENS
        for node in self._tree.match(sequence.namespace, tokens[: cells * TOKEN_BYTES]).nodes:
            if node.state is not None and node.end <= cells:
                states = max(states, node.end)
        return states > match.num_tokens

    def _touch(self, match: PrefixMatch) -> None:
        if isinstance(match.source, CachedPrefix):
            self._offloader.touch(match.source)
        if match.node is not None:
            self._tree.touch(match.node)

    def _can_load(self, match: PrefixMatch) -> bool:
        """Return whether the segments can be loaded: each needs cells for its whole block for a moment."""
        num_free = self._budget.num_free
        for segment in match.segments:
            if segment.block.end - segment.block.start > num_free:
                return False
            num_free -= segment.end - segment.start
        return True

    # ---- caching

    def _cache(self, sequence: CacheSequence) -> CachedPrefix | None:
        """Stop a running sequence and return the cached prefix it becomes if it stays on the device."""
        num_tokens, prefix = sequence.layout.shareable(sequence.num_computed_tokens), None
        self._extend(sequence)
        node = self._running.pop(sequence)
        self._offloader.end_eager_offload(sequence)
        self._places.end(sequence)
        if not sequence.writes_cache or num_tokens < MIN_CACHED_TOKENS:
            self._drop(sequence, node)
        elif self._has_states:
            self._save_cells(sequence, node, num_tokens)
            self._save_state(sequence)
            self._drop(sequence, node)
        else:
            prefix = self._add_prefix(sequence, num_tokens)
            self._tree.remove_owner(sequence, node)
            if self._lookups.store is not None:
                self._lookups.store.note_unsaved()
        sequence.seq_id = None
        sequence.num_computed_tokens = 0
        sequence.computes_all = False
        return prefix

    def _add_prefix(self, sequence: CacheSequence, num_tokens: int) -> CachedPrefix:
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        tokens, namespace = sequence.token_bytes(num_tokens), sequence.namespace
        node = self._tree.insert(namespace, tokens)
        prefix = CachedPrefix(
            seq_id=sequence.seq_id,
            namespace=namespace,
            tokens=tokens,
            layout=sequence.layout,
            num_computed_tokens=num_tokens,
            node=node,
        )
        self._offloader.add(prefix)
        return prefix

    def _extend(self, sequence: CacheSequence) -> None:
        node = self._running[sequence]
        if sequence.num_computed_tokens > node.end:
            tokens = sequence.token_bytes(sequence.num_computed_tokens)
            self._running[sequence] = self._tree.extend(sequence, node, tokens[node.end * TOKEN_BYTES :])

    def _drop(self, sequence: CacheSequence, node: Node) -> None:
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        self._tree.remove_owner(sequence, node)
        self._cells.free(sequence.seq_id)

    def _save_state(self, sequence: CacheSequence) -> None:
        """Save the state of a sequence as it is now, if it may be cached and host memory does not have it."""
        num_tokens, layout = sequence.num_computed_tokens, sequence.layout
        if not (self._limits.host_bytes and sequence.writes_cache) or num_tokens < MIN_CACHED_TOKENS:
            return
        if layout.shareable(num_tokens) < num_tokens:
            return
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        tokens = sequence.token_bytes(num_tokens)
        match = self._tree.match(sequence.namespace, tokens)
        if match.nodes and match.nodes[-1].end == num_tokens and match.nodes[-1].state is not None:
            self._tree.touch(match.nodes[-1])
            return
        self._add_save(SaveState(sequence.seq_id, num_tokens, sequence.namespace, tokens, layout))

    def _save_cells(self, sequence: CacheSequence, end: Node, num_tokens: int) -> None:
        """Save the first cells of a sequence that host memory lacks, if memory keeps cells apart from the state."""
        if not (self._limits.has_state_apart and self._limits.host_bytes):
            return
        missing = ranges_without_block(end, num_tokens)
        for save in RangeSaver.of(sequence, num_tokens).next_saves(missing, num_tokens):
            self._add_save(save)

    def _add_save(self, save: Save | SaveState) -> None:
        """Queue a save unless an equal save is pending: many sequences that end in a tick may begin alike."""
        if not any(_is_same(save, operation) for operation in self._cells.operations):
            self._cells.operations.append(save)

    # ---- eager offload

    def _offload_eagerly(self, victim: CacheSequence, max_tokens: int) -> None:
        if not (victim.writes_cache and self._limits.can_share_part and self._limits.host_bytes):
            return
        ticks_left, num_tokens = self._budget.ticks_left_for_running, victim.num_computed_tokens
        if num_tokens <= max_tokens * (ticks_left - 1) or self._is_cheaper_recomputed(num_tokens):
            return
        self._extend(victim)
        self._offloader.offload_eagerly(victim, self._running[victim], max_tokens, ticks_left)

    def _is_cheaper_recomputed(self, num_tokens: int) -> bool:
        transfer_s = self._transfers.round_trip_seconds(num_tokens)
        return num_tokens > 0 and transfer_s > self._cost.seconds(num_tokens, self.num_cells)


def _num_common(lookup: DiskLookup, save: Save | SaveState) -> int:
    """Return the number of tokens that a lookup has in common with a range or state: the rest belongs to other prompts."""
    return common_prefix_bytes(lookup.tokens, save.tokens, 0) // TOKEN_BYTES


def _is_same(save: Save | SaveState, operation: Operation) -> bool:
    """Return whether an operation saves the same tokens, possibly from another sequence id."""
    if isinstance(save, Save):
        is_same = isinstance(operation, Save) and operation.start == save.start
    else:
        is_same = isinstance(operation, SaveState)
    return is_same and operation.tokens == save.tokens and operation.namespace == save.namespace  # type: ignore[union-attr]
