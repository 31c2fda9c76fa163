"""Where shards run. An engine is one module here with a class `<Name>Engine`; the module's name is the engine's."""

from __future__ import annotations

import importlib
import pkgutil

from qkscope.errors import InputError
from qkscope.run.engines.base import BaseEngine

_NOT_ENGINES = {"base", "schedule", "worker"}


def engine_names() -> list[str]:
    """The engines there are: `local` first, then the others by name."""
    names = {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_ENGINES
    return sorted(names, key=lambda name: (name != "local", name))


def find_engine(name: str) -> BaseEngine:
    """The engine of this name."""
    if name not in engine_names():
        raise InputError(f"engine {name!r} is not one of {', '.join(engine_names())}")
    engine: BaseEngine = getattr(importlib.import_module(f"{__name__}.{name}"), f"{name.title()}Engine")()
    return engine
