"""Train a LoRA adapter for the demo model on a JSONL file of short chats.

    python examples/train_adapter.py examples/data/pirate.jsonl my-pirate

A line of the file is {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}. The loss is
taken on the answers only. The result is a folder in PEFT's format that manylora serves as it is.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from manylora.engine.models.source import resolve_model

IGNORED = -100  # the label that PyTorch's cross entropy leaves out


def main() -> None:
    options = read_options()
    torch.manual_seed(options.seed)
    folder = resolve_model(options.model, progress=print).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=options.targets.split(","),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    config.base_model_name_or_path = options.base_name  # instead of a path on this machine
    model.print_trainable_parameters()

    examples = [tokenize(chat, tokenizer) for chat in read_chats(options.data)]
    train(model, examples, options)
    save(model, options.out)
    print(f"saved to {options.out}")
    for question in options.ask:
        print(f"\n{question}")
        print("  adapter:", answer(model, tokenizer, question))
        with model.disable_adapter():
            print("  base:   ", answer(model, tokenizer, question))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="JSONL file of chats")
    parser.add_argument("out", type=Path, help="folder to write the adapter to")
    parser.add_argument("--model", default="demo", help="'demo', a folder, a GGUF file or a hub id")
    parser.add_argument(
        "--base-name",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="what adapter_config.json says the adapter was trained for",
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--targets", default="q_proj,v_proj", help="linear layers to adapt")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ask", action="append", default=[], help="a question to try at the end")
    return parser.parse_args()


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """One chat a line; empty lines are passed over, a broken one is named."""
    chats = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            chats.append(json.loads(line)["messages"])
        except (ValueError, KeyError, TypeError):
            raise SystemExit(f"{path}, line {number}: not a JSON object with messages") from None
    return chats


def tokenize(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Token ids of a chat, and the labels: the same ids, with all but the answer ignored."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer_ids = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    answer_ids.append(end_of_turn)
    return prompt + answer_ids, [IGNORED] * len(prompt) + answer_ids


def train(
    model: PeftModel,
    examples: list[tuple[list[int], list[int]]],
    options: argparse.Namespace,
) -> None:
    """AdamW with a learning rate that falls linearly to zero."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    batches_per_epoch = -(-len(examples) // options.batch_size)
    num_steps = options.epochs * batches_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    order = random.Random(options.seed)
    began = time.monotonic()
    model.train()
    for epoch in range(1, options.epochs + 1):
        order.shuffle(examples)
        losses = []
        for start in range(0, len(examples), options.batch_size):
            loss = model(**collate(examples[start : start + options.batch_size])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.monotonic() - began
        print(
            f"epoch {epoch}/{options.epochs}  loss {sum(losses) / len(losses):.3f}  {seconds:.0f} s"
        )


def collate(batch: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Pad a batch on the right; padding is neither attended to nor counted in the loss."""
    longest = max(len(token_ids) for token_ids, _ in batch)
    return {
        "input_ids": padded([ids for ids, _ in batch], longest, 0),
        "attention_mask": padded([[1] * len(ids) for ids, _ in batch], longest, 0),
        "labels": padded([labels for _, labels in batch], longest, IGNORED),
    }


def padded(rows: list[list[int]], length: int, filler: int) -> Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


def save(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files, the weights in bfloat16: half the size, and precise enough."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in get_peft_model_state_dict(model).items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)


@torch.inference_mode()
def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    model.eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=60)
    new_ids = output[0, prompt["input_ids"].shape[1] :]
    text: str = tokenizer.decode(new_ids, skip_special_tokens=True)
    return text


if __name__ == "__main__":
    main()
