"""Anthropic's API: messages, whole and streamed, and the count of their tokens; docs/guide/anthropic.md has the differences."""
