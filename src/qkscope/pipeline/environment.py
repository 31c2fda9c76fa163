"""Which versions of everything are at work; torch-free, because tables are made without it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from qkscope._version import __version__

PROVENANCE_SCHEMA = 1
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "accelerate", "datasets")


def environment() -> dict[str, str]:
    """Versions of everything that could change a number."""
    found = {"qkscope": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
