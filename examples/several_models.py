"""Two models in the memory for one: each is loaded when it is used, and unloaded when the other model needs the memory.

python examples/several_models.py [models.toml]
"""

import sys

import paceline

BOTH = [
    paceline.ModelEntry(name="one", options={"num_slots": 2, "n_ctx": 512}),  # no file: the demo model
    paceline.ModelEntry(name="two", options={"num_slots": 4, "n_ctx": 1024}),
]


def main(file: str | None = None) -> None:
    with paceline.ModelManager(BOTH if file is None else file, max_loaded=1, memory_budget="2 GiB") as models:
        for name in [*models.names(), models.names()[0]]:
            with models.use(name) as llm:
                print(f"{name}: Once upon a time{llm.generate('Once upon a time', max_tokens=12).text}")
        for status in models.statuses():
            print(f"{status.name} needs {(status.needed_bytes or 0) >> 20} MiB and is {status.state}")


if __name__ == "__main__":
    main(*sys.argv[1:])
