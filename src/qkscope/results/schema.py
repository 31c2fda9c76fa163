"""The tables of a results folder: what a row of each is, and the columns that they share.

There is one table per kind of row, whatever the number of lenses: a lens adds columns. `qk.csv` is as published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

QK, COMPONENTS_TABLE, HEADS = "qk", "components", "heads"
REPLICATES, LAYER_MEANS = "replicates", "layer_means"  # what errors of means and changes over heads are made of
QK_CSV, HEADS_CSV, HEADS_PARQUET = f"{QK}.csv", f"{HEADS}.csv", f"{HEADS}.parquet"


@dataclass(frozen=True)
class TableKind:
    """A table with rows per checkpoint, window and head (or layer): `<name>.csv` or `<name>.parquet`."""

    name: str
    across: str | None = None  # the column with the place on a second axis, such as a position bucket
    per: str = "head"
    parquet: bool = True  # large tables that nobody opens in a spreadsheet
    digits: int | None = None  # of numbers, where not all are kept

    @property
    def file(self) -> str:
        """Its file; of `heads`, that of a table that is not large."""
        return f"{self.name}.{'parquet' if self.parquet else 'csv'}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        who = ("model", "window", "layer", *(("head",) if self.per == "head" else ()))
        return who if self.across is None else (*who, self.across)


# `heads` becomes Parquet where it is large (`tables/parts.py`).
TABLES: Mapping[str, TableKind] = {
    kind.name: kind
    for kind in (
        TableKind(QK, "pc", parquet=False),
        TableKind(COMPONENTS_TABLE, "pc", parquet=False),
        TableKind(HEADS, parquet=False),
        TableKind("buckets", "bucket"),
        TableKind("parts", "part"),
        TableKind("planes", "plane"),
        TableKind("distances", "point"),
        TableKind("pairs", "cell", per="layer"),
        TableKind("tokens", "token", parquet=False, digits=6),
    )
}


def is_parquet(table: str) -> bool:
    """Whether a table is stored as Parquet whatever its size; `heads` is where it is large."""
    return table not in TABLES or TABLES[table].parquet


# Every file that these tables may be in.
FILES = (*(kind.file for kind in TABLES.values()), HEADS_PARQUET, f"{REPLICATES}.parquet", f"{LAYER_MEANS}.parquet")
# Columns of words; all others are numbers.
TEXT_COLUMNS = ("model", "windows", "rotary", "attention", "errors", "category", "measure", "heads_of", "text")


def table_kind(across: str | None, per: str) -> TableKind:
    """The table that has a row per head (or layer) and place; a lens may bring places of its own.

    What lenses know of components has a table of its own too: the columns of `qk` and `components` are as published.
    """
    published = (QK, COMPONENTS_TABLE)
    known = [
        kind for kind in TABLES.values() if (kind.across, kind.per) == (across, per) and kind.name not in published
    ]
    of_layer = f"layer_{across}s" if across else "layers"
    return known[0] if known else TableKind(f"{across}s" if per == "head" else of_layer, across, per)


MEANS_KEY = ("model", "window", "layer", "measure", "heads_of")
# What is known of each place of a table, whatever lens has columns there: first position of a bucket, the one behind
# its last, and the mean position of its queries.
PLACE_COLUMNS: Mapping[str, tuple[str, ...]] = {"buckets": ("start", "end", "position")}

# Who: `model` is the checkpoint's name, `depth` is layer / (number of layers - 1).
IDENTITY_COLUMNS = ("model", "layer", "depth", "head", "kv_head", "pc")
# What method section 2 defines; a correlation that does not exist is empty in the file (NaN), never 0.
STATISTIC_COLUMNS = ("explained_variance", "r_q", "r_k", "n_q", "n_k")
# Least-squares lines v.q = mu_q + alpha t and v.k = mu_k + beta t, t in tokens.
LINE_COLUMNS = ("mu_q", "mu_k", "alpha", "beta")
# What the layer was: `rotary` is rotary | nope | unknown, `attention` is full | sliding | chunked (with its
# width in `attention_window`, empty for full), `documents` the number of documents that reach the window's end (empty
# where that was not counted), `errors` how the errors in `*_se` were found, or why there are none.
FACT_COLUMNS = ("rotary", "rotary_dims", "head_dim", "attention", "attention_window", "documents", "errors")
# The same with `window`, the number of leading positions that were analyzed, as published.
LAYER_COLUMNS = (*FACT_COLUMNS[:-2], "window", *FACT_COLUMNS[-2:])

# How sure a component, a sign and a category are, from the errors in `<column>_se`.
JUDGED_COLUMNS = ("gap", "unstable", "sign_sure", "category_share")

QK_COLUMNS = IDENTITY_COLUMNS + STATISTIC_COLUMNS + LINE_COLUMNS + LAYER_COLUMNS

# The least a table from elsewhere must have for taxonomy, depth and figures.
REQUIRED_COLUMNS = ("model", "layer", "head", "pc", "explained_variance", "r_q", "r_k")

ROTARY, NOPE, UNKNOWN = "rotary", "nope", "unknown"
FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"


# Tables of version 0.2, which had one per lens, and summaries for each choice of windows. Their numbers may be of
# another estimator, so they are never mixed with tables of this version. Their columns are now those of `heads`,
# `components`, `buckets`, `parts`, `planes`, `distances`, `pairs`, `tokens`, `replicates` and `layer_means`.
EARLIER_TABLES = tuple(
    f"{name}.csv"
    for name in (
        "qk_common", "qk_windows", "replicates", "layer_means", "measures", "bend", "score", "score_map", "rotated",
        "planes", "rope", "rope_planes", "rope_kernel", "plasticity", "plasticity_profile", "plasticity_map", "norms",
        "norms_buckets", "null", "profile", "sample",
    )
)  # fmt: skip
# Written by `qkscope report`; their numbers are now in `means.csv`, `changes.csv` and `heads.csv`.
_SUMMARIES = (
    "trajectory", "concordance", "taxonomy_counts", "taxonomy_fractions", "transitions", "layer_kinds", "depth_rq",
    "depth_rk", "score_shares", "score_depth", "rotation", "rotation_depth", "rope_alone", "plasticity_means",
    "plasticity_drops", "norms_means", "null_means", "window_dependence", "heads", "portraits", "changes",
    "rotation_relation", "rope_vs_nope",
)  # fmt: skip


def earlier_summaries() -> Iterator[str]:
    """Summaries that earlier versions wrote and this version does not; those with the same name today are left out."""
    yield from (f"{name}{end}.csv" for name in _SUMMARIES for end in ("", "_common") if (name, end) != ("changes", ""))


def depth_of_layers(layer: npt.ArrayLike, last_layer: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """layer / last layer, in [0, 1]; the only layer of a one-layer model has depth 0."""
    import numpy as np  # here: the command line's help needs the names above, and no numpy

    layers = np.asarray(layer, dtype=np.float64)
    last = np.asarray(last_layer, dtype=np.float64)
    return np.divide(layers, last, out=np.zeros(np.broadcast(layers, last).shape), where=last > 0)
