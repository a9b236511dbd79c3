"""Record the steps of two tenants' traffic on the demo model, for `manylora replay` and `advise`.

    python examples/record_steps.py steps.jsonl [--no-enable-prefix-caching] [--num-kv-blocks N]

acme's users talk to its pirate, turn by turn, after a system message that is the same for all of
them; globex has short texts continued by the base model, no two of which begin alike.
"""

import argparse
from pathlib import Path

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import AdapterInfo, Request

SYSTEM = (
    "You are the ship's clerk of the Acme shipping company. You answer questions of passengers "
    "about luggage, meals, cabins and the weather in one or two sentences, you never promise what "
    "the captain has to decide, and you send whoever complains to the purser on the upper deck."
)
QUESTIONS = (
    "May I bring my parrot?",
    "What will it cost?",
    "And who feeds it at night?",
)
TEXTS = ("Snow fell on", "Bread needs", "In 1969", "My neighbour", "Prices of tin", "Few owls")
USERS = 4


def main() -> None:
    options = read_options()
    adapter = Path(__file__).parent / "adapters" / "pirate"
    with LLM(
        "demo",
        step_trace=str(options.file),
        enable_prefix_caching=options.enable_prefix_caching,
        num_kv_blocks=options.num_kv_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as llm:
        pirate = llm.load_adapter(adapter)
        said = [[{"role": "system", "content": SYSTEM}] for _ in range(USERS)]
        for turn, question in enumerate(QUESTIONS):
            ask_all(llm, pirate, said, question, turn)
        stats = llm.stats()
    print(
        f"{stats.num_steps} steps, {stats.prompt_tokens} prompt tokens, "
        f"{stats.prefix_hit_tokens} of them found in the prefix cache, "
        f"{stats.num_preemptions} preemptions: {options.file}"
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--num-kv-blocks", type=int, default=96)
    return parser.parse_args()


def ask_all(
    llm: LLM, pirate: AdapterInfo, said: list[list[dict[str, str]]], question: str, turn: int
) -> None:
    """One turn of every conversation, and some texts beside them, all in the engine at once."""
    answers: dict[str, str] = {}
    for user, messages in enumerate(said):
        messages.append({"role": "user", "content": f"{question} I am passenger {user}."})
        name = f"acme-{user}-{turn}"
        answers[name] = ""
        add(llm, name, llm.core.text.encode_chat(messages), "acme", pirate)
    for text in TEXTS[2 * turn : 2 * turn + 2]:
        name = f"globex-{text.split()[0].lower()}"
        answers[name] = ""
        add(llm, name, llm.core.text.encode(text), "globex", None)
    while llm.core.has_work:
        for output in llm.core.step():
            answers[output.request_id] += output.text
    for user, messages in enumerate(said):
        messages.append({"role": "assistant", "content": answers[f"acme-{user}-{turn}"]})


def add(llm: LLM, name: str, prompt: list[int], tenant: str, adapter: AdapterInfo | None) -> None:
    llm.core.add(
        Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0, max_tokens=24),
            tenant=tenant,
            adapter=None if adapter is None else adapter.ref,
        )
    )


if __name__ == "__main__":
    main()
