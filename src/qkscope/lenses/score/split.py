"""The split of scores of a layer or of a replicate: in every bucket, or over the whole window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.score.curves import COARSE
from qkscope.lenses.score.lines import cells_of, whole_window
from qkscope.lenses.score.parts import Split, exact_split, means_of
from qkscope.lenses.score.replicate import replicate_split, whole_layer
from qkscope.lenses.sums import LayerSums


def score_split(sums: LayerSums) -> Split:
    """The split with a line and an arc in every bucket."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        if sums.whole is not None:
            return replicate_split(sums, sums.shared(whole_layer))
        cells = cells_of(sums)
        return exact_split(cells, means_of(sums, cells))


def line_split(sums: LayerSums) -> Split:
    """The same with one line and arc over the whole window, which does not depend on how many buckets there are."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        whole = sums.shared(_whole_window)
        if sums.whole is None:
            return whole
        coarse, cells = sums.shared(_coarsely), whole_window(sums)
        is_fixed = sums.replication.method == "covariances fixed"
        split = exact_split(whole_window(sums.whole) if is_fixed else cells, means_of(sums, cells), COARSE)
        position = whole.position + split.position - coarse.position
        query_position = whole.query_position + split.query_position - coarse.query_position
        return replace(split, position=position, query_position=query_position)


def _whole_window(sums: LayerSums) -> Split:
    """The split of all documents."""
    cells = whole_window(sums)
    return exact_split(cells, means_of(sums, cells))


def _coarsely(sums: LayerSums) -> Split:
    """The same on the coarse grid."""
    cells = whole_window(sums)
    return exact_split(cells, means_of(sums, cells), COARSE)
