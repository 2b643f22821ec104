"""llama-server's slots: GET /slots, and POST /slots/{id} to save, restore and erase; on the event loop, files in threads.

The engine has no fixed places, so a slot's number is only a name. A request that names a slot runs at once, even if other
requests run under the same number. Save, restore and erase refer to the tokens that it leaves. Each tenant has its own numbers
and its own saved files, which others cannot name. `LlamaServerState` is the state that routes keep between requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.adapters import adapter_paths
from paceline.engine.prompts import KeyedPrompt
from paceline.errors import InvalidParams, StateError
from paceline.kv_cache import MediaItem
from paceline.request import RequestOptions
from paceline.scheduling.records import SlotView
from paceline.server.api_errors import ApiError, ApiException, invalid_request, not_supported
from paceline.server.dialects.llama_server.llama_bodies import SlotBody
from paceline.server.dialects.request_body import warned
from paceline.server.json_bodies import json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine import EngineClient


@dataclass(slots=True)
class LlamaServerState:
    """State between requests about a model. running: the settings of running requests by tenant and request id."""

    service: Service
    running: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _slots: VirtualSlots | None = None

    @property
    def adapters(self) -> dict[str, str]:
        """The files of the LoRA adapters by name, in the order of llama-server's ids, which is the order of loading.

        Before the model is loaded they are the adapters of its settings.
        """
        if self.service.is_loaded:
            return {adapter.name: Path(adapter.path).name for adapter in self.service.engine().loras()}
        given = adapter_paths(self.service.settings.engine_options.get("lora", ()))
        return {name: path.name for name, path in given.items()}

    @property
    def slots(self) -> VirtualSlots:
        """As many numbers as the engine has slots. Raises if it is not loaded."""
        if self._slots is None:
            self._slots = VirtualSlots(self.service.engine().limits.num_slots)
        return self._slots

    @property
    def scales(self) -> Mapping[str, float]:
        """Scales of adapters for requests without a `lora`; adapters without one are off."""
        return self.service.settings.lora_scales


@dataclass(frozen=True, slots=True)
class SlotContent:
    """The content of a slot's last sequence.

    Attributes:
        token_ids: Tokens of prompt and output.
        lora: The scales of its adapters.
        media: Its images and audio.
    """

    token_ids: tuple[int, ...] = ()
    lora: Mapping[str, float] = field(default_factory=dict)
    media: tuple[MediaItem, ...] = ()


_EMPTY = SlotContent()


@dataclass(slots=True)
class _VirtualSlot:
    held: SlotContent = _EMPTY
    num_running: int = 0
    used: int = 0  # the larger, the later


class VirtualSlots:
    """num_slots: how many numbers there are; a larger number counts modulo it, as in llama-server."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[tuple[str, int], _VirtualSlot] = {}
        self._turn = 0

    def begin(self, tenant: str, asked: int = -1) -> int:
        """Assign the requested slot; for -1 the least busy slot, and among several the longest unused."""
        number = asked % self.num_slots if asked >= 0 else self._idlest(tenant)
        slot = self._slot(tenant, number)
        self._turn += 1
        slot.used = self._turn
        slot.num_running += 1
        return number

    def end(self, tenant: str, number: int, left: SlotContent | None) -> None:
        """Release a slot. left: its content; None: unchanged."""
        slot = self._slot(tenant, number)
        slot.num_running -= 1
        if left is not None:
            slot.held = left

    def held(self, tenant: str, number: int) -> SlotContent:
        """Return the content of a slot."""
        return self._slot(tenant, number).held

    def put(self, tenant: str, number: int, held: SlotContent = _EMPTY) -> None:
        """Set a slot's content; by default none."""
        self._slot(tenant, number).held = held

    def _idlest(self, tenant: str) -> int:
        slots = [self._slot(tenant, number) for number in range(self.num_slots)]
        return min(range(self.num_slots), key=lambda number: (slots[number].num_running, slots[number].used))

    def _slot(self, tenant: str, number: int) -> _VirtualSlot:
        return self._slots.setdefault((tenant, number % self.num_slots), _VirtualSlot())


_MAX_NAME_LENGTH = 100  # characters; with a tenant's mark it still is a name for the engine
SLOTS_OFF = "This server does not support slots endpoint. Start it with `--slots`"
_TENANT_FILE = re.compile(r"tenant-[0-9a-f]{16}\.", re.IGNORECASE)  # as file systems may take it


ROUTES = Routes(RouteFacts(model="required"), tags=["llama-server"])


@ROUTES.get("/slots", summary="What each slot does")
async def slots(request: Request, fail_on_no_slot: str = "") -> Response:
    """List the slots; with `fail_on_no_slot` a 503 if all are busy.

    A slot with a request of another tenant shows only that it is busy, unless the key is an operator's.
    """
    service = Service.of(request.scope)
    state = service.part(LlamaServerState)
    if not service.settings.slots:
        raise not_supported(SLOTS_OFF)
    snapshot = await asyncio.wrap_future(service.engine().ask_slots())
    if fail_on_no_slot and all(slot.is_processing for slot in snapshot):
        estimate_wait_s = service.retry_after_s()
        raise ApiException(
            ApiError(503, "unavailable_error", "no_slot", "no slot available", retry_after_s=estimate_wait_s)
        )
    n_ctx, context = service.engine().limits.max_positions, RequestContext.of(request.scope)
    return json_response(
        [
            _slot_body(slot, n_ctx, state, is_shown=context.is_operator or slot.tenant == context.tenant)
            for slot in snapshot
        ]
    )


@ROUTES.post("/slots/{id_slot}", summary="Save, restore or erase what a slot holds", is_limited=False)
async def act(id_slot: str, request: Request, action: str = "", body: SlotBody | None = None) -> Response:
    """Save, restore or erase a slot, by `action`; the first two need `filename`, a name without folders."""
    service = Service.of(request.scope)
    state = service.part(LlamaServerState)
    if service.engine().config.state_folder is None:
        raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")
    if not id_slot.isascii() or not id_slot.isdigit() or len(id_slot) > 9:
        raise invalid_request("Invalid slot ID", "id_slot")
    warnings = [] if body is None else body.field_warnings(strict=service.settings.strict_fields)
    shown = warned(warnings)
    number, tenant = int(id_slot), RequestContext.of(request.scope).tenant
    match action:
        case "save":
            return json_response(await _save(state, tenant, number, _required_filename(body)) | shown)
        case "restore":
            return json_response(await _restore(state, tenant, number, _required_filename(body)) | shown)
        case "erase":
            return json_response(_erase(state, tenant, number) | shown)
        case _:
            raise invalid_request("Invalid action", "action")


async def _save(state: LlamaServerState, tenant: str, number: int, name: str) -> dict[str, Any]:
    """Save the KV state of the slot's last sequence to a file."""
    held = state.slots.held(tenant, number)
    if not held.token_ids:
        raise invalid_request(f"slot {number} holds nothing; complete a prompt with this id_slot before")
    if min(held.token_ids) < 0 and not held.media:
        raise invalid_request(f"slot {number} holds a prompt with images that was restored from a file; copy that")
    engine, file = state.service.engine(), _file_name(tenant, name)
    began = time.monotonic()
    options = RequestOptions(tenant=tenant, lora=dict(held.lora))
    prompt = KeyedPrompt(list(held.token_ids), held.media)
    num_saved = await asyncio.to_thread(engine.save_prefix, file, prompt, options)
    timings = {"save_ms": (time.monotonic() - began) * 1000}
    size = await asyncio.to_thread(_size, engine, file)
    return {"id_slot": number, "filename": name, "n_saved": num_saved, "n_written": size, "timings": timings}


async def _restore(state: LlamaServerState, tenant: str, number: int, name: str) -> dict[str, Any]:
    """Load a file into the prefix cache and assign it to the slot."""
    engine, scales, file = state.service.engine(), dict(state.scales), _file_name(tenant, name)
    options = RequestOptions(tenant=tenant, lora=scales)
    began = time.monotonic()
    try:
        ids = await asyncio.to_thread(engine.load_prefix, file, options)
    except StateError as error:
        raise invalid_request(f"Unable to restore slot: {str(error).replace(file, name)}", "filename") from None
    timings = {"restore_ms": (time.monotonic() - began) * 1000}
    state.slots.put(tenant, number, SlotContent(tuple(ids), scales))
    size = await asyncio.to_thread(_size, engine, file)
    return {"id_slot": number, "filename": name, "n_restored": len(ids), "n_read": size, "timings": timings}


def _erase(state: LlamaServerState, tenant: str, number: int) -> dict[str, Any]:
    """Forget the slot's last sequence. Its KV stays cached until the space is needed."""
    num_erased = len(state.slots.held(tenant, number).token_ids)
    state.slots.put(tenant, number)
    return {"id_slot": number, "n_erased": num_erased}


def _size(engine: EngineClient, file: str) -> int:
    folder = engine.config.state_folder
    return 0 if folder is None else (Path(folder) / file).stat().st_size


def _required_filename(body: SlotBody | None) -> str:
    if body is None or body.filename is None:
        raise InvalidParams('filename must be given, as in {"filename": "slot.bin"}')
    return body.filename


def _file_name(tenant: str, name: str) -> str:
    """Return the name of a tenant's file. Requests without a tenant cannot name such files; the engine checks the rest."""
    if len(name) > _MAX_NAME_LENGTH or name.startswith(".") or (not tenant and _TENANT_FILE.match(name)):
        raise invalid_request(f"Invalid filename: {name!r:.140} is too long, or begins as no name may here", "filename")
    return f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}.{name}" if tenant else name


def _slot_body(slot: SlotView, n_ctx: int, state: LlamaServerState, *, is_shown: bool) -> dict[str, Any]:
    """Return the description of a slot. is_shown: whether it has the details of its request."""
    shown: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": n_ctx,
        "speculative": state.service.engine().config.speculation is not None,
        "is_processing": slot.is_processing,
    }
    if not (slot.is_processing and is_shown):
        return shown
    params = state.running.get((slot.tenant, slot.request_id or ""))
    return shown | {
        "id_task": slot.key,
        "n_prompt_tokens": slot.num_computed_tokens,
        "n_prompt_tokens_processed": max(0, min(slot.num_computed_tokens, slot.num_prompt_tokens) - slot.num_cached),
        "n_prompt_tokens_cache": slot.num_cached,
        "cached_from": slot.cached_from,
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
