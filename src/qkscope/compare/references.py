"""Published studies as reference data: `published/<name>/` holds a few small tables and an `about.json`.

The tables are aggregates (the publication left no table of heads). `about.json` states where they were read from, how
exactly they could be read, and by which protocol they were measured; tolerances of a comparison follow from it. They
are read with importlib.resources, so a wheel has them as a checkout does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A checkpoint of the published study and the context it was measured at."""

    name: str
    label: str
    phase: str
    context: int


@dataclass(frozen=True)
class PublishedReference:
    """A published study; each table has one row per checkpoint, named in the column `model`."""

    name: str
    title: str
    source: str
    model: str
    documents_source: str
    documents: int
    samples_per_document: int  # tokens of a document that the published sampling keeps on average
    n_layers: int
    q_heads: int
    heads: int  # query heads in the published sample
    seed: int
    reading_error: Mapping[str, float]  # by table, or by table and number; for the taxonomy in heads
    checkpoints: tuple[PublishedCheckpoint, ...]
    tables: Mapping[str, pd.DataFrame]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints' names, in published order."""
        return tuple(checkpoint.name for checkpoint in self.checkpoints)

    @property
    def tokens(self) -> int:
        """Queries (and as many keys) that the published statistics of one head rest on."""
        return self.documents * self.samples_per_document


def _folder() -> Traversable:
    return files("qkscope.data").joinpath("published")


def shipped_references() -> list[str]:
    """Names of the published studies that ship with the package."""
    return sorted(entry.name for entry in _folder().iterdir() if entry.joinpath("about.json").is_file())


def load_reference(name: str) -> PublishedReference:
    """Read a shipped reference. Raises KeyError for a name that is not shipped."""
    import pandas as pd

    if name not in shipped_references():  # also keeps a name like ../x from becoming a path
        raise KeyError(name)
    folder = _folder().joinpath(name)
    about: dict[str, Any] = json.loads(folder.joinpath("about.json").read_text(encoding="utf-8"))
    checkpoints = tuple(PublishedCheckpoint(**entry) for entry in about.pop("checkpoints"))
    tables = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".csv"):
            with entry.open(encoding="utf-8") as file:
                tables[entry.name.removesuffix(".csv").removesuffix("_counts")] = pd.read_csv(file)
    return PublishedReference(name=name, checkpoints=checkpoints, tables=tables, **about)
