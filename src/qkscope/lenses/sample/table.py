"""`sample.csv`: some kept tokens of every head along its components and in its plane of drift and separation.

Only where a run kept vectors (`--vectors`). Axes are those of all tokens over the own context, so that every token lies
where the head's numbers say. All heads of a layer have the same tokens: of some documents, evenly spread, and those
that lie farthest out in one of its heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Detail, HeadTable, Measure
from qkscope.lenses.pca import Array
from qkscope.lenses.rotation.axes import axes_of
from qkscope.lenses.sample.choose import Integers, far_rows, spread_rows
from qkscope.lenses.sums import LayerSums
from qkscope.vectors.kept import KeptLayer, token_texts_of

FILE = "sample"
MOST_TOKENS = 20_000  # of a layer that are looked at
COMPONENTS = 10  # as many as tables have by default
PLANE = ("a", "b")  # drift and separation
# In the order in which a page that is short of room keeps them.
AXES = ("pc0", "pc1", *PLANE, *(f"pc{i}" for i in range(2, COMPONENTS)))
KINDS = {"q": "query", "k": "key"}
PROJECTIONS = tuple(f"{kind}_{axis}" for axis in AXES for kind in KINDS)
ROOM = 2_000_000  # bytes of the page: twenty checkpoints of 64 heads, or four of 576 with PC0 to PC4, a and b
ESSENTIAL = len(KINDS) * 4  # columns of the page in any case: PC0, PC1, a and b


def _definition(kind: str, axis: str) -> str:
    along = f"component {axis[2:]}" if axis not in PLANE else {"a": "axis a (drift)", "b": "axis b (separation)"}[axis]
    return f"Projection of the token's {KINDS[kind]} on {along}."


SHARE = (0.0, 1.0)
COLUMNS = (
    Measure("document", "The token's document, by its number in the corpus.", error=None),
    Measure("position", "The token's position.", "tokens", (0.0, np.inf), error=None),
    Measure(
        "spread", "1 if the token is of the even sample, 0 if it is there for lying far out.", "", SHARE, error=None
    ),
    Measure("text", "The token as a JSON string; empty where texts were not kept.", error=None, text=True),
    *(Measure(f"{kind}_{axis}", _definition(kind, axis), "vector", error=None) for axis in AXES for kind in KINDS),
)


@dataclass(frozen=True)
class HeadCloud:
    """A head's kept vectors, and the directions of its axes (d, axes); NaN for an axis that it does not have."""

    q: Array | None
    k: Array | None
    directions: Array

    def along(self, kind: str, rows: Integers) -> Array:
        """Projections of some tokens, (rows, axes)."""
        vectors = self.q if kind == "q" else self.k
        if vectors is None:
            return np.full((len(rows), self.directions.shape[1]), np.nan)
        return vectors[rows] @ self.directions

    def planes(self) -> Iterator[Array]:
        """Queries and keys along the first two components and in the plane of drift and separation, (rows, 2) each."""
        for names in (("pc0", "pc1"), PLANE):
            directions = self.directions[:, [AXES.index(name) for name in names]]
            for vectors in (self.q, self.k):
                if vectors is not None and np.isfinite(directions).all():
                    yield vectors @ directions


def sample(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """All columns of a layer's heads: (heads, tokens)."""
    heads, kept = len(sums.heads), sums.kept(MOST_TOKENS)
    if kept is None:
        return {
            c.name: np.full((heads, 1), "" if c.text else np.nan, dtype=object if c.text else None) for c in COLUMNS
        }
    clouds = list(head_clouds(sums, kept))
    spread = spread_rows(kept.document)
    far = far_rows((plane for cloud in clouds for plane in cloud.planes()), kept.position, spread)
    rows = np.concatenate([spread, far])
    of_layer = {
        "document": kept.document[rows].astype(np.float64),
        "position": kept.position[rows].astype(np.float64),
        "spread": np.repeat([1.0, 0.0], [len(spread), len(far)]),
        "text": np.array([_cell(text) for text in _texts(sums, kept, rows)], dtype=object),
    }
    along = {kind: np.stack([cloud.along(kind, rows) for cloud in clouds]) for kind in KINDS}  # (heads, rows, axes)
    return {
        **{name: np.tile(values, (heads, 1)) for name, values in of_layer.items()},
        **{f"{kind}_{axis}": values[:, :, at] for kind, values in along.items() for at, axis in enumerate(AXES)},
    }


def _nothing(column: Measure, heads: int) -> NDArray[Any]:
    return np.full((heads, 1), "", dtype=object) if column.text else np.full((heads, 1), np.nan)


def head_clouds(sums: LayerSums, kept: KeptLayer) -> Iterator[HeadCloud]:
    """The kept vectors of each head of a layer; of heads whose vectors were not kept, nothing."""
    components, plane = sums.principal.directions, axes_of(sums)  # (heads, d, components), (heads, d)
    for at, (head, key) in enumerate(zip(sums.heads, sums.kv_heads, strict=True)):
        directions = np.full((components.shape[1], len(AXES)), np.nan)
        for place, axis in enumerate(AXES):
            if axis in PLANE:
                directions[:, place] = getattr(plane, axis)[at]
            elif int(axis[2:]) < components.shape[2]:
                directions[:, place] = components[at, :, int(axis[2:])]
        q, k = (None if each is None else each.astype(np.float64) for each in (kept.q.get(head), kept.k.get(key)))
        yield HeadCloud(q, k, directions)


def _texts(sums: LayerSums, kept: KeptLayer, rows: Integers) -> list[str]:
    """The text of each of these tokens; empty where it was not kept. All heads of a layer have the same tokens."""
    if sums.vectors is None:
        return [""] * len(rows)
    texts = token_texts_of(sums.vectors, sums.facts.layer, next(iter(kept.q)), kept)
    return [texts[row] for row in rows]


def _cell(text: str) -> str:
    return json.dumps(text, ensure_ascii=True) if text else ""


TABLE = HeadTable(FILE, COLUMNS, sample, windows="own", across="token", detail=True, of_vectors=True)
"""Pictures of single heads: the kept sample of queries and keys along the axes of the head."""

DETAIL = Detail(
    "sample", TABLE, ("token",), PROJECTIONS, of_layer=("document", "position", "spread", "text"), room=ROOM,
    essential=ESSENTIAL, together=len(KINDS),
)  # fmt: skip
