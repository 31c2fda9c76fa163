"""How large r is when positions are shifted, beside which the measured r can be read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.null.shifts import shifted_correlations
from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums

FILE = "null"
SHARE = (0.0, 1.0)
KINDS = (("q", "queries"), ("k", "keys"))
TIE = 1e-12  # of rounding: a shifted r of the same size counts as reaching the measured one

COLUMNS = (
    *(
        Measure(
            f"null_r_{kind}", f"Root mean square of component 0's r_{kind} over all shifts of positions.", "", SHARE
        )
        for kind, _ in KINDS
    ),
    *(
        Measure(
            f"null_p_{kind}",
            f"Of the absolute r_{kind} as measured and of all shifts, the share that is not below the measured one.",
            "",
            SHARE,
            error=None,
        )
        for kind, _ in KINDS
    ),
    *(
        Measure(
            f"beyond_null_{kind}",
            f"1 if the measured absolute r_{kind} is larger than that of every shift, otherwise 0.",
            "",
            SHARE,
            error=None,
            kind="indicator",
        )
        for kind, _ in KINDS
    ),
    Measure(
        "null_shifts",
        "Shifts that the window's position buckets allow; 0 where they are too few, and the other columns are empty.",
        error=None,
        kind="constant",
    ),
)


def null_columns(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """The shifted correlations of each head in a few numbers."""
    columns: dict[str, Array] = {}
    for kind, measured in (("q", sums.principal.r_q), ("k", sums.principal.r_k)):
        shifted = np.abs(shifted_correlations(sums, "q" if kind == "q" else "k"))
        r = np.abs(measured[:, 0])
        known = np.isfinite(r) & np.isfinite(shifted).all(axis=0) & (len(shifted) > 0)
        reached = (shifted >= r - TIE).sum(axis=0)
        with np.errstate(invalid="ignore"):
            columns[f"null_r_{kind}"] = np.sqrt((shifted**2).sum(axis=0) / max(len(shifted), 1))
        columns[f"null_p_{kind}"] = (1.0 + reached) / (1.0 + len(shifted))
        columns[f"beyond_null_{kind}"] = (reached == 0).astype(float)
        columns |= {name: np.where(known, columns[name], np.nan) for name in columns if name.endswith(f"_{kind}")}
    return {**columns, "null_shifts": np.full(len(sums.heads), len(shifted))}


TABLE = HeadTable(FILE, COLUMNS, null_columns)


def with_absolute(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with |r_q|, which a null is compared with; r_q is above -0.05 by its sign rule."""
    return heads.assign(r_q_abs=heads["r_q"].abs())
