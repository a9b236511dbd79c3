"""Keeps an engine process running: starts it, restarts it when it dies or hangs. Loads no torch."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import structlog

from manylora.engine.api import AdapterInfo, EngineInfo, EngineStats, Request, RequestOutput
from manylora.engine.config import EngineConfig
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.remote import RemoteEngine

logger = structlog.get_logger(__name__)

CONNECT_POLL_SECONDS = 0.05
START_SECONDS = 900.0  # to load the model
END_SECONDS = 5.0  # to end by itself
CANNOT_START = 2  # exit status: trying again would not help
REASON_SUFFIX = ".reason"  # beside the socket, the file that then says why
HANG_SECONDS = 120.0  # a step, or silence, of this length means that the process hangs
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 30.0


class SupervisedEngine:
    """Meets `EngineClient`; while the process is away, calls raise EngineUnavailableError."""

    def __init__(
        self,
        config: EngineConfig,
        run_dir: Path,
        *,
        hang_seconds: float = HANG_SECONDS,
        log_level: str = "info",
    ) -> None:
        """
        Args:
            run_dir: where the socket is put; made with mode 0700.
            log_level: the engine process's.
        """
        self._config = config
        self._run_dir = run_dir
        self._socket = run_dir / "engine.sock"
        self._hang_seconds = hang_seconds
        self._log_level = log_level
        self._process: asyncio.subprocess.Process | None = None
        self._remote: RemoteEngine | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.num_restarts = 0
        self.failure: str | None = None  # why it cannot start, for good

    @property
    def pid(self) -> int | None:
        """The engine process's id, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Begin to keep the process running; it loads its model in the background."""
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._keeping = asyncio.create_task(self._keep_running())

    async def info(self) -> EngineInfo:
        return await self._engine().info()

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        return self._engine().generate(request)

    async def load_adapter(self, digest: str) -> AdapterInfo:
        return await self._engine().load_adapter(digest)

    async def unload_adapter(self, digest: str) -> None:
        await self._engine().unload_adapter(digest)

    async def stats(self) -> EngineStats:
        return await self._engine().stats()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def _engine(self) -> RemoteEngine:
        if self.failure is not None:
            raise EngineUnavailableError("the engine cannot start")
        if self._remote is None:
            raise EngineUnavailableError("the engine is starting", retry_after=2.0)
        return self._remote

    async def wait_ended(self) -> None:
        """Return when the engine is no longer kept running: closed, or it cannot start."""
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    async def _keep_running(self) -> None:
        """Run processes one after another, until one says that it cannot start."""
        pause = FIRST_PAUSE_SECONDS
        while self.failure is None:
            try:
                served = await self._run_once()
            except Exception:
                logger.exception("engine_not_supervised")
                served = False
            if self.failure is not None:
                return
            pause = FIRST_PAUSE_SECONDS if served else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self.num_restarts += 1
            logger.warning("engine_restarting", restarts=self.num_restarts, pause_seconds=pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> bool:
        """Run one process to its end; whether it ever served."""
        self._socket.unlink(missing_ok=True)
        # The process ends when its standard input does, so it cannot outlive this one.
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "manylora.engine.server",
                str(self._socket),
                msgspec.json.encode(self._config).decode(),
                self._log_level,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is for this process alone
            )
        except OSError as error:  # no memory or no process to be had now
            logger.error("engine_not_started", reason=str(error))  # noqa: TRY400
            return False
        self._process = process
        try:
            self._remote = await self._connect(process)
            if self._remote is None:
                if process.returncode == CANNOT_START:
                    self.failure = self._socket.with_suffix(REASON_SUFFIX).read_text()
                return False
            await self._watch(self._remote)
            return True
        finally:
            if self._remote is not None:
                await self._remote.close()
            self._remote = None
            await asyncio.shield(_end(process))
            self._process = None

    async def _connect(self, process: asyncio.subprocess.Process) -> RemoteEngine | None:
        """The process's engine once its model is loaded; None when it ends or takes too long."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while process.returncode is None and asyncio.get_running_loop().time() < deadline:
            try:
                return await RemoteEngine.connect(self._socket)
            except EngineUnavailableError:
                await asyncio.sleep(CONNECT_POLL_SECONDS)
        return None

    async def _watch(self, remote: RemoteEngine) -> None:
        """Return when the process has gone or hangs."""
        lost = asyncio.create_task(remote.wait_lost())
        try:
            while remote.silent_seconds < self._hang_seconds:
                done, _ = await asyncio.wait([lost], timeout=min(1.0, self._hang_seconds / 4))
                if done:
                    return
            logger.error("engine_hangs", seconds=round(remote.silent_seconds))
        finally:
            lost.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the process end by itself, for which its input is closed, or else kill it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        code = await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        code = await process.wait()
    logger.info("engine_ended", code=code)
