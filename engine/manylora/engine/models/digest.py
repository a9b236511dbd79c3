"""SHA-256 of model files, computed once and remembered until a file changes."""

import hashlib
import json
import os
from pathlib import Path

from manylora.engine.errors import ModelError

# Keys of config.json that say how a file was written, not what the model computes.
VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "_model_name_or_path")


def file_sha256(path: Path, cache_dir: Path) -> str:
    """SHA-256 (hex) of the file's content, remembered under `cache_dir` by size and time."""
    stat = path.stat()
    where = str(path.resolve())
    seen = [where, stat.st_size, stat.st_mtime_ns]
    note = cache_dir / "sha256" / f"{_text_sha256(where)}.json"
    try:
        *noted, digest = json.loads(note.read_text(encoding="utf-8"))
        if noted == seen:
            return str(digest)
    except (FileNotFoundError, ValueError):
        pass  # never hashed, or a note cut short
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    unfinished = note.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps([*seen, digest]), encoding="utf-8")
    unfinished.replace(note)
    return digest


def model_digest(folder: Path, cache_dir: Path) -> str:
    """SHA-256 (hex) that identifies a base model: its weight files and the meaning of its config.

    Independent of where the folder lies and of which version of transformers wrote it.

    Raises:
        ModelError: config.json is missing or not a JSON object.
    """
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a JSON object: {error}") from error
    for key in VOLATILE_CONFIG_KEYS:
        config.pop(key, None)
    weights = [
        [file.name, file_sha256(file, cache_dir)] for file in sorted(folder.glob("*.safetensors"))
    ]
    return _text_sha256(json.dumps(["manylora-base", 1, config, weights], sort_keys=True))


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
