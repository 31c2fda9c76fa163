"""Where queries and keys of each position bucket lie in the plane of a and b, and how far they spread.

Exact in mean and spread, so that an ellipse per bucket shows what a cloud of points would, without a vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.pca import Array
from qkscope.lenses.rotation.axes import PlaneAxes, axes_of
from qkscope.lenses.sums import LayerSums

FILE = "drift_planes"
KINDS = (("q", "queries"), ("k", "keys"))
COLUMNS = (
    *(
        Measure(f"{kind}_b", f"Mean projection of the bucket's {name} on b.", "vector")  # on a: the lens `profile`
        for kind, name in KINDS
    ),
    *(
        column
        for kind, name in KINDS
        for column in (
            Measure(f"{kind}_var_a", f"Variance of the bucket's {name} along a.", "vector²", (0.0, np.inf), error=None),
            Measure(f"{kind}_var_b", f"Variance of the bucket's {name} along b.", "vector²", (0.0, np.inf), error=None),
            Measure(f"{kind}_cov_ab", f"Covariance of both projections of the bucket's {name}.", "vector²", error=None),
        )
    ),
)
SPREADS = tuple(column.name for column in COLUMNS if column.name[1:5] in ("_var", "_cov"))


def planes(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """(heads, buckets) of each column. A replicate has means alone: groups have no squares in single buckets."""
    axes = sums.once(axes_of)
    queries, keys = sums.bucket_means("q"), sums.bucket_means("k")
    projections = {
        f"{kind}_b": np.einsum("hbd,hd->hb", means.mean, axes.b) for kind, means in (("q", queries), ("k", keys))
    }
    unknown = np.full(queries.n.shape, np.nan)
    if sums.whole is not None:
        return {**projections, **dict.fromkeys(SPREADS, unknown)}
    which = sums.distinct_keys[1]
    spreads = _spreads("q", sums.q_buckets.cov_xx, np.arange(len(sums.heads)), axes)
    spreads |= _spreads("k", sums.k_buckets.cov_xx, which, axes)
    return {**projections, **spreads}


def _spreads(kind: str, covariances: Array, which: NDArray[np.intp], axes: PlaneAxes) -> dict[str, Array]:
    """Variances along both axes and their covariance: (heads, buckets); head i has the covariances `which[i]`."""
    pair = np.stack([axes.a, axes.b], axis=2)  # (heads, d, 2)
    inside = np.empty((len(which), covariances.shape[1], 2, 2))
    for head, of in enumerate(which):
        inside[head] = pair[head].T @ (covariances[of] @ pair[head])
    return {
        f"{kind}_var_a": np.maximum(inside[..., 0, 0], 0.0),
        f"{kind}_var_b": np.maximum(inside[..., 1, 1], 0.0),
        f"{kind}_cov_ab": inside[..., 0, 1],
    }


TABLE = HeadTable(FILE, COLUMNS, planes, across="bucket", detail=True, stackable=True)
