"""A dataset of vectors in, rows of `qk.csv` out: the same table as from a capture, for the heads that are there.

Layers are read, analysed and forgotten one by one, so a dataset of any number of layers needs one layer's sums.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from qkscope.analysis.qk_table import COMPONENTS, layer_components, layer_rows, warn_undefined
from qkscope.analysis.schema import QK_COLUMNS
from qkscope.moments.moments import Moments
from qkscope.vectors.read import Reading, layers_from_vectors, open_vectors


def table_from_vectors(
    folder: Path | str,
    *,
    model: str,
    components: int = COMPONENTS,
    window: int | None = None,
    reading: Reading = Reading(),  # noqa: B008 - frozen
) -> pd.DataFrame:
    """One row per present query head and component, over the first `window` positions (all by default)."""
    found = open_vectors(folder, replace(reading, groups=1))  # groups only serve error bars
    frames = []
    for facts, sums in layers_from_vectors(found):
        moments = Moments.from_layers(found.layout, [facts], {facts.layer: sums}, {})
        heads = sorted(found.pairs[facts.layer])
        components_of = layer_components(moments, facts.layer, heads, window, components)
        frames.append(layer_rows(facts, heads, components_of, found.n_layers))
    table = pd.concat(frames, ignore_index=True)
    table["model"] = model
    table["window"] = window or found.layout.context
    warn_undefined(table, model)
    return table[list(QK_COLUMNS)]
