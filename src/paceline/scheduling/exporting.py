"""What goes out of the engine's memory, to a file: paths that are brought to host memory, a part a tick. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from paceline.scheduling.device import Device
from paceline.scheduling.placement import best_holder, parts_of, place_whole
from paceline.scheduling.prefix_tree import Match, Namespace, Node, Saved
from paceline.scheduling.saving import Saving


@dataclass(slots=True, eq=False)
class Export:
    """A path that somebody asks for. most: tokens of it that were there then; num_tried: that were saved once."""

    key: int
    namespace: Namespace
    tokens: bytes
    most: int
    num_tried: int = 0


class Exporting:
    """The paths that are asked for. find: what is known of one now. Of whole states there is what was saved when it could be."""

    def __init__(self, device: Device, find: Callable[[Namespace, bytes], Match], *, can_share_part: bool) -> None:
        self._device, self._find, self._can_share_part = device, find, can_share_part
        self._exports: list[Export] = []

    def ask(self, key: int, namespace: Namespace, tokens: bytes) -> None:
        """What there is of a path now is to be in host memory; `take_done` says when it is."""
        match = self._find(namespace, tokens)
        _, num_device = best_holder(match.nodes, match.length)
        self._exports.append(Export(key, namespace, tokens, num_device))

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for a path."""
        return bool(self._exports)

    def plan(self, most: int) -> None:
        """Notes down what this tick saves, at most so many tokens."""
        for export in self._exports:
            seq_id, missing = self._missing(export)
            saving = Saving(seq_id=seq_id, namespace=export.namespace, tokens=export.tokens, num_tried=export.num_tried)
            saves = saving.saves(missing, most)
            export.num_tried = saving.num_tried
            self._device.operations += saves
            most -= sum(one.end - one.start for one in saves)

    def take_done(self) -> list[Export]:
        """Those of which no more can be had, after the saves were carried out."""
        done = [one for one in self._exports if not self._missing(one)[1]]
        self._exports = [one for one in self._exports if one not in done]
        return done

    def ranges_of(self, namespace: Namespace, tokens: bytes) -> list[Saved]:
        """What host memory has of a path, from its first token on; of a memory that is saved whole, one state."""
        match = self._find(namespace, tokens)
        if not self._can_share_part:
            return [part.blob.data for part in place_whole(match, match.length).parts]
        parts = parts_of(match.nodes, 0, match.length)
        whole = takewhile(lambda part: (part.start, part.end) == (part.blob.start, part.blob.end), parts)
        return [part.blob.data for part in whole]  # saved ranges cannot be cut here

    def _missing(self, export: Export) -> tuple[int, list[tuple[int, int]]]:
        """What has to be saved yet, and from which sequence id; nothing where it was tried and did not fit."""
        if not self._can_share_part:
            return 0, []
        match = self._find(export.namespace, export.tokens)
        source, num_device = best_holder(match.nodes, min(match.length, export.most))
        if source is None or source.seq_id is None:
            return 0, []
        there = [node for node in match.nodes if node.start < num_device]
        missing = [(one.start, min(one.end, num_device)) for one in there if not _stands_alone(one, num_device)]
        is_stuck = bool(missing) and missing[0][0] < export.num_tried
        return source.seq_id, [] if is_stuck else missing


def _stands_alone(node: Node, num_tokens: int) -> bool:
    """Whether host memory has exactly this range of a path of so many tokens, and not a part of a larger one."""
    return node.blob is not None and (node.blob.start, node.blob.end) == (node.start, min(node.end, num_tokens))
