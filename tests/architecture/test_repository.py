"""What is tracked: small files of our own, and no trace of the machine they were written on."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20
MACHINE_PATH = re.compile(r"(?<![\w.}~-])/(?:work|root|home|Users)/\w")
BINARY_SUFFIXES = {".safetensors", ".png", ".jpg", ".gguf"}


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def test_no_large_file_is_tracked() -> None:
    def limit(path: Path) -> float:
        is_demo_adapter = ROOT / "examples" / "adapters" in path.parents
        return 1.5 * MEBIBYTE if is_demo_adapter else MEBIBYTE

    assert names([path for path in tracked() if path.stat().st_size > limit(path)]) == []


def test_no_third_party_script_is_tracked() -> None:
    scripts = [path for path in tracked() if path.suffix in {".js", ".mjs", ".css"}]

    minified = [
        path
        for path in scripts
        if ".min." in path.name or max(map(len, path.read_text().splitlines()), default=0) > 300
    ]

    assert names(minified) == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    texts = [path for path in tracked() if path.suffix not in BINARY_SUFFIXES]

    assert names([path for path in texts if MACHINE_PATH.search(path.read_text())]) == []


def test_python_files_stay_short_enough_to_read() -> None:
    def limit(path: Path) -> int:
        return 400 if ROOT / "tests" in path.parents else 300

    lines = {path: path.read_text().count("\n") for path in tracked() if path.suffix == ".py"}

    assert names([path for path, count in lines.items() if count > limit(path)]) == []
