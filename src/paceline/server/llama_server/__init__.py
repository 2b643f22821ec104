"""llama-server's own endpoints: request and response bodies are the original's; docs/guide/llama_server.md has what differs."""
