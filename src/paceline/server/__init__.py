"""paceline over HTTP: the APIs of OpenAI and of llama-server, in front of one engine. Runs on an event loop."""
