"""What the figures of the split show: which kinds of layers, which entries."""

import pandas as pd

from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.results.read import Entries

MOST_KINDS, MOST_ENTRIES = 4, 4


def kinds_shown(table: pd.DataFrame) -> list[str]:
    """The kinds of layers that have a panel: each where there are several, else all heads together."""
    kinds = [kind for kind in dict.fromkeys(table["layer_kind"]) if kind != EVERY_KIND]
    return kinds[:MOST_KINDS] or [EVERY_KIND]


def entries_shown(study: Entries) -> list[str]:
    """First and last of a run, or up to MOST_ENTRIES of seeds or models."""
    names = list(study.names)
    if study.one_run:
        return names if len(names) < 2 else [names[0], names[-1]]
    chosen = list(study.selected) or names
    return chosen[:MOST_ENTRIES]
