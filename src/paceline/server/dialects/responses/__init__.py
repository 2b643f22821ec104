"""OpenAI's Responses API: responses made of items, streamed as named events, and kept if the server has a store."""
