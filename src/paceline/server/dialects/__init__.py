"""The HTTP dialects: OpenAI's, the Responses API's, Anthropic's, Ollama's and llama-server's."""
