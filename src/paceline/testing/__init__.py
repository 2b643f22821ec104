"""Things for tests, shipped so that users can test their own code with them too.

`paceline.testing.models` writes tiny random models of many architectures (it needs the optional package `gguf`).
"""
