"""What reads like a `Generation` and has one: the parts that all such share. On the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from paceline.server.generating import Batch, Readable


class WrappedGeneration:
    """A generation as it is; those who change what is read of it have their own `batches`."""

    def __init__(self, generation: Readable) -> None:
        self._generation = generation

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """See `Generation`."""
        return self._generation.prompts

    @property
    def heartbeat_s(self) -> float:
        """See `Generation`."""
        return self._generation.heartbeat_s

    @property
    def is_abandoned(self) -> bool:
        """See `Generation`."""
        return self._generation.is_abandoned

    def batches(self) -> AsyncIterator[Batch]:
        """See `Generation`."""
        return self._generation.batches()

    def cancel(self) -> None:
        """See `Generation`."""
        self._generation.cancel()

    async def __aenter__(self) -> Self:
        await self._generation.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, trace)
