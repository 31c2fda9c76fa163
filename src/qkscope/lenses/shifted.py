"""What r would be if position meant nothing: the same vectors with shifted positions.

A shift cuts the window at an edge between buckets and puts the part before the cut behind the rest, in every document:
each token keeps its vector and gets another token's position. Vectors do not change, so neither do covariances and
components. All positions of a bucket move by the same number of tokens, so shifted correlations follow exactly from the
sums of each bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import KINDS, Kind

FILE = "null"
SHARE = (0.0, 1.0)
NAMES = {"q": "queries", "k": "keys"}
SHIFTED = "#6b7280"
TIE = 1e-12  # of rounding: a shifted r of the same size counts as reaching the measured one

FEWEST_BLOCKS = 4  # with three shifts, the largest of them says little about what a shift can do

COLUMNS = (
    *(
        Measure(f"null_r_{kind}", f"Root mean square of component 0's r_{kind} over all shifts of positions.", "",
                SHARE, title=f"r_{kind} with shifted positions", color=SHIFTED)
        for kind in NAMES
    ),
    *(
        Measure(f"null_p_{kind}", f"Of the absolute r_{kind} as measured and of all shifts, the share that is not "
                "below the measured one.", "", SHARE, error=None, title=f"p of r_{kind} among shifts")
        for kind in NAMES
    ),
    *(
        Measure(f"beyond_null_{kind}", f"1 if the measured absolute r_{kind} is larger than that of every shift, "
                "otherwise 0.", "", SHARE, error=None, title=f"heads whose {name} exceed every shift", kind="indicator")
        for kind, name in NAMES.items()
    ),
    Measure("null_shifts", "Shifts that the window's position buckets allow; 0 where they are too few, and the other "
            "columns are empty.", error=None, kind="constant", title="number of shifts"),
)  # fmt: skip


def block_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Of a window's bucket edges those that cut it into the most parts of equal length, to within a position.

    Odd edges (after position 0, at the common window) lie inside a part. If the window starts late, the parts may start
    there, or at 0 where only a few positions are left out of the first. Empty with fewer than FEWEST_BLOCKS parts.
    """
    last, there = edges[-1], np.array(edges)
    for parts in range(len(edges) - 1, FEWEST_BLOCKS - 1, -1):
        for first in dict.fromkeys((edges[0], 0)):
            wanted = first + (last - first) * np.arange(1, parts) / parts
            nearest = there[np.abs(there[:, None] - wanted).argmin(axis=0)]
            apart = (np.diff(nearest) > 0).all() and nearest[0] > edges[0]
            if apart and (np.abs(nearest - wanted) < 1).all():
                return (first, *(int(edge) for edge in nearest), last)
    return ()


def shifts(blocks: Sequence[int], edges: Sequence[int]) -> NDArray[np.int64]:
    """By how many tokens each shift moves the positions of each bucket: (shifts, buckets)."""
    starts, cuts = np.array(edges[:-1]), np.array(blocks[1:-1], dtype=np.int64)[:, None]
    first, last = (blocks[0], blocks[-1]) if len(blocks) else (0, 0)
    return np.asarray(np.where(starts < cuts, last - cuts, first - cuts), dtype=np.int64)


def shifted_correlations(sums: LayerSums, kind: Kind) -> Array:
    """The r of component 0 that each shift gives: (shifts, heads); none where the window has too few buckets."""
    of, r = (sums.q, sums.principal.r_q) if kind == "q" else (sums.k, sums.principal.r_k)
    direction, buckets = sums.principal.directions[:, :, 0], sums.bucket_means(kind)
    whole = (sums.whole or sums).bucket_means("q")
    filled = np.flatnonzero(
        whole.n.sum(axis=0) > 0
    )  # the part of the window that has tokens; a replicate's is the whole's
    blocks = block_edges(whole.edges[filled[0] : filled[-1] + 2]) if len(filled) else ()
    moved, empty = shifts(blocks, buckets.edges), buckets.n == 0
    weight = buckets.n / buckets.n.sum(axis=1, keepdims=True)
    inside = np.where(empty, 0.0, np.einsum("hd,hbd->hb", direction, buckets.cov_xt))
    mean = np.where(empty, 0.0, np.einsum("hd,hbd->hb", direction, buckets.mean))
    mean = mean - (weight * mean).sum(axis=1, keepdims=True)
    places = np.where(empty, 0.0, buckets.mean_t) + moved[:, None, :]  # (shifts, heads, buckets)
    places = places - (weight * places).sum(axis=2, keepdims=True)
    covariance = (weight * (inside + mean * places)).sum(axis=2)
    variance = (weight * (np.where(empty, 0.0, buckets.var_t) + places**2)).sum(axis=2)
    spread = np.einsum("hd,hde,he->h", direction, of.cov_xx, direction)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = covariance / np.sqrt(spread * variance)
    return np.where(np.isfinite(r[:, 0]), np.clip(shifted, -1.0, 1.0), np.nan)


def null_columns(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """The shifted correlations of each head in a few numbers."""
    columns: dict[str, Array] = {}
    for kind, measured in zip(KINDS, (sums.principal.r_q, sums.principal.r_k), strict=True):
        shifted, r = np.abs(shifted_correlations(sums, kind)), np.abs(measured[:, 0])
        known = np.isfinite(r) & np.isfinite(shifted).all(axis=0) & (len(shifted) > 0)
        reached = (shifted >= r - TIE).sum(axis=0)
        with np.errstate(invalid="ignore"):
            root_mean_square = np.sqrt((shifted**2).sum(axis=0) / max(len(shifted), 1))
        values = (root_mean_square, (1.0 + reached) / (1.0 + len(shifted)), (reached == 0).astype(float))
        names = (f"{name}_{kind}" for name in ("null_r", "null_p", "beyond_null"))
        columns |= {name: np.where(known, value, np.nan) for name, value in zip(names, values, strict=True)}
    return {**columns, "null_shifts": np.full(len(sums.heads), len(shifted))}


def with_absolute(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with |r_q|, which a null is compared with; r_q is above -0.05 by its sign rule."""
    return heads.assign(r_q_abs=heads["r_q"].abs())


TABLE = HeadTable(FILE, COLUMNS, null_columns, stackable=True)
LENS = Lens(
    name="shifted",
    title="Shifted positions",
    question="Is r larger than without any relation to position?",
    tables=(TABLE,),
    derive=with_absolute,
    derived=(Measure("r_q_abs", "Absolute value of r_q.", "", SHARE, title="size of r_q", color="#1d4ed8"),),
    figures=(
        Figure(
            "shifted",
            title="Correlation With Shifted Positions",
            chart=Trajectories(
                (
                    Panel(("r_q_abs", "null_r_q"), "Queries: measured, and with shifted positions"),
                    Panel(("r_k_abs", "null_r_k"), "Keys: measured, and with shifted positions"),
                )
            ),
            caption="Absolute correlation as measured, and after positions are shifted by whole buckets. Shifted "
            "correlations show what the same vectors give without any relation to position.",
            measures=("r_q_abs", "null_r_q", "r_k_abs", "null_r_k", "beyond_null_q", "beyond_null_k"),
        ),
    ),
    views=(
        View("curve", "r with shifted positions", ("null_r_q", "null_r_k"),
             "Root mean square over all shifts, mean over heads; compare with the position signal.", figure="shifted"),
        View("bars", "Heads whose r exceeds that of every shift", ("beyond_null_q", "beyond_null_k"),
             "Share of heads. Of heads without position, 1 in 16 would exceed all 15 shifts of 16 buckets by chance."),
        View("heatmap", "r of every head's queries with shifted positions", ("null_r_q",)),
    ),
)  # fmt: skip
