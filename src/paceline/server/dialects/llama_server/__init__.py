"""llama-server's own endpoints and bodies; docs/guide/llama_server.md lists the differences."""
