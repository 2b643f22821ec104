"""Trains the demo model that sees: pictures of shapes, questions about them, an encoder, and their files."""
