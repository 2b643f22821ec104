"""Kill the worker process in the middle of a stream: the stream goes on, and no token is lost or comes twice.

python examples/crash_recovery.py
"""

import os
import signal

import paceline


def main() -> None:
    with paceline.LLM(isolation="process", num_slots=2, n_ctx=2048) as llm:
        num_tokens, is_killed = 0, False
        with llm.stream("Once upon a time", max_tokens=60, ignore_eos=True, max_buffered_tokens=5) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                num_tokens += len(chunk.token_ids)
                worker = llm.heartbeat().worker_pid
                if num_tokens > 10 and not is_killed and worker is not None:
                    os.kill(worker, signal.SIGKILL)
                    is_killed = True
        print(f"\nworker restarts: {llm.heartbeat().num_restarts} - tokens: {num_tokens}")


if __name__ == "__main__":
    main()
