"""qkscope: how the attention heads of a language model learn position."""

from qkscope._version import __version__

__all__ = ["__version__"]
