"""The engine in a worker process: its front, the protocol between them, and recovery after a crash."""
