"""Tables of version 0.2: which there were, and what to do with a folder that still has them.

0.2 had a table per lens, and summaries for each choice of windows; now there is one table per kind of row. Numbers in
such a folder may be of another estimator, so they are never mixed with tables of this version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qkscope.errors import TableError
from qkscope.results.folder import MOMENTS_SUFFIX, entries, head_table_path, moments_folder

# By name: a row per head, component, bucket, plane or distance. Their columns are now those of `heads`, `components`,
# `buckets`, `parts`, `planes`, `distances`, `pairs`, `tokens`, `replicates` and `layer_means`.
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


def refuse_earlier_tables(folder: Path, source: Path) -> None:
    """Refuse a folder with tables of 0.2, and state how to get those of this version; `source` is how it was named."""
    there = [name for name in EARLIER_TABLES if head_table_path(folder, name).is_file()]
    if not there:
        return
    problem = (
        f"{source}: has tables of qkscope 0.2 ({there[0]}{f' and {len(there) - 1} more' if len(there) > 1 else ''})"
    )
    moments = moments_folder(folder)
    if any(entry.name.endswith(MOMENTS_SUFFIX) for entry in entries(moments)):
        raise TableError(f"{problem}; `qkscope analyze {source}` writes them again from its moments")
    raise TableError(
        f"{problem} and no moments to write them again from; read it with qkscope 0.2, or keep qk.csv and "
        "provenance.json alone in a folder and read that"
    )
