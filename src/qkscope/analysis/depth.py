"""Place layers on a common depth axis from 0 (first layer) to 1 (last) and average heads in ten bins.

Bins are closed on the right, the first also on the left: what
`pandas.cut(depth, numpy.linspace(0, 1, 11), include_lowest=True)` does, so layer 7 of 36 (depth 0.2) is in
the second bin. The edges must be exactly those of `linspace`: 0.1 * 3 is another number than 0.3.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

N_BINS = 10
EDGES = np.linspace(0.0, 1.0, N_BINS + 1)
DEPTH_COLUMNS = tuple(f"depth_{i}" for i in range(N_BINS))


def depth_of_layers(layer: npt.ArrayLike, last_layer: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """layer / last layer, in [0, 1]; the only layer of a one-layer model has depth 0."""
    layers = np.asarray(layer, dtype=np.float64)
    last = np.asarray(last_layer, dtype=np.float64)
    return np.divide(layers, last, out=np.zeros(np.broadcast(layers, last).shape), where=last > 0)


def depth_bins(depth: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The bin of each depth, 0 to 9. Depths outside [0, 1] have no bin and raise ValueError."""
    values = np.asarray(depth, dtype=np.float64)
    if not bool(np.all((values >= 0.0) & (values <= 1.0))):
        raise ValueError("a depth lies outside [0, 1]")
    right_closed = np.searchsorted(EDGES, values, side="left") - 1
    return np.maximum(right_closed, 0).astype(np.int64)


def depth_means(heads: pd.DataFrame, column: str, models: Sequence[str]) -> pd.DataFrame:
    """Mean of `column` over the heads of each (checkpoint, depth bin); a bin without heads is NaN."""
    binned = heads.assign(bin=depth_bins(heads["depth"].to_numpy()))
    means = binned.pivot_table(index="model", columns="bin", values=column, aggfunc="mean", dropna=True)
    means = means.reindex(index=list(models), columns=range(N_BINS))
    means.columns = pd.Index(DEPTH_COLUMNS)
    return means.rename_axis("model").reset_index()
