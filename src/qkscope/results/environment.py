"""Which versions of everything are at work; torch-free, because tables are made without it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from qkscope._version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "accelerate", "datasets")
NUMERIC = ("torch", "transformers")


def environment() -> dict[str, str]:
    """Versions of everything that could change a number."""
    versions = {"qkscope": __version__, "python": platform.python_version(), "platform": platform.platform()}
    installed = {package: _installed(package) for package in PACKAGES}
    return versions | {package: number for package, number in installed.items() if number is not None}


def numeric_versions() -> dict[str, str | None]:
    """Versions of what computes the sums: parts made by different ones are not added up."""
    return {"qkscope": __version__, **{package: _installed(package) for package in NUMERIC}}


@cache
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
