"""A rig with a disk cache without threads: saved ranges are written at once, and found ranges wait for `deliver`."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.unit.kv_cache.prefix_rig import Rig

from paceline.engine.core import Ask
from paceline.engine.disk_blocks import ModelFolder
from paceline.engine.disk_cache import DiskOptions, DiskTier
from paceline.kv_cache import DiskBlocks, DiskLookup, Namespace, Save, SavedState, SaveState
from paceline.observability.metrics import Metrics
from paceline.testing.fake_backend import FakeState


class StoreAtOnce:
    """A `DiskStore` without threads."""

    def __init__(self, folder: Path, kind: str, max_bytes: int = 1 << 30, model: bytes = b"m" * 16) -> None:
        self.options = DiskOptions(
            max_bytes=max_bytes,
            max_pending=1 << 30,
            has_cells=kind in ("attention", "sliding_window", "hybrid"),
            has_states=kind != "attention",
        )
        self.folder = ModelFolder(folder, model)
        self.tier = DiskTier(self.folder, self.options, lambda key: key.encode().ljust(16), FakeState.of, Metrics())
        self.found: deque[tuple[DiskLookup, DiskBlocks]] = deque()
        self.num_unsaved = 0

    def put(self, save: Save | SaveState, data: SavedState) -> None:
        with suppress(OSError):
            self.tier.write(save, data)
            self.tier.touch(save.namespace, save.tokens)

    def look_up(self, lookup: DiskLookup) -> bool:
        found = self.tier.find(lookup)
        if found:
            self.found.append((lookup, self.tier.read(lookup, found)))
        return bool(found)

    def note_use(self, namespace: Namespace, tokens: bytes) -> None:
        self.tier.touch(namespace, tokens)

    def note_unsaved(self) -> None:
        self.num_unsaved += 1


class DiskRig(Rig):
    """A rig whose `run` also delivers what is read, and then saves idle prefixes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = StoreAtOnce(folder, options.get("kind", "attention"), **options.pop("of_store", {}))
        super().__init__(store=self.store, **options)

    def deliver(self) -> None:
        """Hand everything that was read to the engine."""
        while self.store.found:
            lookup, blocks = self.store.found.popleft()
            self.tell(lambda scheduler, lookup=lookup, blocks=blocks: scheduler.end_lookup(lookup, blocks))

    def tell(self, begin: Any) -> None:
        """Have the engine do something before its next tick."""
        self._next_key += 1
        self.imported[self._next_key] = None

        def run(engine: Any) -> Any:
            begin(engine.scheduler)
            return list

        self.commands.queue.append(Ask(self._next_key, run, may_change_cache=True))

    def run(self, *args: Any, **options: Any) -> None:
        super().run(*args, **options)
        while self.store.found:
            self.deliver()
            super().run(*args, **options)

    def settle(self) -> None:
        """As when an engine has been idle for a while: everything is written."""
        self.tell(lambda scheduler: scheduler.kv_cache.save_idle())
        self.run()
