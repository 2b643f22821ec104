"""OpenAI's files and batches: /v1/files and /v1/batches. On the event loop; files are read and written in threads."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from fastapi import Query
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message

from paceline.errors import InvalidParams
from paceline.server.api_errors import OPENAI_FORM, ApiException, invalid_request
from paceline.server.batch_jobs import FILE_LIFE_S, WINDOW_S, BatchJobs
from paceline.server.batch_store import (
    BatchOwner,
    BatchStore,
    StoredBatch,
    StoredFile,
    new_batch_id,
    new_file_id,
)
from paceline.server.dialects.request_body import RequestBody, optional
from paceline.server.json_bodies import OPENAI_ERRORS, json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes

_MAX_FIELDS: Final = 16
_PIECE_BYTES: Final = 1 << 18
_MIN_LIFE_S: Final = 3600
_MAX_METADATA: Final = 16

ROUTES = Routes(RouteFacts(errors=OPENAI_FORM), tags=["OpenAI"], responses=OPENAI_ERRORS)
Record = TypeVar("Record", StoredFile, StoredBatch)


def _jobs(request: Request) -> BatchJobs:
    jobs: BatchJobs = request.app.state.batches
    return jobs


def _tenant(request: Request) -> str:
    return RequestContext.of(request.scope).tenant


# ---- files

_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "Requests, one a line."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "string",
                            "description": "3600 to 2592000, which is the default.",
                        },
                    },
                }
            }
        },
    }
}


@ROUTES.post("/v1/files", summary="Upload a file of requests", takes_forms=True, openapi_extra=_FORM)
async def upload(request: Request) -> Response:
    """Upload a file for a batch. It is deleted after 30 days, or the seconds of `expires_after`."""
    store = await _jobs(request).store()
    form = await _in_pieces(request).form(max_files=1, max_fields=_MAX_FIELDS)
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidParams("file is missing; send it as a part of multipart/form-data with a filename")
        if purpose != "batch":
            raise InvalidParams(f"purpose must be 'batch', not {purpose!r:.80}")
        now = int(time.time())
        record = StoredFile(
            id=new_file_id(),
            bytes=file.size or 0,
            created_at=now,
            filename=(file.filename or "file")[:255],
            purpose="batch",
            expires_at=now + _life_s(form.get("expires_after[anchor]"), form.get("expires_after[seconds]")),
        )
        await asyncio.to_thread(store.add_file, _tenant(request), record, file.file)
    finally:
        await form.close()
    return json_response(record)


def _in_pieces(request: Request) -> Request:
    """Return a request whose body comes in pieces: a form is parsed on the event loop, piece by piece."""
    body = memoryview(b"")
    is_read = False

    async def receive() -> Message:
        nonlocal body, is_read
        if not is_read:
            body, is_read = memoryview(await request.body()), True
        await asyncio.sleep(0)
        piece, body = bytes(body[:_PIECE_BYTES]), body[_PIECE_BYTES:]
        return {"type": "http.request", "body": piece, "more_body": bool(body)}

    return Request(request.scope, receive)


def _life_s(anchor: object, seconds: object) -> int:
    if anchor is None and seconds is None:
        return FILE_LIFE_S
    if anchor != "created_at":
        raise InvalidParams(f"expires_after[anchor] must be 'created_at', not {anchor!r:.80}")
    if not isinstance(seconds, str) or not seconds.isdecimal() or not _MIN_LIFE_S <= int(seconds) <= FILE_LIFE_S:
        raise InvalidParams(f"expires_after[seconds] must be {_MIN_LIFE_S} to {FILE_LIFE_S}, not {seconds!r:.80}")
    return int(seconds)


@ROUTES.get("/v1/files", summary="The files")
async def files(
    request: Request,
    *,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Literal["batch", "batch_output"] | None = None,
) -> Response:
    """List the tenant's files, the latest first by default."""
    store, tenant = await _jobs(request).store(), _tenant(request)
    found = await asyncio.to_thread(
        lambda: store.files(tenant, after, limit, descending=order == "desc", purpose=purpose)
    )
    return _page(*found)


@ROUTES.get("/v1/files/{file_id}", summary="A file")
async def file(file_id: str, request: Request) -> Response:
    """Return facts of a file; 404 if the API key's tenant has no such file."""
    _, found = await _file(request, file_id)
    return json_response(found)


@ROUTES.get(
    "/v1/files/{file_id}/content",
    summary="The contents of a file",
    responses={200: {"description": "The contents", "content": {"application/octet-stream": {}}}},
)
async def content(file_id: str, request: Request) -> Response:
    """Return the contents of a file: requests, or results or errors of a batch."""
    store, found = await _file(request, file_id)
    return FileResponse(store.path(found.id), media_type="application/octet-stream")


@ROUTES.delete("/v1/files/{file_id}", summary="Delete a file")
async def delete(file_id: str, request: Request) -> dict[str, Any]:
    """Delete a file, unless a batch that runs reads it."""
    store, found = await _file(request, file_id)
    await asyncio.to_thread(store.delete_file, _tenant(request), found.id)
    return {"id": found.id, "object": "file", "deleted": True}


async def _file(request: Request, file_id: str, param: str = "file_id") -> tuple[BatchStore, StoredFile]:
    store = await _jobs(request).store()
    found = await asyncio.to_thread(store.file, _tenant(request), file_id)
    if found is None:
        raise _not_found("file", param, file_id)
    return store, found


# ---- batches


class BatchBody(RequestBody):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=256, description="A file that was uploaded for a batch.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        description="The url of all of its requests."
    )
    completion_window: Literal["24h"] = Field("24h", description="The time until it expires.")
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = optional(
        "Texts that the batch keeps.", max_length=_MAX_METADATA
    )


@ROUTES.post("/v1/batches", summary="Run the requests of a file")
async def create(body: BatchBody, request: Request) -> Response:
    """Run the requests of a file, below the priority of interactive requests."""
    jobs, context = _jobs(request), RequestContext.of(request.scope)
    warnings = body.field_warnings(strict=request.app.state.service.settings.strict_fields)
    _, found = await _file(request, body.input_file_id, "input_file_id")
    if found.purpose != "batch":
        raise invalid_request(f"input_file_id: {found.id} is the output of a batch", "input_file_id")
    now = int(time.time())
    batch = StoredBatch(
        id=new_batch_id(),
        endpoint=body.endpoint,
        input_file_id=found.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=body.metadata,
    )
    answer = msgspec.to_builtins(batch)
    await jobs.create(batch, BatchOwner(context.tenant, context.key_digest.hex()))
    return json_response(answer | ({"warnings": warnings} if warnings else {}))


@ROUTES.get("/v1/batches", summary="The batches")
async def batches(
    request: Request, *, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """List the tenant's batches, the latest first."""
    jobs = _jobs(request)
    store = await jobs.store()
    found, has_more = await asyncio.to_thread(store.batches, _tenant(request), after, limit)
    return _page([jobs.with_current_counts(batch) for batch in found], has_more)


@ROUTES.get("/v1/batches/{batch_id}", summary="A batch")
async def batch(batch_id: str, request: Request) -> Response:
    """Return a batch with its status and counts; 404 if the API key's tenant has no such batch."""
    return json_response(await _batch(request, batch_id))


@ROUTES.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
async def cancel(batch_id: str, request: Request) -> Response:
    """Cancel a batch. Results so far are kept; requests that were not run are errors."""
    found = await _batch(request, batch_id)
    if found.status in ("completed", "failed", "expired"):
        raise invalid_request(f"the batch has ended: it is {found.status}", "batch_id", "batch_ended", status=409)
    await _jobs(request).cancel(found)
    return json_response(found)


async def _batch(request: Request, batch_id: str) -> StoredBatch:
    found = await _jobs(request).batch(_tenant(request), batch_id)
    if found is None:
        raise _not_found("batch", "batch_id", batch_id)
    return found


def _page(data: list[Record], has_more: bool) -> Response:
    ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ends, "has_more": has_more})


def _not_found(kind: str, param: str, given: str) -> ApiException:
    return invalid_request(f"there is no {kind} {given[:80]!r} here", param, f"{kind}_not_found", status=404)
