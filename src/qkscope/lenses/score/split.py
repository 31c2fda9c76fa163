"""The split of scores of a layer or of a replicate: in every bucket, or over the whole window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.score.curves import COARSE
from qkscope.lenses.score.lines import whole_window
from qkscope.lenses.score.parts import Split, exact_split, means_of
from qkscope.lenses.score.replicate import replicate_split, whole_layer
from qkscope.lenses.sums import LayerSums


def score_split(sums: LayerSums) -> Split:
    """The split with a line and an arc in every bucket."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        whole = sums.shared(whole_layer)
        return whole.split if sums.whole is None else replicate_split(sums, whole)


def line_split(sums: LayerSums) -> Split:
    """The same with one line and arc over the whole window, which does not depend on how many buckets there are."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        whole, coarse = sums.shared(_whole_window)
        if sums.whole is None:
            return whole
        cells, is_fixed = whole_window(sums), sums.replication.method == "covariances fixed"
        split, _ = exact_split(whole_window(sums.whole) if is_fixed else cells, means_of(sums, cells), COARSE)
        position = whole.position + split.position - coarse.position
        query_position = whole.query_position + split.query_position - coarse.query_position
        return replace(split, position=position, query_position=query_position)


def _whole_window(sums: LayerSums) -> tuple[Split, Split]:
    """The split of all documents, and the same on the coarse grid."""
    cells = whole_window(sums)
    means = means_of(sums, cells)
    return exact_split(cells, means)[0], exact_split(cells, means, COARSE)[0]
