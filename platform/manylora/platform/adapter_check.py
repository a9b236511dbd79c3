"""The check of an untrusted adapter, in a short-lived child process with limits."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from manylora.engine.errors import AdapterError
from manylora.platform.errors import CheckFailedError

log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 60.0
MEMORY_LIMIT_BYTES = 8 << 30
_ACCEPTED, _REFUSED = 0, 1
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")  # no secrets


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check found."""

    accepted: bool
    digest: str | None
    reasons: tuple[str, ...]
    report: dict[str, Any]


AdapterChecker = Callable[[Path], Awaitable[CheckResult]]


class ChildProcessCheck:
    """Runs `manylora check-adapter` on a folder, one at a time.

    Calling it raises CheckFailedError when the child dies, which is not the adapter's fault.
    """

    def __init__(self, model_folder: Path, *, max_lora_rank: int) -> None:
        self._model_folder = model_folder
        self._max_lora_rank = max_lora_rank
        self._turn = asyncio.Semaphore(1)

    async def __call__(self, folder: Path) -> CheckResult:
        async with self._turn:
            return await self._check(folder)

    async def _check(self, folder: Path) -> CheckResult:
        process = await asyncio.create_subprocess_exec(
            *self._command(folder),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
        except TimeoutError:
            reason = f"the check took longer than {TIMEOUT_SECONDS:.0f} s"
            return CheckResult(accepted=False, digest=None, reasons=(reason,), report={})
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        result = _parse(out) if process.returncode in (_ACCEPTED, _REFUSED) else None
        if result is None:
            ending = err.decode(errors="replace")[-2000:]
            log.error("adapter_check_died", returncode=process.returncode, stderr=ending)
            raise CheckFailedError
        return result

    def _command(self, folder: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "manylora",
            "check-adapter",
            str(folder),
            "--model",
            str(self._model_folder),
            "--max-lora-rank",
            str(self._max_lora_rank),
            "--memory-limit-bytes",
            str(MEMORY_LIMIT_BYTES),
        ]


def _parse(out: bytes) -> CheckResult | None:
    """What the child said; None: it died of an error, which exits as a refusal does."""
    try:
        found = json.loads(out)
    except ValueError:
        return None
    return CheckResult(
        accepted=found["accepted"],
        digest=found["digest"],
        reasons=AdapterError(found["reasons"]).reasons,  # kept short, whatever the child says
        report=found["report"],
    )
