"""A step in a few numbers for trackers, from its lines of the tables: those that `qkscope log` sends of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkscope.lenses.registry import registered
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entries, Entry
from qkscope.results.schema import REPLICATES
from qkscope.share.scalars import entry_scalars

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "qkscope/"


def scalars_of(name: str, components: pd.DataFrame, replicates: pd.DataFrame) -> dict[str, float]:
    """The numbers of one entry from its lines of `qk.csv` and `replicates.csv`."""
    heads = components[components["pc"] == 0].reset_index(drop=True)
    window = heads["window"].max()
    here = replicates[replicates["window"] == window].reset_index(drop=True)
    study = Entries(name, (Entry(name, name),), (name,), sampled_heads=False, same_documents=True)
    return entry_scalars(WindowView(study, heads, registered(), tables={REPLICATES: here}), name, PREFIX)
