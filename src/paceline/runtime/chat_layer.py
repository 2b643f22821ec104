"""llama.cpp's chat layer, compiled: what `paceline.chat` builds on.

A `CompiledTemplate` becomes, with one conversation, a `ChatPrompt`, which a `ChatParser` is made of. All are constant and may
be used by any thread; `native/chat_format.hpp` and `native/chat_parser.hpp` describe them.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline import _native
from paceline._native import ChatParser, ChatPrompt
from paceline.errors import Closed
from paceline.runtime.native_core import Closeable

__all__ = ["ChatParser", "ChatPrompt", "CompiledTemplate"]


class CompiledTemplate(Closeable):
    """The chat template of one vocabulary. Keeps its model alive until it is closed.

    After `close()` rendering raises `Closed`; `source`, `bos`, `eos` and `capabilities` stay.
    """

    def __init__(self, model: _native.Model, source: str) -> None:
        """Compile Jinja source. Raises `TemplateError` if it does not parse, and `InvalidParams` for a lone surrogate."""
        native = _native.ChatFormat(model, source)
        self._native: _native.ChatFormat | None = native
        self.source: str = native.source
        self.bos: str = native.bos
        self.eos: str = native.eos
        self.capabilities: Mapping[str, bool] = native.capabilities

    @property
    def native(self) -> _native.ChatFormat:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed("the chat template was closed with its model")
        return self._native

    def apply(self, request: bytes) -> ChatPrompt:
        """Render a conversation, given as JSON; the GIL is released meanwhile. Raises `TemplateError`, `Closed`."""
        return self.native.apply(request)

    def close(self) -> None:
        """Free the memory; idempotent."""
        self._native = None
