"""A dataset of vectors in, rows of a head table out: the same as from a capture, for the heads that are there.

Layers are read, analysed and forgotten one by one, so a dataset of any number of layers needs one layer's sums.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from qkscope.lenses.base import HeadTable
from qkscope.lenses.rows import COMPONENTS, finished, layer_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.moments import Moments
from qkscope.vectors.read import Reading, layers_from_vectors, open_vectors


def table_from_vectors(
    table: HeadTable,
    folder: Path | str,
    *,
    model: str,
    components: int = COMPONENTS,
    window: int | None = None,
    reading: Reading = Reading(),  # noqa: B008 - frozen
) -> pd.DataFrame:
    """The rows of the query heads that are present, over the first `window` positions (all by default)."""
    vectors = open_vectors(folder, replace(reading, groups=1))  # groups only serve error bars
    layers = []
    for facts, sums in layers_from_vectors(vectors):
        moments = Moments.from_layers(vectors.layout, [facts], {facts.layer: sums}, {})
        of_layer = layer_sums(moments, facts.layer, sorted(vectors.pairs[facts.layer]), window, components)
        layers.append(layer_rows([table], of_layer, vectors.n_layers, window or vectors.layout.context))
    return finished([table], layers, model, lambda _window: "own")
