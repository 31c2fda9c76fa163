"""`sample.csv`: some kept tokens of every head along its first two components, for pictures of single heads.

Only where a run kept vectors (`--vectors`). Axes are those of all tokens over the own context, so that every token lies
where the head's numbers say. All heads of a layer have the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums
from qkscope.vectors.kept import KeptLayer

FILE = "sample.csv"
POINTS = 48  # tokens of a head; the page has room for as many
MOST_TOKENS = 20_000  # of a layer that are looked at
AXES = (0, 1)  # components
COLUMNS = (
    Column("document", "The token's document, by its number in the corpus.", error=None),
    Column("position", "The token's position.", "tokens", (0.0, np.inf), error=None),
    *(
        Column(f"{kind}_pc{pc}", f"Projection of the token's {word} on component {pc}.", "vector", error=None)
        for kind, word in (("q", "query"), ("k", "key"))
        for pc in AXES
    ),
)


def sample(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """All columns of a layer's heads: (heads, tokens)."""
    kept = sums.kept(MOST_TOKENS)
    if kept is None:
        return {column.name: np.full((len(sums.heads), 1), np.nan) for column in COLUMNS}
    rows = spread_rows(len(kept.position))
    tokens = {
        "document": np.tile(kept.document[rows].astype(np.float64), (len(sums.heads), 1)),
        "position": np.tile(kept.position[rows].astype(np.float64), (len(sums.heads), 1)),
    }
    return {**tokens, **_projections(sums, kept, rows)}


def spread_rows(count: int) -> NDArray[np.int64]:
    """At most POINTS of so many rows, evenly spread: rows are in order of document and position."""
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(np.int64))


def _projections(sums: LayerSums, kept: KeptLayer, rows: NDArray[np.int64]) -> dict[str, Array]:
    """Of heads whose vectors were not kept, nothing."""
    directions = sums.principal.directions  # (heads, d, components)
    projections = {f"{kind}_pc{pc}": np.full((len(sums.heads), len(rows)), np.nan) for kind in "qk" for pc in AXES}
    for at, (head, key) in enumerate(zip(sums.heads, sums.kv_heads, strict=True)):
        for kind, vectors in (("q", kept.q.get(head)), ("k", kept.k.get(key))):
            for pc in AXES if vectors is not None else ():
                if vectors is not None and pc < directions.shape[2]:
                    projections[f"{kind}_pc{pc}"][at] = vectors[rows].astype(np.float64) @ directions[at, :, pc]
    return projections


TABLE = HeadTable(FILE, COLUMNS, sample, windows="own", across="token", detail=True, of_vectors=True)
