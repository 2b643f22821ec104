"""Kill the worker process in the middle of a stream: the stream goes on, token for token.

python examples/crash_recovery.py
"""

import os
import signal

import paceline


def main() -> None:
    # Greedy text has near ties; with these, rounding does not depend on which cells of the KV cache a sequence has.
    exact = paceline.LLM(
        isolation="process", num_slots=2, n_ctx=2048, n_threads=1, flash_attn="off", type_k="f32", type_v="f32"
    )
    with exact as llm:
        expected = llm.generate("Once upon a time", max_tokens=60, temperature=0).text
        text, is_killed = "", False
        with llm.stream("Once upon a time", max_tokens=60, temperature=0, max_buffered_tokens=5) as stream:
            for chunk in stream:
                text += chunk.text
                worker = llm.heartbeat().worker_pid
                if len(text) > 40 and not is_killed and worker is not None:
                    os.kill(worker, signal.SIGKILL)
                    is_killed = True
        print(text)
        print("worker restarts:", llm.heartbeat().num_restarts, "- same text:", text == expected)


if __name__ == "__main__":
    main()
