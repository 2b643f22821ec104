"""Returns the memory of an unloaded engine to the system: objects in cycles, and blocks that the C library keeps."""

from __future__ import annotations

import gc

from paceline.runtime import trim_heap


def give_back_freed_memory() -> None:
    """Collect cycles, and return freed memory to the system. Takes some tens of milliseconds.

    Engines are loaded on changing threads, whose heaps keep freed blocks.
    """
    gc.collect()
    trim_heap()
