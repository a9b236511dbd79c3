"""One base model, many adapters: the engine. `LLM` is its offline front door.

Importing this package loads no torch: the control plane imports `manylora.engine.api`
and friends through it. Only touching `LLM` does.
"""

from typing import TYPE_CHECKING, Any

from manylora.engine.api import SamplingParams

if TYPE_CHECKING:
    from manylora.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from manylora.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
