"""Fetches htmx for the admin pages: out of the PyPI wheel that carries it, checked by hash.

The repository holds no third-party script and the pages load none from elsewhere. `make` runs
this once; the file is git-ignored and shipped in our wheel. Standard library only.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "django-htmx==1.29.0"  # carries htmx 2.0.10; nothing else of it is used
MEMBER = "django_htmx/static/django_htmx/htmx-2.min.js"
SHA256 = "71ea67185bfa8c98c39d31717c6fce5d852370fcdfd129db4543774d3145c0de"
TARGET = Path(__file__).parent / "manylora" / "web" / "static" / "htmx.min.js"


def main() -> None:
    if not is_genuine(TARGET):
        write_atomically(TARGET, read_from_wheel())


def is_genuine(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def read_from_wheel() -> bytes:
    """Downloads the wheel into a temporary folder and returns the script in it.

    Raises:
        SystemExit: pip failed, or the script is not the one that was reviewed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        result = subprocess.run([*command, "--dest", folder, WHEEL], check=False)  # noqa: S603 - fixed words
        if result.returncode != 0:
            raise SystemExit(f"htmx: pip could not download {WHEEL}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            script = archive.read(MEMBER)
    found = hashlib.sha256(script).hexdigest()
    if found != SHA256:
        raise SystemExit(f"htmx: {MEMBER} of {WHEEL} has SHA-256 {found}, expected {SHA256}")
    return script


def write_atomically(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(".part")
    staged.write_bytes(content)
    staged.replace(target)


if __name__ == "__main__":
    main()
