"""The child process of `source.py`: GGUF to a Hugging Face folder, and downloads from the hub.

Reports on stdout, a JSON object a line: `{"progress": text}` and at the end `{"folder": path}`.
A failure is one line on stderr and exit status 1.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from manylora.engine.errors import ModelError

# Qwen2Tokenizer's, from transformers' models/qwen2/tokenization_qwen2.py.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HUB_FILES = ("*.json", "*.jinja", "*.safetensors")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as bfloat16 safetensors with tokenizer and template.

    Raises:
        ModelError: the file is damaged, or its architecture or tokenizer is not known here.
    """
    pre_tokenizer = _pre_tokenizer_name(gguf)
    _report(progress="loading PyTorch")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # It refuses a file path with a GGUF name: the folder and the name come apart.
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        correct_pre_tokenizer(tokenizer.backend_tokenizer, pre_tokenizer)
        _report(progress="unpacking the weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            quantization_config=GgufConfig(dequantize=True),  # else saving fails
            dtype=torch.bfloat16,
            **where,
        )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise ModelError(f"{gguf.name} cannot be converted: {error}") from error
    _report(progress="writing safetensors")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def correct_pre_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    """Give a tokenizer made from a GGUF the pre-tokenizer that the GGUF names.

    A GGUF carries it by name only (`tokenizer.ggml.pre`), and transformers' conversion always
    takes GPT-2's. The names are llama.cpp's.

    Raises:
        ModelError: the name is not known here.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif name == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif name == "qwen2":
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    else:
        raise ModelError(
            f"the GGUF's pre-tokenizer {name!r} is not known here, and guessing would change "
            "token ids: give --model the model's Hugging Face folder instead"
        )


def _pre_tokenizer_name(gguf: Path) -> str:
    """Read it first: refusing takes a moment, converting does not.

    Raises:
        ModelError: the file is damaged or its tokenizer is not byte-level BPE.
    """
    from gguf import GGUFReader

    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{gguf.name} is not a GGUF file that can be read: {error}") from error
    kind = fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else None
    if kind != "gpt2":
        raise ModelError(
            f"the GGUF's tokenizer is {kind!r}, and only byte-level BPE ('gpt2') is converted: "
            "give --model the model's Hugging Face folder instead"
        )
    name = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    correct_pre_tokenizer(Tokenizer.from_str(_EMPTY_TOKENIZER), name)
    return str(name)


_EMPTY_TOKENIZER = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


def download(hub_id: str) -> Path:
    """Fetch a model from the Hugging Face hub into its own cache.

    Raises:
        ModelError: the hub cannot be reached or does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except RepositoryNotFoundError as error:
        reason = "the hub has no such public model"
        raise ModelError(_unreachable(hub_id, reason)) from error
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached, and its local cache does not have the model"
        raise ModelError(_unreachable(hub_id, reason)) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_unreachable(hub_id, type(error).__name__)) from error


def _unreachable(hub_id: str, reason: str) -> str:
    return (
        f"{hub_id} could not be fetched from the Hugging Face hub ({reason}); "
        "give --model a local Hugging Face folder or a GGUF file instead"
    )


def _report(**what: str) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """`gguf FILE FOLDER` or `hub ID`."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        if arguments[0] == "gguf":
            folder = Path(arguments[2])
            convert_gguf(Path(arguments[1]), folder)
        else:
            folder = download(arguments[1])
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _report(folder=str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
