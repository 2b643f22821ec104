"""llama.cpp's chat layer, compiled: what `paceline.chat` builds on.

A `CompiledTemplate` becomes, with one conversation, a `ChatPrompt`, which a `ChatParser` is made of. All are constant and may
be used by any thread; `native/chat_format.hpp` and `native/chat_parser.hpp` describe them.
"""

from paceline._native import ChatFormat as CompiledTemplate
from paceline._native import ChatParser, ChatPrompt

__all__ = ["ChatParser", "ChatPrompt", "CompiledTemplate"]
