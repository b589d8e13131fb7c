"""Mixture-of-experts language models larger than memory, straight from their published files."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finback.config import EngineConfig, SamplingParams
    from finback.errors import FinbackError
    from finback.llm import LLM, ChatCompletion, Completion
    from finback.text.chat import ChatOptions

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ChatCompletion",
    "ChatOptions",
    "Completion",
    "EngineConfig",
    "FinbackError",
    "SamplingParams",
]

_HOMES = {
    "LLM": "finback.llm",
    "ChatCompletion": "finback.llm",
    "ChatOptions": "finback.text.chat",
    "Completion": "finback.llm",
    "EngineConfig": "finback.config",
    "FinbackError": "finback.errors",
    "SamplingParams": "finback.config",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'finback' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
