"""A worker that waits for the next load: launched after a load, whatever came of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from paceline.errors import ModelLoadError
from paceline.model_manager import ModelEntry, PreparedModel, engine_loader
from paceline.model_manager.engine_loader import AsyncLLMLoader


def prepared(isolation: str) -> PreparedModel:
    return PreparedModel(
        entry=ModelEntry(name="m", model="m.gguf"), needed_bytes=None, model="m.gguf", options={"isolation": isolation}
    )


class NoSpares:
    """In the place of the workers that wait."""

    def __init__(self) -> None:
        self.num_launched = 0

    def launch(self) -> None:
        self.num_launched += 1


@pytest.mark.parametrize(
    ("keeps_spare", "isolation", "num_launched"), [(True, "process", 1), (False, "process", 0), (True, "thread", 0)]
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_is_launched_behind_a_load(
    monkeypatch: pytest.MonkeyPatch, keeps_spare: bool, isolation: str, num_launched: int, fails: bool
) -> None:
    """Only if the loader was asked for it, and the model has a worker."""
    spares = NoSpares()

    class StandIn:
        engine = None

        def __init__(self, model: object, **options: Any) -> None:
            assert spares.num_launched == 0

        async def start(self) -> None:
            if fails:
                raise ModelLoadError("it is damaged")

        async def aclose(self) -> None:
            """Nothing."""

    monkeypatch.setattr(engine_loader, "AsyncLLM", StandIn)
    monkeypatch.setattr(engine_loader, "SPARE_WORKERS", spares)
    monkeypatch.setattr(engine_loader, "_SPARE_DELAY_S", 0.0)

    async def main() -> None:
        loader = AsyncLLMLoader(keeps_spare=keeps_spare)
        try:
            await loader.load(prepared(isolation), lambda _: None, threading.Event())
        except ModelLoadError:
            assert fails
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert spares.num_launched == num_launched
