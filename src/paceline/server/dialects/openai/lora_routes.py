"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. On the event loop, the engine in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline.errors import AdapterError, AdapterInUse, AdapterNotFound, PacelineError
from paceline.server.api_errors import (
    OPENAI_FORM,
    ApiException,
    api_error_of,
    invalid_request,
    naming_param,
    not_supported,
)
from paceline.server.dialects.openai.openai_requests import LoadLoraBody, UnloadLoraBody
from paceline.server.json_bodies import OPENAI_ERRORS
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service

_THREADS = ThreadPoolExecutor(
    4, "paceline-lora"
)  # an unload may wait for long, and other routes need the loop's threads
_PARAMS = {"name": "lora_name", "path": "lora_path", "in_place": "load_inplace"}


def routes() -> Routes:
    """Return the routes."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["LoRA"], responses=OPENAI_ERRORS)

    @router.post(
        "/v1/load_lora_adapter",
        summary="Load a LoRA adapter",
        response_class=PlainTextResponse,
        operator=True,
    )
    async def load(body: LoadLoraBody, request: Request) -> Response:
        """Load a LoRA adapter, which requests may name as their `model` from then on. Needs --enable-lora-loading."""
        service = Service.of(request.scope)
        _check_allowed(service)
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        engine, name = service.engine(), body.lora_name
        if name in service.names or name.removesuffix(":latest") in service.names:
            raise invalid_request(f"lora_name: {name!r:.200} is the model's own name; take another one", "lora_name")
        try:
            await _call(lambda: engine.load_lora(name, body.lora_path, in_place=bool(body.load_inplace)))
        except AdapterError as error:
            is_there = await asyncio.to_thread(_is_file, body.lora_path)
            raise _with_status(error, 400 if is_there else 404, "lora_path") from error
        return _done(f"Success: the LoRA adapter {name!r} is loaded", warnings)

    @router.post(
        "/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter",
        response_class=PlainTextResponse,
        operator=True,
    )
    async def unload(body: UnloadLoraBody, request: Request) -> Response:
        """Refuse new requests with a LoRA adapter, wait until the open ones have ended, and free it.

        409 if they do not end within `timeout_s`; then the adapter stays. Needs --enable-lora-loading.
        """
        service = Service.of(request.scope)
        _check_allowed(service)
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        engine, name, scales = service.engine(), body.lora_name, dict(service.settings.lora_scales)
        if name in scales:  # else requests that name no adapter would be refused, too
            service.set_lora_scales({one: scale for one, scale in scales.items() if one != name})
        try:
            await _call(lambda: engine.unload_lora(name, timeout_s=body.timeout_s))
        except Exception:
            if name in scales and any(one.name == name for one in engine.loras()):
                service.set_lora_scales({name: scales[name], **service.settings.lora_scales})
            raise
        return _done(f"Success: the LoRA adapter {name!r} is unloaded", warnings)

    return router


def _done(message: str, warnings: list[str]) -> Response:
    return PlainTextResponse("\n".join([message, *(f"Warning: {warning}" for warning in warnings)]))


async def _call(function: Callable[[], None]) -> None:
    """Call the engine in a thread. Raises with the field at fault, and the status of adapters that are not there or in use."""
    try:
        with naming_param(LoadLoraBody.model_fields, **_PARAMS):
            await asyncio.get_running_loop().run_in_executor(_THREADS, function)
    except AdapterNotFound as error:
        raise _with_status(error, 404, "lora_name") from error
    except AdapterInUse as error:
        raise _with_status(error, 409, "lora_name") from error


def _is_file(path: str) -> bool:
    with suppress(OSError):
        return Path(path).is_file()
    return False


def _with_status(error: PacelineError, status: int, param: str) -> ApiException:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return ApiException(replace(api_error_of(error), status=status, type=kind, param=param, retry_after_s=None))


def _check_allowed(service: Service) -> None:
    if not service.settings.lora_loading:
        raise not_supported(
            "This server does not load adapters while it runs. Start it with `--enable-lora-loading`, for clients that may "
            "have it read any file"
        )
