"""Where queries and keys of each position bucket lie in the plane of a and b, and how far they spread.

Exact in mean and spread, so that an ellipse per bucket shows what a cloud of points would, without a vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.rotation.axes import axes_of
from qkscope.lenses.rotation.table import FILE as ROTATED
from qkscope.lenses.stacks import for_readers
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView, named_entries
from qkscope.moments.second_moments import KINDS

FILE = "drift_planes"
NAMES = {"q": "queries", "k": "keys"}
SHARES = (0.0, 1 / 3, 2 / 3, 1.0)  # of the way from the head with the most negative effect to that with the largest
STABLE = 0.9  # a cosine: axes that turn further without one group of documents are not shown
COLUMNS = (
    *(
        Measure(f"{kind}_b", f"Mean projection of the bucket's {name} on b.", "vector")  # on a: the lens `profile`
        for kind, name in NAMES.items()
    ),
    *(
        column
        for kind, name in NAMES.items()
        for column in (
            Measure(f"{kind}_var_a", f"Variance of the bucket's {name} along a.", "vector²", (0.0, np.inf), error=None),
            Measure(f"{kind}_var_b", f"Variance of the bucket's {name} along b.", "vector²", (0.0, np.inf), error=None),
            Measure(f"{kind}_cov_ab", f"Covariance of both projections of the bucket's {name}.", "vector²", error=None),
        )
    ),
)


def planes(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """(heads, buckets) of each column. A replicate has means alone: groups have no squares in single buckets."""
    axes, columns = sums.once(axes_of), {}
    for kind in KINDS:
        means = sums.bucket_means(kind)
        columns[f"{kind}_b"] = np.einsum("hbd,hd->hb", means.mean, axes.b)
        inside = np.full((*means.n.shape, 2, 2), np.nan)
        if sums.whole is None:
            pairs = np.stack([axes.a, axes.b], axis=2)  # (heads, d, 2)
            which = np.arange(len(pairs)) if kind == "q" else sums.distinct_keys[1]
            covariances = for_readers((sums.q_buckets if kind == "q" else sums.k_buckets).cov_xx, which)[:, None]
            pairs = pairs.reshape(len(covariances), -1, 1, *pairs.shape[1:])
            inside = (pairs.swapaxes(3, 4) @ (covariances @ pairs)).reshape(inside.shape)
        columns |= {f"{kind}_var_{axis}": np.maximum(inside[..., i, i], 0.0) for i, axis in enumerate("ab")}
        columns[f"{kind}_cov_ab"] = inside[..., 0, 1]
    return columns


TABLE = HeadTable(FILE, COLUMNS, planes, across="bucket", detail=True, stackable=True)


# --- which heads the figure shows: a rule, so that nobody picks what looks good -------------------------


def chosen_heads(at: WindowView) -> pd.DataFrame:
    """`model`, `layer`, `head` and `bias_effect` of the heads to show, the lowest effect first.

    Of the heads whose axis a is stable, ranked by bias_effect: the last, the first, and two between them.

    In one training run the heads of the last checkpoint, there and at the first; seeds and models have their own each.
    """
    drawn = set(at.table(FILE)["model"])
    entries = [name for name in at.names if name in drawn]
    shown = list(dict.fromkeys([entries[0], entries[-1]]))
    table = at.table(ROTATED)
    last = ranked(table[table["model"] == shown[-1]])
    if not at.study.one_run:
        apart = [entry.name for entry in named_entries(at.study) if entry.name in drawn]
        return pd.concat([ranked(table[table["model"] == name]) for name in apart], ignore_index=True)
    parts = [last[["layer", "head"]].merge(table[table["model"] == name], on=["layer", "head"]) for name in shown]
    return pd.concat(parts, ignore_index=True)[["model", "layer", "head", "bias_effect"]]


def ranked(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads of one entry that the rule picks; fewer where there are fewer."""
    known = heads[np.isfinite(heads["bias_effect"]) & np.isfinite(heads["mu_q_b"])]
    if "a_stability" in known.columns:
        stability = pd.to_numeric(known["a_stability"], errors="coerce")
        stable = known[stability.isna() | (stability >= STABLE)]
        known = stable if len(stable) >= len(SHARES) else known
    known = known.sort_values(["bias_effect", "layer", "head"]).reset_index(drop=True)
    places = dict.fromkeys(round(share * (len(known) - 1)) for share in SHARES) if len(known) else {}
    picked: pd.DataFrame = known.loc[list(places), ["model", "layer", "head", "bias_effect"]]
    return picked
