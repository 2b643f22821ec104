"""What an engine leaves behind in this process: objects in cycles, and memory that the C library keeps for itself."""

from __future__ import annotations

import gc
import sys


def give_back_freed_memory() -> None:
    """Collect cycles, and give free memory back to the system where the C library can (`malloc_trim` of glibc).

    The vocabulary of an engine, 70 MB for 150,000 tokens, hangs on cycles, and a collection by itself may be long in coming.
    Engines are loaded on changing threads, whose heaps keep what was freed. Takes some tens of milliseconds.
    """
    gc.collect()
    if sys.platform == "linux":
        import ctypes  # late: it is of no use where nothing is unloaded

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
