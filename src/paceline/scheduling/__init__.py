"""What goes into the next tick: pure, without threads, clocks or llama.cpp."""
