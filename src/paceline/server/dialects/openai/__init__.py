"""OpenAI's API: models, completions, chat completions and embeddings. Request and response bodies are OpenAI's."""
