"""How many requests are being answered, and when there is none. On the event loop."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Traffic:
    """Enter it for as long as one is answered."""

    def __init__(self) -> None:
        self.count = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def quiet(self) -> None:
        """Waits until nothing is being answered."""
        await self._quiet.wait()

    def __enter__(self) -> None:
        self.count += 1
        self._quiet.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.count -= 1
        if not self.count:
            self._quiet.set()
