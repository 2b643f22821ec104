"""Several models behind one server, as llama-server's router has them: by name, loaded when they are asked for."""
