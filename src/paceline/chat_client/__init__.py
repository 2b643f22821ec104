"""Chats of the library: `LLM.chat` and its relatives, with Python functions as tools, typed results and conversations.

chat_arguments: the keywords of a call. chat_call: one conversation of a call, from messages to the reply, over as many rounds
as its tools take. chat_methods: the methods that `LLM` and `AsyncLLM` inherit. chat_streams: chats while they are generated.
function_tools: Python functions as tools. response_models: types as JSON schemas, and back. conversations: `Conversation`.

On the caller's threads; templates are rendered and messages parsed there, never on the engine's thread or an event loop.
"""
