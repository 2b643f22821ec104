"""From a conversation to a prompt. Any thread but the engine's and the event loop's."""
