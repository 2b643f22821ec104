"""Radix tree, cells and prefix matches, against models that are too simple to be wrong: dicts of prefixes, sets of cells."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.engine_world import make_request

from paceline.kv_cache import TOKEN_BYTES, PendingPrefix, PrefixMatch
from paceline.kv_cache.device_cells import DeviceCells
from paceline.kv_cache.offload import MIN_CACHED_TOKENS, CachedPrefix
from paceline.kv_cache.prefix_match import MIN_PENDING_TOKENS, PREFIX_PENDING, match_parts, match_state
from paceline.kv_cache.radix_tree import HostBlock, Node, RadixTree
from paceline.sequence import Sequence
from paceline.testing.fake_backend import FakeBackend, ManualClock

NAMESPACES = [("a",), ("b",), (1, "a")]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

Path = tuple[int, ...]


def packed(tokens: Path) -> bytes:
    return array("i", tokens).tobytes()


def path_of(node: Node) -> Path:
    """The tokens from the root to the end of a node."""
    return tuple(array("i", b"".join(ancestor.tokens for ancestor in node.path())))


@dataclass(eq=False)
class Stub:
    """An owner. tokens: its prefix in the tree."""

    seq_id: int | None
    num_computed_tokens: int
    namespace: tuple[Any, ...]
    tokens: Path
    node: Node


@dataclass(frozen=True)
class Data:
    """Saved tokens of a prefix, with a byte for each."""

    path: Path
    nbytes: int


class TreeMachine(RuleBasedStateMachine):
    """For any insertions and removals: the tree has exactly the held and saved prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.owners: list[Stub] = []
        self.saved: dict[tuple[Any, Path], Data] = {}  # each token position in host memory, by the prefix up to it
        self.checkpoints: dict[tuple[Any, Path], Data] = {}

    # ---- what the engine does

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=PATHS)
    def hold(self, namespace: Any, tokens: Path) -> None:
        node = self.tree.insert(namespace, packed(tokens))
        assert path_of(node) == tokens
        owner = Stub(len(self.owners), 0, namespace, tokens, node)
        self.tree.add_owner(owner, node)
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), more=PATHS)
    def grow(self, data: st.DataObject, more: Path) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        owner.node = self.tree.extend(owner, owner.node, packed(more))
        owner.tokens += more

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.tree.remove_owner(owner, owner.node)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """A range of an owner's tokens goes to host memory, as `KVCache.complete` puts it there."""
        owner = data.draw(st.sampled_from(self.owners))
        end = data.draw(st.integers(1, len(owner.tokens)))
        start = data.draw(st.integers(0, end - 1))
        tokens, key = owner.tokens[:end], owner.namespace
        if start:
            self.tree.insert(key, packed(tokens[:start]))
        node = self.tree.insert(key, packed(tokens))
        nodes = [ancestor for ancestor in node.path() if ancestor.start >= start]
        assert nodes[0].start == start
        saved = Data(tokens, end - start)
        self.tree.put_block(nodes, HostBlock(start, end, saved))
        for at in range(start, end):
            self.saved[key, tokens[: at + 1]] = saved

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=PATHS)
    def save_state(self, namespace: Any, tokens: Path) -> None:
        node = self.tree.insert(namespace, packed(tokens))
        saved = Data(tokens, 3)
        self.tree.put_state(node, saved)
        self.checkpoints[namespace, tokens] = saved

    @precondition(lambda self: self.tree.least_recent_host() is not None)
    @rule()
    def evict(self) -> None:
        node = self.tree.least_recent_host()
        assert node is not None
        younger = list(self.tree._by_age)[1:]
        assert not any(node in item.path() for item in younger), "something below it would have stayed"
        self.forget(node)
        self.tree.free_host(node)
        self.tree.prune(node)

    @precondition(lambda self: self.tree.least_recent_host() is not None)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(list(self.tree.nodes())))
        self.tree.touch(node)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=PATHS | st.just(()))
    def match(self, namespace: Any, tokens: Path) -> None:
        """Return the longest prefix that any owner has or had saved, and its end."""
        known = self.known(namespace)
        expected = max((shared(tokens, entry) for entry in known), default=0)
        match = self.tree.match(namespace, packed(tokens))
        assert match.length == expected
        if not match.nodes:
            assert (match.length, match.path_length) == (0, 0)
            return
        assert list(match.nodes) == match.nodes[-1].path()
        assert match.nodes[-1].start < match.length <= match.nodes[-1].end
        assert path_of(match.nodes[-1])[: match.length] == tokens[: match.length]
        assert match.path_length in {len(entry) for entry in known if entry[: match.length] == tokens[: match.length]}

    # ---- what must hold

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        self.tree.check()
        by_namespace = {name: {path_of(node) for node in below(root)} for name, root in self.tree._roots.items()}
        for name in NAMESPACES:
            ends = by_namespace.pop(name, set())
            known = self.known(name)
            assert known <= ends
            assert all(any(entry[: len(end)] == end for entry in known) for end in ends), "every node has an owner"
        assert not by_namespace
        assert all(root.children for root in self.tree._roots.values()), "no root without a path"
        for owner in self.owners:
            assert path_of(owner.node) == owner.tokens
            assert all(owner in node.owners for node in owner.node.path())
        num_held = sum(len(node.owners) for node in self.tree.nodes())
        assert num_held == sum(len(owner.node.path()) for owner in self.owners)

    @invariant()
    def what_is_saved_lies_where_it_belongs(self) -> None:
        found: dict[tuple[Any, Path], Data] = {}
        checkpoints: dict[tuple[Any, Path], Data] = {}
        for name, root in self.tree._roots.items():
            for node in below(root):
                path = path_of(node)
                if node.state is not None:
                    assert isinstance(node.state, Data)
                    checkpoints[name, path] = node.state
                if node.block is None:
                    continue
                data = node.block.data
                assert isinstance(data, Data)
                assert node.block.start <= node.start
                assert node.end <= node.block.end
                assert path == data.path[: node.end], "of another path"
                found |= {(name, path[: at + 1]): data for at in range(node.start, node.end)}
        assert found == self.saved
        assert checkpoints == self.checkpoints
        distinct = {id(item): item for item in (*self.saved.values(), *self.checkpoints.values())}
        assert self.tree.num_bytes == sum(item.nbytes for item in distinct.values())

    @invariant()
    def a_node_is_younger_than_all_below_it(self) -> None:
        age = {node: place for place, node in enumerate(self.tree._by_age)}
        for node, own in age.items():
            assert all(age[ancestor] >= own for ancestor in node.path() if ancestor in age)

    def teardown(self) -> None:
        """Nothing is left when all is taken out."""
        for owner in tuple(self.owners):
            self.owners.remove(owner)
            self.tree.remove_owner(owner, owner.node)
        while self.tree.least_recent_host() is not None:
            self.evict()
        assert list(self.tree.nodes()) == []
        assert self.tree._roots == {}
        assert self.tree.num_bytes == 0

    # ---- the model

    def known(self, namespace: Any) -> set[Path]:
        """Return the prefixes that are held, or saved to their end."""
        return {
            *(owner.tokens for owner in self.owners if owner.namespace == namespace),
            *(path for name, path in (*self.saved, *self.checkpoints) if name == namespace and self.ends(name, path)),
        }

    def ends(self, name: Any, path: Path) -> bool:
        """Return whether a saved token is the last of a range: no token behind it belongs to the same."""
        data = self.saved.get((name, path))
        if data is None:
            return True
        return self.saved.get((name, data.path[: len(path) + 1])) is not data or len(path) == len(data.path)

    def forget(self, node: Node) -> None:
        path = path_of(node)
        name = next(name for name, root in self.tree._roots.items() if node in below(root))
        if node.state is not None:
            del self.checkpoints[name, path]
        if node.block is not None:
            for at in range(node.start, node.end):
                del self.saved[name, path[: at + 1]]


def below(root: Node) -> list[Node]:
    waiting, found = list(root.children.values()), []
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += node.children.values()
    return found


def shared(one: Path, other: Path) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_the_tree_is_a_dict_of_paths() -> None:
    """Holding, growing, saving, splitting, evicting in any order: a match finds the held tokens, once, and nothing else."""
    run_state_machine_as_test(TreeMachine, settings=QUICK)


@given(PATHS, PATHS, st.integers(1, 12))
def test_a_blob_that_is_split_keeps_its_range(long: Path, other: Path, budget: int) -> None:
    """Both parts name the same saved range, its bytes count once and go with the last of them."""
    tree = RadixTree()
    node = tree.insert(("a",), packed(long))
    assert node is not None
    tree.put_block([node], HostBlock(0, len(long), Data(long, 100)))
    tree.insert(("a",), packed(other))
    parts = [node for node in tree.nodes() if node.block is not None]
    assert sum(part.end - part.start for part in parts) == len(long)
    assert {part.block.num_nodes for part in parts if part.block is not None} == {len(parts)}
    for left in range(len(parts), 0, -1):
        assert tree.num_bytes == 100
        oldest = tree.least_recent_host()
        assert oldest is not None
        assert oldest.end == max(part.end for part in parts if part.block is not None)
        tree.free_host(oldest)
        assert sum(part.block is not None for part in parts) == left - 1
    assert tree.num_bytes == 0


@given(st.lists(st.tuples(PATHS, st.integers(1, 5)), min_size=1, max_size=12), st.integers(1, 40))
def test_eviction_leaves_no_gap_in_front_of_what_stays(saved: list[tuple[Path, int]], budget: int) -> None:
    """Prefixes saved from their beginning, then evicted down to a budget: the rest has no gap from the root on."""
    tree = RadixTree()
    for tokens, _ in saved:
        node = tree.insert(("a",), packed(tokens))
        for ancestor in node.path():
            if ancestor.block is None:
                tree.put_block(
                    [ancestor],
                    HostBlock(
                        ancestor.start, ancestor.end, Data(tokens[: ancestor.end], ancestor.end - ancestor.start)
                    ),
                )
        tree.touch(node)
    while tree.num_bytes > budget:
        oldest = tree.least_recent_host()
        assert oldest is not None
        tree.free_host(oldest)
        tree.prune(oldest)
    assert all(node.block is not None for node in tree.nodes())
    tree.check()


@given(st.lists(st.tuples(st.sampled_from(NAMESPACES), PATHS), max_size=8), PATHS)
def test_namespaces_know_nothing_of_each_other(inserted: list[tuple[Any, Path]], tokens: Path) -> None:
    """A namespace finds only its own entries."""
    together, apart = RadixTree(), {name: RadixTree() for name in NAMESPACES}
    for name, path in inserted:
        together.insert(name, packed(path))
        apart[name].insert(name, packed(path))
    for name in NAMESPACES:
        found, expected = (tree.match(name, packed(tokens)) for tree in (together, apart[name]))
        assert (found.length, found.path_length) == (expected.length, expected.path_length)


# ---- cells


class CellMachine(RuleBasedStateMachine):
    """The arithmetic, beside the cells themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = DeviceCells(5)
        self.held: dict[int, list[int]] = {seq_id: [] for seq_id in range(5)}
        self.names = itertools.count()

    @rule(seq_id=st.integers(0, 4), num_tokens=st.integers(1, 6))
    def extend(self, seq_id: int, num_tokens: int) -> None:
        self.cells.extend(seq_id, num_tokens)
        self.held[seq_id] += [next(self.names) for _ in range(num_tokens)]

    @precondition(lambda self: any(self.held.values()) and not all(self.held.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([item for item, cells in self.held.items() if cells]))
        target = data.draw(st.sampled_from([item for item, cells in self.held.items() if not cells]))
        num_tokens = data.draw(st.integers(1, len(self.held[source])))
        self.cells.share(source, target, num_tokens)
        self.held[target] = self.held[source][:num_tokens]

    @rule(seq_id=st.integers(0, 4))
    def free(self, seq_id: int) -> None:
        self.cells.free(seq_id)
        self.held[seq_id] = []

    @invariant()
    def the_numbers_are_those_of_the_cells(self) -> None:
        assert self.cells.num_used == len(set().union(*self.held.values()))
        for seq_id, own in self.held.items():
            assert self.cells.length(seq_id) == len(own)
            others = set().union(*(cells for other, cells in self.held.items() if other != seq_id))
            assert self.cells.num_own(seq_id) == len(set(own) - others)
        for seq_ids in ([], [0], [1, 3], [0, 2, 4]):
            union = set().union(*(self.held[seq_id] for seq_id in seq_ids))
            assert self.cells.num_under(seq_ids) == len(union)

    @invariant()
    def segments_are_no_more_than_needed(self) -> None:
        """Of a sequence, at most one for each length at which another was cut off it, or went on."""
        for segments in self.cells._segments.values():
            assert all(segment.length > 0 and segment.num_owners > 0 for segment in segments)


def test_cells_are_counted_as_if_each_had_a_name() -> None:
    """Sharing, extending and freeing in any order."""
    run_state_machine_as_test(CellMachine, settings=QUICK)


# ---- prefix matches

BACKEND, CLOCK = FakeBackend(), ManualClock()
SCALE = 10  # prompt tokens for each token of a test's prefix: the limits of what is worth sharing are 16 and 32


def long_path(tokens: Path) -> Path:
    return tuple(token * 1000 + place for token in tokens for place in range(SCALE))


def running(tokens: Path, num_computed_tokens: int, seq_id: int, *, is_paused: bool = False, n: int = 1) -> Sequence:
    request = make_request(BACKEND, CLOCK, seq_id, list(tokens), n=n)
    request.is_paused = is_paused
    for each in request.sequences:
        each.request = request  # as in a scheduler that has the request open
    sequence = request.sequences[0]
    sequence.seq_id, sequence.num_computed_tokens = seq_id, num_computed_tokens
    return sequence


@st.composite
def trees(draw: st.DrawFn, *, has_cached: bool = True) -> tuple[RadixTree, Path]:
    """Running sequences somewhere in their prompts, cached prefixes, saved ranges with gaps, checkpoints; and a prompt."""
    tree = RadixTree()
    paths = [draw(PATHS)]
    for seq_id in range(draw(st.integers(0, 4))):
        tokens = long_path(another(draw, paths))
        node = tree.insert(("a",), packed(tokens))
        if has_cached and draw(st.booleans()):
            kept = CachedPrefix(
                seq_id=seq_id, namespace=("a",), tokens=packed(tokens), num_computed_tokens=len(tokens), node=node
            )
            tree.add_owner(kept, node)
        else:
            num_computed_tokens, num_prompt_tokens = (
                draw(st.integers(0, len(tokens))),
                draw(st.integers(1, len(tokens))),
            )
            one = running(tokens[:num_prompt_tokens], num_computed_tokens, seq_id, is_paused=draw(st.booleans()))
            one.token_ids += tokens[num_prompt_tokens:]
            tree.add_owner(one, node)
    for _ in range(draw(st.integers(0, 4))):
        tokens = long_path(another(draw, paths))
        start = draw(st.integers(0, len(tokens) - 1))
        if start:
            tree.insert(("a",), packed(tokens[:start]))
        node = tree.insert(("a",), packed(tokens))
        nodes = [ancestor for ancestor in node.path() if ancestor.start >= start]
        if draw(st.integers(0, 3)):
            tree.put_block(nodes, HostBlock(start, len(tokens), Data(tokens, len(tokens) - start)))
        else:
            tree.put_state(node, Data(tokens, 5))
    asked = long_path(another(draw, paths))
    return tree, asked[: len(asked) - draw(st.integers(0, SCALE - 1))]


def another(draw: st.DrawFn, paths: list[Path]) -> Path:
    """A prefix that may begin like another one, or continue it."""
    beginning = draw(st.sampled_from(paths))
    paths.append(beginning[: draw(st.integers(0, 12))] + draw(PATHS))
    return paths[-1]


def check_placement(found: PrefixMatch, asked: Path, most: int) -> None:
    """Everything in a match exists, and has the prompt's tokens."""
    assert 0 <= found.num_device <= found.num_tokens <= most
    at = found.num_device
    if found.source is None:
        assert at == 0
    else:
        assert 0 < at <= found.source.num_computed_tokens
        assert found.source.seq_id is not None
        has = (
            tuple(array("i", found.source.tokens))
            if isinstance(found.source, CachedPrefix)
            else tuple(found.source.token_ids)
        )
        assert has[:at] == asked[:at]
    for part in found.segments:
        assert part.start == at
        assert part.block.start <= part.start < part.end <= part.block.end
        data = part.block.data
        assert isinstance(data, Data)
        assert data.path[part.start : part.end] == asked[part.start : part.end]
        assert data.path[: part.end] == asked[: part.end], "what lies before it is part of what was computed"
        at = part.end
    assert at == found.num_tokens
    assert (found.node is None) == (found.num_tokens == 0)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees())
def test_a_placement_gives_what_is_there_and_one_token_less_than_all(made: tuple[RadixTree, Path]) -> None:
    """Device and parts lie behind each other, each is covered, it is the most there is, and the last token is left."""
    tree, asked = made
    own = running(asked, 0, 99)
    most = len(asked) - 1
    match = tree.match(("a",), packed(asked[:most]))
    found = match_parts(match, most, own)
    owners = {owner for node in match.nodes for owner in node.owners}
    on_device = max((reach(owner, asked[:most]) for owner in owners), default=0)
    promises = [
        shared(tuple(owner.token_ids[: owner.num_prompt_tokens]), asked[:most])
        for owner in owners
        if isinstance(owner, Sequence) and not owner.request.is_paused
    ]
    promised = max(promises, default=0)
    if found is PREFIX_PENDING:
        assert promised >= on_device + MIN_PENDING_TOKENS
        return
    assert promised < found.num_tokens + MIN_PENDING_TOKENS
    check_placement(found, asked, most)
    assert found.num_device == on_device
    assert found.state is None
    if found.segments:
        assert found.num_tokens - found.num_device >= MIN_CACHED_TOKENS
    assert found.device_part().num_tokens == found.num_device


def reach(owner: Any, asked: Path) -> int:
    tokens = tuple(array("i", owner.tokens)) if isinstance(owner, CachedPrefix) else tuple(owner.token_ids)
    return min(shared(tokens, asked), owner.num_computed_tokens)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(has_cached=False), st.booleans())
def test_a_match_with_a_state_is_a_checkpoint_or_where_a_sequence_is(
    made: tuple[RadixTree, Path], has_cells: bool
) -> None:
    """The deepest place that has its cells; and no running sequence is about to come by a later one."""
    tree, asked = made
    own = running(asked, 0, 99)
    most = len(asked) - 1
    match = tree.match(("a",), packed(asked[:most]))
    owners = {owner for node in match.nodes for owner in node.owners if isinstance(owner, Sequence)}
    places = {owner.num_computed_tokens for owner in owners if owner.num_computed_tokens <= reach(owner, asked[:most])}
    for node in tree.nodes():
        if node.state is not None and path_of(node) == asked[: node.end] and node.end <= most:
            on_device = max((reach(owner, asked[: node.end]) for owner in owners), default=0)
            if not has_cells or all(at < on_device or has_block(node, at) for at in range(node.end)):
                places.add(node.end)
    best = max(places, default=0)
    promises = {
        min(shared(tuple(owner.token_ids), asked[:most]), owner.num_prompt_tokens - 1): owner
        for owner in owners
        if not owner.request.is_paused
    }
    promised = max((end for end, promise in promises.items() if promise.num_computed_tokens < end), default=0)
    found = match_state(match, most, own, has_cells=has_cells)
    if found is PREFIX_PENDING:
        assert own.waits_for is not None
        assert own.waits_for.end - best >= MIN_PENDING_TOKENS
        return
    assert promised - best < MIN_PENDING_TOKENS
    assert found.num_tokens == best
    if found.state is None:
        assert found.num_tokens == 0 or found.num_tokens == found.source.num_computed_tokens  # type: ignore[union-attr]
        check_placement(found, asked, most)
        return
    assert isinstance(found.state, Data)
    assert found.state.path == asked[:best]
    if has_cells:
        check_placement(found, asked, most)
    else:
        assert (found.source, found.segments, found.num_device) == (None, (), 0)
    assert found.device_part().num_tokens == 0


def has_block(node: Node, at: int) -> bool:
    """Whether host memory has the cell of a token on the path to this node."""
    return any(ancestor.block is not None for ancestor in node.path() if ancestor.start <= at < ancestor.end)


def test_a_sibling_and_a_stranger_are_waited_for_as_long_as_it_is_worth_it() -> None:
    """For 31 tokens of another request none waits, for 32 one does; for one token of a sibling too, and of one waited for."""
    for missing, is_worth_it in ((31, False), (32, True)):
        prompt = long_path((1,) * 10)
        tree = RadixTree()
        node = tree.insert(("a",), packed(prompt))
        source = running(prompt, len(prompt) - missing, 0, n=2)
        tree.add_owner(source, node)
        other, sibling = running((*prompt, 5), 0, 1), source.request.sequences[1]
        match = tree.match(("a",), packed(prompt))
        found = match_parts(match, len(prompt), other)
        assert (found is PREFIX_PENDING) == is_worth_it
        assert match_parts(match, len(prompt), sibling) is PREFIX_PENDING
        other.waits_for = PendingPrefix(source, len(prompt))
        assert match_parts(match, len(prompt), other) is PREFIX_PENDING
        source.num_computed_tokens = len(prompt)
        for item in (other, sibling):
            found = match_parts(match, len(prompt), item)
            assert isinstance(found, PrefixMatch)
            assert found.num_tokens == len(prompt)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
@pytest.mark.parametrize("at", [0, 1, 2, 16, 999])
def test_a_difference_is_found_at_its_token(size: int, at: int) -> None:
    """For any differing bytes, and chance agreement across tokens."""
    if at >= size:
        return
    tokens = [0x01010101] * size
    other = list(tokens)
    for change in (0x01010102, 0x02010101, 0x01010201, 0):
        other[at] = change
        tree = RadixTree()
        tree.insert(("a",), packed(tuple(tokens)))
        assert tree.match(("a",), packed(tuple(other))).length == at
    assert array("i").itemsize == TOKEN_BYTES
