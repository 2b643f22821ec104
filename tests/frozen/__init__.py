"""Answers of the program that a refactoring must not change. Each file here holds one of them, and a test compares it.

`python -m tests.frozen --write` writes the files again after an intended change. Placeholders replace values that differ
between runs or machines: ids, times, speeds, probabilities. Names, order and shape are kept.
"""
