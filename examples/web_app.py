"""Serve chats over HTTP with FastAPI: JSON or server-sent events, 429 if too many wait, and a shutdown that lets replies end.

python examples/web_app.py [model.gguf]
"""

import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

import paceline

SHUTDOWN_S = 30.0


class ChatBody(BaseModel):
    """A conversation, and how its reply is to come."""

    messages: list[dict[str, str]]
    max_tokens: int = Field(200, ge=1, le=1000)
    stream: bool = False


def make_app(model: str | None = None) -> FastAPI:
    # Four chats run, four wait, and the next one is refused. Without when_full="refuse" it would wait, too.
    llm = paceline.AsyncLLM(model, num_slots=4, max_queue=4, when_full="refuse")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await llm.start()  # loads the model; without it, the first request would
        yield
        await llm.aclose()

    app = FastAPI(lifespan=lifespan)
    app.state.llm = llm

    @app.exception_handler(paceline.PacelineError)
    async def failed(_: Request, error: paceline.PacelineError) -> Response:
        busy = isinstance(error, paceline.CapacityError)
        status = 429 if busy else 400 if isinstance(error, paceline.RequestError) else 503
        return JSONResponse({"code": error.code, "message": str(error)}, status)

    @app.post("/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        stream = llm.stream_chat(body.messages, max_tokens=body.max_tokens, interval=1 if body.stream else 16)
        await stream.open()  # submits the chat: what is refused raises here, before a response begins
        if body.stream:
            return StreamingResponse(events(stream), media_type="text/event-stream")
        async with stream:  # leaving the block cancels the chat
            async for _ in stream:
                if await request.is_disconnected():
                    return Response(status_code=499)
            reply = await stream.collect()
        return JSONResponse({"content": reply.content, "finish_reason": reply.finish_reason})

    return app


async def events(stream: paceline.AsyncChatStream) -> AsyncIterator[str]:
    """Starlette ends this generator when the client leaves, which leaves the block."""
    async with stream:
        try:
            async for chunk in stream:
                if chunk.content:
                    yield f"data: {json.dumps({'content': chunk.content})}\n\n"
            yield f"data: {json.dumps({'finish_reason': stream.finish_reason})}\n\n"
        except paceline.PacelineError as error:  # the response has begun: only an event can say it
            yield f"data: {json.dumps({'code': error.code, 'message': str(error)})}\n\n"


class Server(uvicorn.Server):
    """Ends the chats at the first signal: uvicorn ends the lifespan of an application after all responses have ended."""

    def __init__(self, app: FastAPI, port: int = 8000) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=port))
        self.llm: paceline.AsyncLLM = app.state.llm

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new chats and let running chats go on; after SHUTDOWN_S they end with the reason "shutdown"."""
        if not self.should_exit:
            threading.Thread(target=self.llm.close, kwargs={"drain": True, "timeout_s": SHUTDOWN_S}).start()
        super().handle_exit(sig, frame)


if __name__ == "__main__":
    Server(make_app(*sys.argv[1:])).run()
