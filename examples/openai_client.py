"""Use the server with the openai package: a chat, and a stream that is stopped half way.

paceline serve &
python examples/openai_client.py [http://127.0.0.1:8080]
"""

import sys

import openai


def main(url: str = "http://127.0.0.1:8080") -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            max_completion_tokens=60,
        )
        print(completion.choices[0].message.content)

        with client.completions.create(model=model, prompt="A bear", max_tokens=500, stream=True) as stream:
            for number, chunk in enumerate(stream):
                print(chunk.choices[0].text, end="", flush=True)
                if number == 20:
                    break  # closes the connection, which cancels the request
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
