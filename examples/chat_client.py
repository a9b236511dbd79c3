"""Chat with every model that a key may use, through the official OpenAI client.

    python examples/chat_client.py                       # the tenants of `make serve`
    python examples/chat_client.py --base-url http://127.0.0.1:8000/v1 --key sk-…

For each key: the models it lists, one answer each, then all of them again at the same time and
streamed. manylora runs such requests in one batch, each with its own adapter.
"""

import argparse
import asyncio
import json
from pathlib import Path

from openai import AsyncOpenAI, OpenAI

QUESTION = "Why is the sky blue?"


def main() -> None:
    options = read_options()
    for name, base_url, key in accounts(options):
        with OpenAI(base_url=base_url, api_key=key) as client:
            listed = [model.id for model in client.models.list()]
            models = [name for name in listed if "@" not in name]  # `a@live` is what `a` means
            print(f"\n{name} may use: {', '.join(listed)}\n\n> {options.question}")
            for model in models:
                print(f"{model:>24}: {answer(client, model, options)}")
        print("\nand all at once, streamed:")
        asyncio.run(stream_all(base_url, key, models, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", action="append", help="an API key; may be given several times")
    parser.add_argument("--demo-file", type=Path, default=Path("data/demo.json"))
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=60)
    return parser.parse_args()


def accounts(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(name, base URL, key) of each account: those given, else those that `make serve` made."""
    if options.key:
        return [(f"key {n}", options.base_url, key) for n, key in enumerate(options.key, 1)]
    demo = json.loads(options.demo_file.read_text(encoding="utf-8"))
    base_url = demo["base_url"].removesuffix("/").removesuffix("/v1") + "/v1"
    return [(tenant["name"], base_url, tenant["key"]) for tenant in demo["tenants"]]


def answer(client: OpenAI, model: str, options: argparse.Namespace) -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        temperature=0,
    )
    return completion.choices[0].message.content or ""


async def stream_all(
    base_url: str, key: str, models: list[str], options: argparse.Namespace
) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        answers = await asyncio.gather(*(stream(client, model, options) for model in models))
    for model, (text, num_deltas) in zip(models, answers, strict=True):
        print(f"{model:>24}: {text}  [{num_deltas} pieces]")


async def stream(client: AsyncOpenAI, model: str, options: argparse.Namespace) -> tuple[str, int]:
    """The text of a streamed answer, and the number of pieces it came in."""
    chunks = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        temperature=0,
        stream=True,
    )
    deltas = [
        chunk.choices[0].delta.content
        async for chunk in chunks
        if chunk.choices and chunk.choices[0].delta.content
    ]
    return "".join(deltas), len(deltas)


if __name__ == "__main__":
    main()
