"""The engine in a process of its own: what goes over the socket, and who answers for a death."""
