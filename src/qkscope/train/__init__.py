"""Measure a model's heads while it trains: the sums, tables and page of a study, with a row for each measured step.

The training itself stays bit-identical.

    trainer.add_callback(qkscope.train.HeadsCallback(documents, trainer))     # Hugging Face Trainer
    probe = qkscope.train.Probe(model, documents); ...; probe(step)           # a loop of your own

Nothing is imported before it is used: neither torch nor a trainer's library.
"""

from typing import Any

_MODULES = {
    "HeadsCallback": "qkscope.train.hugging_face",
    "LightningHeadsCallback": "qkscope.train.lightning",
    "Probe": "qkscope.train.probe",
    "TrainingFolder": "qkscope.train.folder",
    "untouched": "qkscope.train.preserve_state",
}

__all__ = ["HeadsCallback", "LightningHeadsCallback", "Probe", "TrainingFolder", "untouched"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'qkscope.train' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
