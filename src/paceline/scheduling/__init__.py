"""The content of the next tick: pure, without threads, clocks or llama.cpp."""
