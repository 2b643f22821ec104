"""Fuzzers: by hand for as long as one likes, and in a short form in the suite."""
