"""OpenAI's Responses API: responses made of items, streamed as named events, and kept where the user configures a store."""
