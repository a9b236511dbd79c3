"""What an upload would be told, as plain data. Runs in a short-lived process; loads no torch."""

from pathlib import Path
from typing import Any

from manylora.engine.adapter_format import read_adapter
from manylora.engine.errors import AdapterError
from manylora.engine.models.config import DecoderConfig


def check_adapter(folder: Path, model: Path, *, max_lora_rank: int) -> dict[str, Any]:
    """Check a PEFT folder against a model folder.

    Returns:
        `accepted`; `digest` or None; `reasons`, empty when accepted; `report`.

    Raises:
        ModelError: the model folder cannot be read or is not supported.
    """
    config = DecoderConfig.from_folder(model)
    try:
        file = read_adapter(folder, config, max_lora_rank=max_lora_rank)
    except AdapterError as error:
        return {"accepted": False, "digest": None, "reasons": list(error.reasons), "report": {}}
    return {"accepted": True, "digest": file.digest, "reasons": [], "report": file.report()}
