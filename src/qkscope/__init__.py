"""qkscope: how the attention heads of a language model learn position.

Importing it is instant: torch, transformers and pandas are loaded by the function that needs them.
"""

from typing import Any

from qkscope._version import __version__

_HOMES = {
    "capture_moments": "qkscope.api",
    "token_windows": "qkscope.api",
    "analyze": "qkscope.api",
    "predict": "qkscope.api",
    "ablate_heads": "qkscope.api",
    "Moments": "qkscope.moments.moments",
    "load": "qkscope.api",
    "load_results": "qkscope.api",  # what `load` was called in 0.2
    "run_study": "qkscope.run.execute",
    "QkscopeError": "qkscope.errors",
}

__all__ = [
    "Moments",
    "QkscopeError",
    "__version__",
    "ablate_heads",
    "analyze",
    "capture_moments",
    "load",
    "predict",
    "run_study",
    "token_windows",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("report", "train"):  # rooms: the first can be called, the second has the callbacks
        return import_module(f"qkscope.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'qkscope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
