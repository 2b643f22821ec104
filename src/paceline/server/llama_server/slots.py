"""GET /slots, and POST /slots/{id} to save, restore and erase. On the event loop; the engine is asked in threads.

What is saved belongs to a tenant: the files of one are not there for another.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidParams, StateError
from paceline.request import RequestOptions
from paceline.scheduling.slots_snapshot import SlotView
from paceline.server.exchange import Exchange
from paceline.server.json_bodies import JsonRoute
from paceline.server.llama_server.bodies import SlotBody
from paceline.server.llama_server.state import LlamaState
from paceline.server.llama_server.virtual_slots import Held
from paceline.server.llama_server.writing import bad_request, json_answer, not_enabled
from paceline.server.problems import Problem, Refused
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine.any_engine import AnyEngine

_LONGEST_NAME = 100  # characters; with a tenant's mark it still is a name for the engine
_OF_A_TENANT = re.compile(r"tenant-[0-9a-f]{16}\.", re.IGNORECASE)  # as file systems may take it


def routes(service: Service, state: LlamaState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.get("/slots", summary="What each slot does")
    async def slots(fail_on_no_slot: str = "") -> Response:
        """With `fail_on_no_slot` a 503 where every one is taken."""
        if not service.settings.slots:
            raise not_enabled("This server does not support slots endpoint. Start it with `--slots`")
        snapshot = await asyncio.wrap_future(service.engine().ask_slots())
        if fail_on_no_slot and all(slot.is_processing for slot in snapshot):
            wait_s = service.retry_after_s()
            raise Refused(Problem(503, "unavailable_error", "no_slot", "no slot available", retry_after_s=wait_s))
        n_ctx = service.engine().limits.max_positions
        return json_answer([_shown(slot, n_ctx, state) for slot in snapshot])

    @router.post("/slots/{id_slot}", summary="Save, restore or erase what a slot holds")
    async def act(id_slot: str, request: Request, action: str = "", body: SlotBody | None = None) -> Response:
        """`action`: save, restore or erase; for the first two `filename`, a name without folders."""
        if service.engine().config.state_folder is None:
            raise not_enabled("This server does not support slots action. Start it with `--slot-save-path`")
        if not id_slot.isascii() or not id_slot.isdigit() or len(id_slot) > 9:
            raise bad_request("Invalid slot ID", "id_slot")
        one = _Slot(service, state, int(id_slot), Exchange.of(request.scope).tenant)
        match action:
            case "save":
                return json_answer(await one.save(_name(body)))
            case "restore":
                return json_answer(await one.restore(_name(body)))
            case "erase":
                return json_answer(one.erase())
            case _:
                raise bad_request("Invalid action", "action")

    return router


class _Slot:
    """One number, as one tenant sees it."""

    def __init__(self, service: Service, state: LlamaState, number: int, tenant: str) -> None:
        self._engine: AnyEngine = service.engine()
        self._slots, self._number, self._tenant = state.slots, number, tenant
        self._scales = dict(state.scales)

    async def save(self, name: str) -> dict[str, Any]:
        """What memory has of what ran last."""
        held = self._slots.held(self._tenant, self._number)
        if not held.token_ids:
            raise bad_request(f"slot {self._number} holds nothing; complete a prompt with this id_slot before")
        file = _file_name(self._tenant, name)
        began = time.monotonic()
        options = RequestOptions(tenant=self._tenant, lora=dict(held.lora))
        num_saved = await asyncio.to_thread(self._engine.save_prefix, file, list(held.token_ids), options)
        took_s = time.monotonic() - began
        size = await asyncio.to_thread(self._size, file)
        return self._told(name) | {"n_saved": num_saved, "n_written": size, "timings": {"save_ms": took_s * 1000}}

    async def restore(self, name: str) -> dict[str, Any]:
        """Puts what was saved into memory, and has the number stand for it."""
        file = _file_name(self._tenant, name)
        options = RequestOptions(tenant=self._tenant, lora=self._scales)
        began = time.monotonic()
        try:
            ids = await asyncio.to_thread(self._engine.load_prefix, file, options)
        except StateError as error:
            raise bad_request(f"Unable to restore slot: {str(error).replace(file, name)}", "filename") from None
        took_s = time.monotonic() - began
        self._slots.put(self._tenant, self._number, Held(tuple(ids), self._scales))
        size = await asyncio.to_thread(self._size, file)
        return self._told(name) | {"n_restored": len(ids), "n_read": size, "timings": {"restore_ms": took_s * 1000}}

    def erase(self) -> dict[str, Any]:
        """Forgets what ran last. What memory has of it goes when its room is needed."""
        num_erased = len(self._slots.held(self._tenant, self._number).token_ids)
        self._slots.put(self._tenant, self._number)
        return {"id_slot": self._number, "n_erased": num_erased}

    def _told(self, name: str) -> dict[str, Any]:
        return {"id_slot": self._number, "filename": name}

    def _size(self, file: str) -> int:
        folder = self._engine.config.state_folder
        return 0 if folder is None else (Path(folder) / file).stat().st_size


def _name(body: SlotBody | None) -> str:
    if body is None or body.filename is None:
        raise InvalidParams('filename must be given, as in {"filename": "slot.bin"}')
    return body.filename


def _file_name(tenant: str, name: str) -> str:
    """The name that a tenant's file has; one that has no tenant cannot name those. The engine refuses what is no name."""
    if len(name) > _LONGEST_NAME or name.startswith(".") or (not tenant and _OF_A_TENANT.match(name)):
        raise bad_request(f"Invalid filename: {name!r:.140} is too long, or begins as no name may here", "filename")
    return f"{_mark(tenant)}.{name}" if tenant else name


def _mark(tenant: str) -> str:
    """What a tenant's files begin with."""
    return "tenant-" + hashlib.sha256(tenant.encode()).hexdigest()[:16]


def _shown(slot: SlotView, n_ctx: int, state: LlamaState) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": slot.is_processing,
    }
    if not slot.is_processing:
        return shown
    params = state.running.get(slot.request_id or "")
    return shown | {
        "id_task": slot.key,
        "n_prompt_tokens": slot.num_computed,
        "n_prompt_tokens_processed": max(0, min(slot.num_computed, slot.num_prompt) - slot.num_cached),
        "n_prompt_tokens_cache": slot.num_cached,
        **({} if params is None else {"params": params}),
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": False,
                "n_remain": -1 if slot.num_remaining is None else slot.num_remaining,
                "n_decoded": slot.num_generated,
            }
        ],
    }
