"""Mixture-of-experts language models larger than memory, straight from their published files."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finback.config import EngineConfig, SamplingParams
    from finback.errors import CheckpointError, FinbackError, RequestError
    from finback.llm import LLM, ChatCompletion, Completion
    from finback.text.chat import ChatOptions

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "RequestError",
    "LLM",
    "ChatCompletion",
    "ChatOptions",
    "Completion",
    "EngineConfig",
    "FinbackError",
    "Request",
    "SamplingParams",
    "Score",
]

_HOMES = {
    "CheckpointError": "finback.errors",
    "RequestError": "finback.errors",
    "LLM": "finback.llm",
    "ChatCompletion": "finback.llm",
    "ChatOptions": "finback.text.chat",
    "Completion": "finback.llm",
    "Request": "finback.llm",
    "Score": "finback.llm",
    "EngineConfig": "finback.config",
    "FinbackError": "finback.errors",
    "SamplingParams": "finback.config",
}


def __dir__() -> list[str]:
    """List the public names before they are imported, for completion."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'finback' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
