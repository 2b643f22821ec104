"""Routing over simulated replicas: our choice beside others, on the real scheduler and cache with a fake backend and clock."""
