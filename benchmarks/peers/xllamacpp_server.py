"""Serve with xllamacpp's own server; runs in its environment: xllamacpp_server.py -m MODEL [-np N] [-c N] --host H --port P."""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    """Parse the flags of llama-server that the workloads use, and serve until a signal."""
    import xllamacpp  # type: ignore[import-not-found] # in an environment of its own

    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-np", dest="n_parallel", type=int, default=4)
    parser.add_argument("-c", dest="n_ctx", type=int, default=0)
    parser.add_argument("-b", dest="n_batch", type=int, default=2048)
    parser.add_argument("-ub", dest="n_ubatch", type=int, default=512)
    parser.add_argument("--kv-unified", dest="kv_unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    for name in ("n_parallel", "n_ctx", "n_batch", "n_ubatch", "kv_unified", "port"):
        setattr(params, name, getattr(options, name))
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
