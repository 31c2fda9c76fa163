"""What figures of this lens show of many entries and heads, and so what their cards speak about."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.named_entries import named_entries
from qkscope.lenses.rope import kernel, planes
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entries

Array = NDArray[np.float64]
MOST_PANELS = 4  # entries side by side
FEW = 80  # heads up to which each dot gets its error bar
HEADS = 3  # of one entry, whose kernel has a panel of its own


def shown_entries(study: Entries) -> list[str]:
    """The entries that have a panel: of a run the first, the last and those between that phases end with."""
    names = list(study.selected) if study.one_run else list(study.names)
    if len(names) <= MOST_PANELS:
        return names
    return [names[round(i)] for i in np.linspace(0, len(names) - 1, MOST_PANELS)]


@dataclass(frozen=True)
class HeadKernel:
    """One head's kernel, by its planes and by the table's distances."""

    model: str
    layer: int
    head: int
    window: float
    rows: pd.DataFrame  # of `distances`
    planes: pd.DataFrame  # of rope_planes.csv

    @property
    def scale(self) -> float:
        """What softmax multiplies scores with; 1 where that is not known."""
        ratio = (self.rows["kernel_scaled"] / self.rows["kernel"]).to_numpy(dtype=np.float64)
        known = ratio[np.isfinite(ratio)]
        return float(np.median(known)) if len(known) else 1.0

    @property
    def spread(self) -> float:
        """The standard deviation of a score, mean over the window's distances."""
        inside = self.rows[self.rows["distance"] <= self.window]
        return self.scale * float(inside["kernel_sd"].mean())

    def curve(self, distance: Array, smooth: float) -> Array:
        """The kernel, each point the mean over a share `smooth` of its distance: faster planes average out."""
        theta = 2 * np.pi / self.planes["wavelength"].to_numpy(dtype=np.float64)[:, None]
        amplitude, phase = (self.planes[n].to_numpy(dtype=np.float64)[:, None] for n in ("amplitude", "phase"))
        width = smooth * distance
        waves = amplitude * np.cos(theta * distance - phase) * np.sinc(theta * width / (2 * np.pi))
        at_zero = float((amplitude * np.cos(phase)).sum())
        still = float(self.rows.loc[self.rows["distance"] == 0, "kernel"].iloc[0]) - at_zero
        return np.asarray(self.scale * (waves.sum(axis=0) + still))


def chosen_heads(at: WindowView) -> list[HeadKernel]:
    """The heads whose kernel moves most, in spreads of their scores: of the last checkpoint, or of each model."""
    heads: list[HeadKernel] = []
    entries = [entry.name for entry in named_entries(at.study)]
    for model in entries:
        ranked = strengths(at, model)
        taken: set[int] = set()
        for layer, head in ranked.index:
            if len(taken) < (HEADS if len(entries) == 1 else 1) and layer not in taken:
                taken.add(int(layer))
                heads.append(_head(at, model, int(layer), int(head)))
    return heads


def strengths(at: WindowView, model: str) -> pd.Series:
    """Each head's kernel within the window: its standard deviation over distances in those of a score, falling."""
    table = at.table(kernel.FILE)
    here = table[(table["model"] == model) & (table["distance"] <= at.window_of(model)) & table["kernel"].notna()]
    groups = here.groupby(["layer", "head"])
    ratio = groups["kernel"].std() / groups["kernel_sd"].mean()
    return ratio[ratio > 0].sort_values(ascending=False, kind="stable")


def _head(at: WindowView, model: str, layer: int, head: int) -> HeadKernel:
    def of(file: str) -> pd.DataFrame:
        table = at.table(file)
        return table[(table["model"] == model) & (table["layer"] == layer) & (table["head"] == head)]

    return HeadKernel(model, layer, head, at.window_of(model), of(kernel.FILE), of(planes.FILE))
