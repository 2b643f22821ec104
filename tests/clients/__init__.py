"""Frameworks that speak OpenAI's API, against a server of ours; see `__main__`."""
