"""Adapters in host memory by digest, loaded off the engine thread, least recently used out."""

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor

from manylora.engine.adapter_format import read_adapter
from manylora.engine.api import AdapterInfo
from manylora.engine.errors import AdapterError, AdapterNotFoundError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.safetensors_file import SafetensorsFile, TensorEntry

logger = structlog.get_logger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")  # anything else could name a folder outside the store
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """`scale * (b @ (a @ x))`: a [R, in], b [out, R], as stored."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter in host memory."""

    digest: str
    modules: Mapping[str, LoraMatrices]  # by the base model's module path
    info: AdapterInfo


def load_adapter(folder: Path, config: DecoderConfig, *, max_lora_rank: int) -> AdapterWeights:
    """Check a PEFT folder and read its weights.

    Raises:
        AdapterError: it would not be applied exactly.
    """
    file = read_adapter(folder, config, max_lora_rank=max_lora_rank)
    return AdapterWeights(
        digest=file.digest,
        modules={
            m.path: LoraMatrices(_tensor(file.weights, m.a), _tensor(file.weights, m.b), m.scale)
            for m in file.modules
        },
        info=AdapterInfo(digest=file.digest, report=file.report()),
    )


def _tensor(weights: SafetensorsFile, entry: TensorEntry) -> Tensor:
    data = bytearray(weights.data(entry))  # a copy: the file may go away
    return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape)


class AdapterCache:
    """Host memory's adapters. Only the engine thread calls it; one worker thread loads."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_lora_rank: int,
        max_adapters: int,
        store: Path | None,
    ) -> None:
        """
        Args:
            store: a folder of PEFT folders named by digest, or None when adapters are only `put`.
        """
        self._config = config
        self._max_lora_rank = max_lora_rank
        self._max_adapters = max_adapters
        self._store = store
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._loading: dict[str, Future[AdapterWeights]] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-loader")

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def is_loaded(self, digest: str) -> bool:
        return digest in self._loaded

    def get(self, digest: str) -> AdapterWeights:
        """A loaded adapter, now the most recently used."""
        self._loaded.move_to_end(digest)
        return self._loaded[digest]

    def put(self, weights: AdapterWeights) -> None:
        self._loaded[weights.digest] = weights

    def drop(self, digest: str) -> None:
        self._loaded.pop(digest, None)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def begin_load(self, digest: str) -> Future[AdapterWeights]:
        """Start loading an adapter of the store unless it is loaded or on its way.

        Returns:
            A future of its weights; it may raise AdapterError.

        Raises:
            AdapterNotFoundError: the store has no such folder.
        """
        if digest in self._loaded:
            done: Future[AdapterWeights] = Future()
            done.set_result(self.get(digest))
            return done
        if digest not in self._loading:
            if self._store is None or not _DIGEST.fullmatch(digest):
                raise AdapterNotFoundError(digest)
            folder = self._store / digest
            if not folder.is_dir():
                raise AdapterNotFoundError(digest)
            self._loading[digest] = self._worker.submit(self._load, digest, folder)
        return self._loading[digest]

    def finish_loads(self) -> dict[str, AdapterError]:
        """Take over what the worker has loaded; the errors of what it could not, by digest."""
        errors: dict[str, AdapterError] = {}
        for digest in [d for d, future in self._loading.items() if future.done()]:
            future = self._loading.pop(digest)
            error = future.exception()
            if error is None:
                self.put(future.result())
            else:
                assert isinstance(error, AdapterError)
                errors[digest] = error
        return errors

    def evict(self, in_use: Collection[str]) -> None:
        """Bring the cache back to its size; adapters of queued or running sequences stay."""
        for digest in [d for d in self._loaded if d not in in_use]:
            if len(self._loaded) <= self._max_adapters:
                return
            del self._loaded[digest]

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _load(self, digest: str, folder: Path) -> AdapterWeights:
        try:
            weights = load_adapter(folder, self._config, max_lora_rank=self._max_lora_rank)
        except AdapterError:
            raise
        except Exception as error:
            logger.exception("adapter_unreadable", digest=digest)
            raise AdapterError(
                [f"the adapter could not be read: {type(error).__name__}"]
            ) from error
        if weights.digest != digest:
            raise AdapterError([f"the store's folder {digest} holds adapter {weights.digest}"])
        return weights
