"""llama.cpp as safe Python objects: models, tokenizers, contexts, samplers."""
