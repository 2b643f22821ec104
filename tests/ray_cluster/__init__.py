"""A cluster on a local Ray, as its operator has it: replicas that are killed, rolling updates, a router that restarts."""
