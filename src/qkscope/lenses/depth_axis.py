"""Place layers on a common depth axis from 0 (first layer) to 1 (last) and average heads in ten bins.

Models of fewer than ten layers would leave bins empty, so a study of such models has one cell per layer instead
(`DepthAxis`); its tables say which they have by the names of their columns.

Bins are closed on the right, the first also on the left: what
`pandas.cut(depth, numpy.linspace(0, 1, 11), include_lowest=True)` does, so layer 7 of 36 (depth 0.2) is in
the second bin. The edges must be exactly those of `linspace`: 0.1 * 3 is another number than 0.3.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.views import WindowView
from qkscope.stats.means import Part

N_BINS = 10
EDGES = np.linspace(0.0, 1.0, N_BINS + 1)
_MOST = 10_000  # layers; a depth that says more is damage
# Three, four and three of the ten depth bins.
EARLY, MIDDLE, LATE = Part(0.0, EDGES[3]), Part(EDGES[3], EDGES[7]), Part(EDGES[7], 1.0)
DEPTH_COLUMNS = tuple(f"depth_{i}" for i in range(N_BINS))


def depth_bins(depth: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The bin of each depth, 0 to 9. Depths outside [0, 1] have no bin and raise ValueError."""
    values = np.asarray(depth, dtype=np.float64)
    if not bool(np.all((values >= 0.0) & (values <= 1.0))):
        raise ValueError("a depth lies outside [0, 1]")
    right_closed = np.searchsorted(EDGES, values, side="left") - 1
    return np.maximum(right_closed, 0).astype(np.int64)


@dataclass(frozen=True)
class DepthAxis:
    """The cells of a study's depth tables: the ten published bins, or the layers where no model has ten."""

    layers: int | None = None  # so many single layers; None stands for the ten bins

    @classmethod
    def of(cls, heads: pd.DataFrame) -> "DepthAxis":
        """The axis of a PC0 table: the layers themselves where every model has fewer than ten."""
        layers = max(layer_counts(heads).values(), default=N_BINS)
        return cls(layers if layers < N_BINS else None)

    @property
    def size(self) -> int:
        """How many cells there are."""
        return N_BINS if self.layers is None else self.layers

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the cells in tables: depth_0, ... for bins, layer_0, ... for layers."""
        return DEPTH_COLUMNS if self.layers is None else tuple(f"layer_{i}" for i in range(self.layers))

    def cells(self, heads: pd.DataFrame) -> npt.NDArray[np.int64]:
        """The cell of each head."""
        if self.layers is None:
            return depth_bins(heads["depth"].to_numpy())
        return heads["layer"].to_numpy().astype(np.int64)

    def part(self, cell: int) -> Part:
        """The heads of a cell."""
        return Part(layer=cell) if self.layers is not None else Part(EDGES[cell], EDGES[cell + 1])


def layer_counts(heads: pd.DataFrame) -> dict[str, int]:
    """How many layers each model has: `depth` is layer / (layers - 1), else from its last layer in the table."""
    counts: dict[str, int] = {}
    for model, rows in heads.groupby("model", sort=False):
        last = int(rows["layer"].to_numpy().argmax())
        layer, depth = float(rows["layer"].iloc[last]), float(rows["depth"].iloc[last])
        counts[str(model)] = round(min(layer / depth, _MOST)) + 1 if layer > 0 and depth > 0 else int(layer) + 1
    return counts


def depth_axis(at: WindowView) -> DepthAxis:
    """The cells of the study's depth tables."""
    return DepthAxis.of(at.heads)
