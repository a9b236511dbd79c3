"""Adapters in host memory by digest, loaded off the engine thread, least recently used out."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
    """`scale * (b @ (a @ x))`: a [R, in], b [out, R], in the model's dtype."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter in host memory."""

    digest: str
    modules: Mapping[str, LoraMatrices]  # by the base model's module path
    info: AdapterInfo


def load_adapter(
    folder: Path,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    max_lora_rank: int,
    was_checked: bool = False,
) -> AdapterWeights:
    """Check a PEFT folder and read its weights into the model's dtype.

    Raises:
        AdapterError: it would not be applied exactly.
    """
    file = read_adapter(folder, config, max_lora_rank=max_lora_rank, was_checked=was_checked)
    return AdapterWeights(
        digest=file.digest,
        modules={
            m.path: LoraMatrices(
                _tensor(file.weights, m.a, dtype), _tensor(file.weights, m.b, dtype), m.scale
            )
            for m in file.modules
        },
        info=AdapterInfo(digest=file.digest, report=file.report()),
    )


def _tensor(weights: SafetensorsFile, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """A copy, as the file may go away."""
    data = torch.frombuffer(bytearray(weights.data(entry)), dtype=_DTYPES[entry.dtype])
    tensor = data.view(entry.shape).to(dtype, copy=True)
    if not bool(tensor.isfinite().all()):
        raise AdapterError([f"{entry.name} has numbers that do not fit {dtype}"])
    return tensor


class AdapterCache:
    """Host memory's adapters. Only the engine thread calls it; one worker thread loads."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        max_lora_rank: int,
        max_adapters: int,
        store: Path | None,
    ) -> None:
        """
        Args:
            store: a folder of PEFT folders named by digest; None when all come from `add_folder`.
        """
        self._config = config
        self._dtype = dtype
        self._max_lora_rank = max_lora_rank
        self._max_adapters = max_adapters
        self._store = store
        self._folders: dict[str, Path] = {}  # of adapters outside the store
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()
        self.num_loads = 0  # into memory, since the start
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
        self.num_loads += 1
        self._loaded[weights.digest] = weights

    def drop(self, digest: str) -> None:
        """Forget an adapter; one of the store can be loaded again."""
        self._loaded.pop(digest, None)
        self._folders.pop(digest, None)

    @property
    def has_loads(self) -> bool:
        return bool(self._loading)

    def is_loading(self, digest: str) -> bool:
        return digest in self._loading

    def add_folder(self, folder: Path) -> AdapterInfo:
        """Load a PEFT folder outside the store now; it can be loaded again from there.

        Raises:
            AdapterError: it would not be applied exactly.
        """
        weights = load_adapter(
            folder, self._config, dtype=self._dtype, max_lora_rank=self._max_lora_rank
        )
        self._folders[weights.digest] = folder
        self.put(weights)
        return weights.info

    def check_known(self, digest: str) -> None:
        """
        Raises:
            AdapterNotFoundError: it is neither in memory nor in the store.
        """
        if digest not in self._loaded and digest not in self._loading:
            self._folder(digest)

    def begin_load(self, digest: str) -> Future[AdapterWeights]:
        """Start loading an adapter unless it is loaded or on its way.

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
            self._folder(digest)
            self._loading[digest] = self._worker.submit(self._load, digest)
        return self._loading[digest]

    def make_ready(self, needed: Sequence[str]) -> None:
        """Begin to load what is needed first, as much as there is room for; others make room."""
        first = needed[: self._max_adapters]
        for digest in [d for d in self._loaded if d not in first]:
            if len({*self._loaded, *self._loading, *first}) <= self._max_adapters:
                break
            del self._loaded[digest]
        for digest in first:
            if len(self._loading) + len(self._loaded) >= self._max_adapters:
                break
            if digest not in self._loaded and digest not in self._loading:
                self._loading[digest] = self._worker.submit(self._load, digest)

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

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _folder(self, digest: str) -> Path:
        if digest in self._folders:
            return self._folders[digest]
        if self._store is not None and _DIGEST.fullmatch(digest):
            folder = self._store / digest
            if folder.is_dir():
                return folder
        raise AdapterNotFoundError(digest)

    def _load(self, digest: str) -> AdapterWeights:
        try:
            weights = load_adapter(
                self._folder(digest),
                self._config,
                dtype=self._dtype,
                max_lora_rank=self._max_lora_rank,
                was_checked=True,
            )
        except AdapterError:
            raise
        except AdapterNotFoundError as error:
            raise AdapterError(["its files are gone from the adapter store"]) from error
        except Exception as error:
            logger.exception("adapter_unreadable", digest=digest)
            raise AdapterError(
                [f"the adapter could not be read: {type(error).__name__}"]
            ) from error
        if weights.digest != digest:
            raise AdapterError([f"the folder of {digest} holds adapter {weights.digest}"])
        return weights
