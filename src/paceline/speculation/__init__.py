"""Speculation: drafts of the next tokens, and how many of them pay. Pure."""
