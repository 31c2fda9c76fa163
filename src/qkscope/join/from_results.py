"""Measures of a results folder: means over heads of each entry, with standard errors over documents.

A head that sees 512 tokens answers another question than one that sees the whole context, and published values are of
full-attention layers. So where an entry also has layers with a window, its means are over the heads of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.join.inputs import FEWEST, Measures, ModelNote
from qkscope.lenses.registry import derived, registered
from qkscope.lenses.views import WindowView, build_tables
from qkscope.results.entries import listed_names
from qkscope.results.provenance import same_networks
from qkscope.results.read import load_results
from qkscope.results.schema import CHUNKED, SLIDING
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.text import counted

# Tried by default: one for each question that a lens asks, because every further one makes the others' p larger.
DEFAULT = (
    "r_q", "r_k", "bias_effect", "separation_strength", "ap", "ap_drop_matched", "position_share", "r_q_excess",
)  # fmt: skip
AT_EVERY_WINDOW = ("r_q", "r_k", "explained_variance")  # those that `heads.csv` has at every window


def measures_from_results(folder: Path, wanted: Sequence[str], *, common: bool | None = None) -> Measures:
    """Means over heads at the common window where there is one (or as `common` says), else at native contexts.

    Raises InputError for a measure that the results do not have, and for fewer than three entries.
    """
    tables = build_tables(load_results(folder))
    if common and tables.common is None and len({tables.own.window_of(name) for name in tables.own.names}) > 1:
        raise InputError(f"{folder}: has no tables at a common window; `qkscope analyze {folder}` writes them")
    at = tables.own if tables.common is None or common is False else tables.common
    if len(at.names) < FEWEST:
        raise InputError(
            f"{folder}: has {len(at.names)} entries to compare ({listed_names(list(at.names))}); joining measures with "
            f"scores needs at least {FEWEST} models, and is informative from about ten"
        )
    heads = {model: compared_heads(at, model) for model in at.names}
    values: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for name in wanted:
        if not at.panel.has(name):
            raise InputError(
                f"--measure {name}: these results have no such measure of heads; `qkscope docs results` lists the "
                "columns of heads.csv (`qkscope analyze` writes tables that are missing)"
            )
    for name in wanted or filter(at.panel.has, DEFAULT):
        means = [each.mean(at.panel, name, model) for model, each in heads.items()]
        if wanted or np.isfinite(means).sum() >= FEWEST:
            values[name] = means
            errors[name] = [each.error(at.panel, name, model) for model, each in heads.items()]
    records = {entry.name: entry.record for entry in at.study.checkpoints}
    return Measures(
        source=str(folder),
        means=pd.DataFrame(values, index=list(at.names)),
        errors=pd.DataFrame(errors, index=list(at.names)),
        windows={model: at.window_of(model) for model in at.names},
        family={name: record.family for name, record in records.items() if record.family},
        parameters={name: float(record.parameters) for name, record in records.items() if record.parameters},
        by_length=_by_length(tables.own, list(values)),
        notes=tuple(
            ModelNote(f"Means of {model} are over {each.description}.", (model,))
            for model, each in heads.items()
            if each.description
        ),
        same_weights=tuple(pair[:2] for pair in same_networks(list(records.values()))),
    )


def _by_length(own: WindowView, measures: Sequence[str]) -> pd.DataFrame | None:
    """Measures at every window that was measured, for scores at several lengths."""
    names = [name for name in measures if name in AT_EVERY_WINDOW]
    if own.windows is None or not names:
        return None
    limited = has_window(own.windows)
    mixed = limited.groupby(own.windows["model"]).transform(lambda each: each.any() and not each.all())
    rows = own.windows[~(limited & mixed.astype(bool))]
    means = derived(rows, registered()).groupby(["model", "window"], sort=False)[names].mean().reset_index()
    return means.rename(columns={"window": "length"}).astype({"length": float})


# --- which heads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedHeads:
    """The heads of one entry that are compared with other models' heads."""

    parts: tuple[Part, ...]  # one per kind of full-attention layer, or all heads
    heads: int
    measured: int  # heads of the entry
    limited: bool  # no layer has full attention

    @property
    def description(self) -> str:
        """Which they are; empty where they are all heads and have full attention."""
        if self.heads < self.measured:
            return f"{self.heads} of {counted(self.measured, 'head')}: those of full-attention layers"
        return "all heads, of which none has full attention" if self.limited else ""

    def mean(self, panel: HeadPanel, column: str, model: str) -> float:
        """The mean over those of the heads that have a value."""
        values = np.concatenate([panel.values(column, model, part) for part in self.parts])
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else math.nan

    def error(self, panel: HeadPanel, column: str, model: str) -> float:
        """Its standard error over documents; NaN where it cannot be known.

        The heads of all parts read the same documents, so their means are joined in each draw, not their errors.
        """
        if len(self.parts) == 1:
            return panel.error(column, model, self.parts[0])
        known = {part: int(np.isfinite(panel.values(column, model, part)).sum()) for part in self.parts}
        draws = [panel.drawn(column, model, part) for part, number in known.items() if number]
        if not draws or len({len(each) for each in draws}) != 1 or not len(draws[0]):
            return math.nan
        joined = np.average(np.stack(draws), axis=0, weights=[number for number in known.values() if number])
        return float(joined.std()) if np.isfinite(joined).all() else math.nan


def compared_heads(at: WindowView, name: str) -> ComparedHeads:
    """The heads of an entry that are compared: of its full-attention layers, or all where they are of one kind."""
    heads = at.of_entry(name)
    full = ~has_window(heads)
    if full.all() or not full.any():
        return ComparedHeads((EVERY_HEAD,), len(heads), len(heads), limited=bool(len(heads)) and not full.any())
    parts = tuple(Part(layer_kind=str(kind)) for kind in heads.loc[full, "layer_kind"].unique())
    return ComparedHeads(parts, int(full.sum()), len(heads), limited=False)


def has_window(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether each row's layer sees only a part of the context."""
    return rows["attention"].isin([SLIDING, CHUNKED])
