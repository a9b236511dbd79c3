"""The adapters that lines call by name: their folders, and what lies in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manylora.engine.adapter_format import read_adapter
from manylora.engine.errors import EngineError, InvalidRequestError
from manylora.engine.models.config import DecoderConfig


def adapter_folder(name: str, folders: Mapping[str, Path]) -> Path:
    """
    Raises:
        InvalidRequestError: it is neither one of the names nor a folder.
    """
    folder = folders.get(name, Path(name))
    try:
        is_there = bool(name) and folder.is_dir()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL
        is_there = False
    if not is_there:
        raise InvalidRequestError(
            f"adapter: {name} is neither a folder nor a name of --lora-modules", param="adapter"
        )
    return folder


@dataclass(frozen=True, slots=True)
class AdapterDigests:
    """Digests of adapters by name, each read once and without an engine."""

    model: Path
    folders: Mapping[str, Path]
    max_lora_rank: int
    _found: dict[str, str | EngineError] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """
        Raises:
            InvalidRequestError: there is no such adapter.
            AdapterError: it would not be applied exactly.
        """
        if name not in self._found:
            try:
                self._found[name] = self._read(name)
            except EngineError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, EngineError):
            raise found
        return found

    def _read(self, name: str) -> str:
        config = DecoderConfig.from_folder(self.model)
        folder = adapter_folder(name, self.folders)
        return read_adapter(folder, config, max_lora_rank=self.max_lora_rank).digest
