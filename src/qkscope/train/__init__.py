"""While a model trains: the same sums, tables and page for every so many steps, and the training none the wiser.

    trainer.add_callback(qkscope.train.HeadsCallback(documents, trainer))     # Hugging Face Trainer
    probe = qkscope.train.Probe(model, documents); ...; probe(step)           # a loop of your own

Nothing is imported before it is used: neither torch nor a trainer's library.
"""

from typing import Any

_HOMES = {
    "HeadsCallback": "qkscope.train.hugging_face",
    "LightningHeadsCallback": "qkscope.train.lightning",
    "Probe": "qkscope.train.probe",
    "TrainingFolder": "qkscope.train.folder",
    "untouched": "qkscope.train.as_it_was",
}

__all__ = ["HeadsCallback", "LightningHeadsCallback", "Probe", "TrainingFolder", "untouched"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkscope.train' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
