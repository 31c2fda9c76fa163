"""Where shards run. An engine is a module here with a class `<Name>Engine`, and a name in `ENGINES`."""

from __future__ import annotations

import importlib

from qkscope.errors import InputError
from qkscope.run.engines.base import BaseEngine

ENGINES = ("local", "ray")


def find_engine(name: str) -> BaseEngine:
    """The engine of this name."""
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    engine: BaseEngine = getattr(importlib.import_module(f"{__name__}.{name}"), f"{name.title()}Engine")()
    return engine
