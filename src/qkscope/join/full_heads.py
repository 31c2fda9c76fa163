"""Which heads a mean is over: those of full-attention layers, where an entry has layers with a window beside them.

A head that sees 512 tokens answers another question than one that sees the whole context. The published values are of
full-attention layers, and most models have no other; the mean over both kinds of Gemma would be like nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.lenses.views import WindowView
from qkscope.results.schema import CHUNKED, SLIDING
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.text import counted


@dataclass(frozen=True)
class ComparedHeads:
    """The heads of one entry that are compared with other models' heads."""

    parts: tuple[Part, ...]  # one per kind of full-attention layer, or all heads
    heads: int
    every: int  # heads of the entry that were measured
    limited: bool  # no layer sees the whole context: there is nothing but windows to average

    @property
    def words(self) -> str:
        """Which they are; nothing where they are all heads and see everything."""
        if self.heads < self.every:
            return f"{self.heads} of {counted(self.every, 'head')}: those of full-attention layers"
        return "all heads, of which none has full attention" if self.limited else ""

    def mean(self, panel: HeadPanel, column: str, model: str) -> float:
        """The mean over those of the heads that have a value."""
        values = np.concatenate([panel.values(column, model, part) for part in self.parts])
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else float("nan")

    def error(self, panel: HeadPanel, column: str, model: str) -> float:
        """Its standard error over documents; NaN where it cannot be known.

        The heads of all parts read the same documents, so their means are joined in each draw, not their errors.
        """
        if len(self.parts) == 1:
            return panel.error(column, model, self.parts[0])
        weights, draws = [], []
        for part in self.parts:
            known = int(np.isfinite(panel.values(column, model, part)).sum())
            if known:
                weights.append(known)
                draws.append(panel.drawn(column, model, part))
        if not draws or len({len(each) for each in draws}) != 1 or not len(draws[0]):
            return float("nan")
        joined = np.average(np.stack(draws), axis=0, weights=weights)
        return float(joined.std()) if np.isfinite(joined).all() else float("nan")


def compared_heads(at: WindowView, name: str) -> ComparedHeads:
    """The heads of an entry that are compared: of its full-attention layers, or all where they are of one sort."""
    heads = at.of_entry(name)
    full = ~has_window(heads)
    if full.all() or not full.any():
        return ComparedHeads((EVERY_HEAD,), len(heads), len(heads), limited=bool(len(heads)) and not full.any())
    kinds: Sequence[str] = list(dict.fromkeys(heads.loc[full, "layer_kind"]))
    parts = tuple(Part(layer_kind=kind) for kind in kinds)
    return ComparedHeads(parts, int(full.sum()), len(heads), limited=False)


def has_window(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether each row's layer sees only a part of the context."""
    return rows["attention"].isin([SLIDING, CHUNKED])
