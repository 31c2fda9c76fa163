"""Single tokens of single heads, where vectors were kept: `sample.csv`.

Some kept tokens of every head along its components and in its plane of drift and separation. Only where a run kept
vectors (`--vectors`). Axes are those of all tokens over the native context, so that every token lies where the head's
numbers say. All heads of a layer have the same tokens: of some documents, evenly spread, and those that lie farthest
out in one of its heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Detail, HeadTable, Lens, Measure
from qkscope.lenses.pca import Array
from qkscope.lenses.rotation.axes import axes_of
from qkscope.lenses.sums import LayerSums
from qkscope.validation.layout import Integers
from qkscope.validation.scan import token_texts_of

MOST_TOKENS = 20_000  # of a layer that are considered
SPREAD = 48  # tokens of a layer that are evenly spread over documents and positions; the page has room for as many
TOGETHER = 12  # tokens of one document, so that it can be seen alone
FAR = 8  # tokens of a layer that are shown because they lie far out in one of its heads

COMPONENTS = 10  # as many as tables have by default
PLANE = {"a": "axis a (drift)", "b": "axis b (separation)"}
# In the order in which a page that is short of room keeps them.
AXES = ("pc0", "pc1", *PLANE, *(f"pc{i}" for i in range(2, COMPONENTS)))
KINDS = {"q": "query", "k": "key"}
PROJECTIONS = tuple(f"{kind}_{axis}" for axis in AXES for kind in KINDS)
ROOM = 2_000_000  # bytes of the page: twenty checkpoints of 64 heads, or four of 576 with PC0 to PC4, a and b
ESSENTIAL = len(KINDS) * 4  # columns of the page in any case: PC0, PC1, a and b


SHARE = (0.0, 1.0)
COLUMNS = (
    Measure("document", "The token's document, by its number in the corpus.", error=None),
    Measure("position", "The token's position.", "tokens", (0.0, np.inf), error=None),
    Measure("spread", "1 if the token is of the even sample, 0 if it is there for lying far out.", "", SHARE,
            error=None),
    Measure("text", "The token as a JSON string; empty where texts were not kept.", error=None, text=True),
    *(
        Measure(f"{kind}_{axis}", f"Projection of the token's {name} on {PLANE.get(axis, f'component {axis[2:]}')}.",
                "vector", error=None)
        for axis in AXES
        for kind, name in KINDS.items()
    ),
)  # fmt: skip


# --- which tokens -----------------------------------------------------------------------------------


def spread_rows(document: Integers) -> Integers:
    """At most SPREAD rows, rising: the same number of each of some documents, evenly spread.

    Rows are in order of document and position.
    """
    names, counts = np.unique(document, return_counts=True)
    shown = min(len(names), max(1, SPREAD // min(TOGETHER, int(np.median(counts)))))
    each = SPREAD // shown
    chosen = names[_evenly(len(names), shown)]
    places = [np.flatnonzero(document == name) for name in chosen]
    return np.concatenate([rows[_evenly(len(rows), each)] for rows in places])


def _evenly(count: int, wanted: int) -> Integers:
    """At most so many of the places 0 … count - 1, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def far_rows(clouds: Iterable[Array], position: Integers, spread: Integers) -> Integers:
    """The rows, other than `spread`, that lie farthest from their line in position in any of these planes, rising.

    Each cloud is (rows, 2): one head's queries or keys along two axes.
    """
    farthest = np.zeros(len(position))
    for cloud in clouds:
        farthest = np.fmax(farthest, distances(cloud, position))
    farthest[spread] = 0.0
    order = np.argsort(-farthest, kind="stable")[:FAR]
    return np.sort(order[farthest[order] > 0])


def distances(xy: Array, position: Integers) -> Array:
    """How far each point (rows, 2) is from the line in position through all, in standard deviations of the residuals.

    Mahalanobis distance in the plane; 0 where the points lie on their line.
    """
    t = position - position.mean()
    size = float(t @ t)
    rest = xy - xy.mean(axis=0)
    rest = rest - np.outer(t, (t @ rest) / size if size else np.zeros(2))
    spread = rest.T @ rest / max(1, len(rest))
    scale = float(np.trace(spread))
    if scale <= 1e-20 * float(np.square(xy).mean() or 1.0):
        return np.zeros(len(xy))
    return np.asarray(np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", rest, np.linalg.pinv(spread), rest), 0.0)))


# --- where they lie ---------------------------------------------------------------------------------


def head_axes(sums: LayerSums) -> Array:
    """The directions of each head's axes, (heads, d, axes); NaN for an axis that it does not have."""
    components, plane = sums.principal.directions, axes_of(sums)  # (heads, d, components), (heads, d)
    directions = np.full((*components.shape[:2], len(AXES)), np.nan)
    for place, axis in enumerate(AXES):
        if axis in PLANE:
            directions[:, :, place] = getattr(plane, axis)
        elif int(axis[2:]) < components.shape[2]:
            directions[:, :, place] = components[:, :, int(axis[2:])]
    return directions


def sample(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """All columns of a layer's heads: (heads, tokens)."""
    heads, kept = len(sums.heads), sums.kept(MOST_TOKENS)
    if kept is None or sums.vectors is None:
        empty = {True: np.full((heads, 1), "", dtype=object), False: np.full((heads, 1), np.nan)}
        return {column.name: empty[column.text] for column in COLUMNS}
    directions, nothing = head_axes(sums), np.full((len(kept.document), sums.facts.head_dim), np.nan)
    who = {"q": (sums.heads, kept.q), "k": (sums.kv_heads, kept.k)}
    vectors = {  # of each head; NaN where they were not kept
        kind: [of[head].astype(np.float64) if head in of else nothing for head in places]
        for kind, (places, of) in who.items()
    }
    planes = [[AXES.index(name) for name in names] for names in (("pc0", "pc1"), tuple(PLANE))]
    clouds = (
        vectors[kind][head] @ directions[head][:, plane]
        for head in range(heads)
        for plane in planes
        for kind in KINDS
        if np.isfinite(directions[head][:, plane]).all() and vectors[kind][head] is not nothing
    )
    spread = spread_rows(kept.document)
    far = far_rows(clouds, kept.position, spread)
    rows = np.concatenate([spread, far])
    texts = token_texts_of(sums.vectors, sums.facts.layer, next(iter(kept.q)), kept)
    of_layer = {
        "document": kept.document[rows].astype(np.float64),
        "position": kept.position[rows].astype(np.float64),
        "spread": np.repeat([1.0, 0.0], [len(spread), len(far)]),
        "text": np.array([json.dumps(texts[row]) if texts[row] else "" for row in rows], dtype=object),
    }
    columns = {name: np.tile(values, (heads, 1)) for name, values in of_layer.items()}
    for kind in KINDS:
        along = np.stack([of[rows] @ each for of, each in zip(vectors[kind], directions, strict=True)])
        columns |= {f"{kind}_{axis}": along[:, :, place] for place, axis in enumerate(AXES)}
    return columns


TABLE = HeadTable("sample", COLUMNS, sample, windows="own", across="token", detail=True, needs_vectors=True)

LENS = Lens(
    name="sample",
    title="Kept tokens",
    question="How do single queries and keys of a head project onto its components?",
    tables=(TABLE,),
    details=(
        Detail("sample", TABLE, ("token",), PROJECTIONS, of_layer=("document", "position", "spread", "text"), room=ROOM,
               essential=ESSENTIAL, together=len(KINDS)),
    ),
)  # fmt: skip
