"""Prints how much pip downloads to install manylora here: number of files and megabytes.

Asks a current pip what it would install into an empty environment, then each file's size. Nothing
is installed or kept. Arguments go to pip: `--extra-index-url URL`, `.[dev]` in place of `.`.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(arguments: list[str]) -> None:
    sizes = {url: size_in_bytes(url) for url in files_to_install(arguments or ["."])}
    for url, size in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        sys.stdout.write(f"{size / 1e6:9.1f} MB  {url.rsplit('/', 1)[-1]}\n")
    sys.stdout.write(f"{sum(sizes.values()) / 1e6:9.1f} MB  in {len(sizes)} files\n")


def files_to_install(arguments: list[str]) -> list[str]:
    """The address of each file pip would fetch, by its own report."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip"]
        # Before 25, --dry-run downloads every wheel in full just to read its metadata.
        subprocess.run([*pip, "install", "--quiet", "pip>=25"], check=True)  # noqa: S603 - fixed words
        report = Path(folder) / "report.json"
        dry_run = ["install", "--dry-run", "--quiet", "--ignore-installed", "--report", str(report)]
        pinned = ["--constraint", "constraints.txt", *arguments]
        subprocess.run([*pip, *dry_run, *pinned], check=True, cwd=ROOT)  # noqa: S603 - ours
        entries = json.loads(report.read_text())["install"]
    return [
        entry["download_info"]["url"]
        for entry in entries
        if "dir_info" not in entry["download_info"]  # manylora itself
    ]


def size_in_bytes(url: str) -> int:
    if url.startswith("file://"):
        return Path(urllib.request.url2pathname(url.removeprefix("file://"))).stat().st_size
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - an address pip gave us
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return int(answer.headers["Content-Length"])


if __name__ == "__main__":
    main(sys.argv[1:])
