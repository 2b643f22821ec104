"""Ollama's API: chats, completions, embeddings, the model; docs/guide/ollama.md has the differences."""
