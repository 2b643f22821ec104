"""Ask for three stories at once, keep the first that ends, cancel the others.

python examples/async_race.py
"""

import asyncio

import paceline


async def tell(llm: paceline.AsyncLLM, animal: str) -> str:
    async with llm.stream(f"There was a {animal}", max_tokens=300) as stream:
        text = [chunk.text async for chunk in stream]
    return f"There was a {animal}" + "".join(text)


async def main() -> None:
    async with paceline.AsyncLLM(num_slots=3) as llm:
        tasks = [asyncio.create_task(tell(llm, animal)) for animal in ("fox", "bear", "duck")]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()  # cancels its request too
        await asyncio.gather(*others, return_exceptions=True)
        print(done.pop().result())
        print(f"{len(others)} tasks cancelled, slots in use: {(await llm.slots()).num_processing}")


if __name__ == "__main__":
    asyncio.run(main())
