"""paceline's server beside llama-server, llama-cpp-python's and xllamacpp's: `python -m benchmarks.peers --help`."""
