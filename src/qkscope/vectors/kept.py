"""The sample of vectors that a run kept of a checkpoint (`--vectors`), one layer at a time, for whoever needs pairs.

All heads of a layer have the same tokens there, in order of document and position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import TOKEN_COLUMN, HeadName, Kind, VectorFolders, find_vectors
from qkscope.vectors.scan import Integers, scan_head, vector_batches


@dataclass(frozen=True)
class KeptLayer:
    """Some tokens of a layer: their documents and positions, and the vectors of some heads."""

    document: Integers  # (rows,), rising
    position: Integers  # (rows,), rising within a document
    q: dict[int, NDArray[np.float32]]  # by head: (rows, d)
    k: dict[int, NDArray[np.float32]]  # by key head


def kept_layer(
    folder: Path, layer: int, heads: Iterable[int], keys: Iterable[int], *, low: int, high: int, most: int
) -> KeptLayer | None:
    """The tokens at positions `low` … `high` (without `high`) that were kept; None where none were, of these heads.

    Of more than `most`, the first documents that fit are taken. Heads that were not kept are left out.
    """
    folders = find_vectors(folder)
    wanted: dict[Kind, list[int]] = {
        "q": [head for head in heads if HeadName(layer, head, "q") in folders.files],
        "k": [head for head in keys if HeadName(layer, head, "k") in folders.files],
    }
    if not wanted["q"] or not wanted["k"]:
        return None
    parts = {kind: {head: _read(folders, HeadName(layer, head, kind)) for head in of} for kind, of in wanted.items()}
    document, position, _ = parts["q"][wanted["q"][0]]
    for kind, of_kind in parts.items():
        for head, (documents, positions, _) in of_kind.items():
            if not (np.array_equal(documents, document) and np.array_equal(positions, position)):
                name = HeadName(layer, head, kind).folder
                raise VectorsError(
                    f"{folders.root / name}: has other tokens than the rest of its layer; capture it again"
                )
    inside = np.flatnonzero((position >= low) & (position < high))
    if not len(inside):  # a sparse sample can miss a short window
        return None
    inside = inside[: _whole_documents(document[inside], most)]
    return KeptLayer(
        document[inside],
        position[inside],
        {head: vectors[inside] for head, (_, _, vectors) in parts["q"].items()},
        {head: vectors[inside] for head, (_, _, vectors) in parts["k"].items()},
    )


def _read(folders: VectorFolders, name: HeadName) -> tuple[Integers, Integers, NDArray[np.float32]]:
    """One head's rows, in order of document and position."""
    batches = list(vector_batches(scan_head(name, folders.files[name])))
    document, position = (np.concatenate([getattr(b, each) for b in batches]) for each in ("example_id", "position"))
    order = np.lexsort((position, document))
    vectors = np.concatenate([batch.vectors for batch in batches]).astype(np.float32, copy=False)
    return document[order], position[order], vectors[order]


def _whole_documents(document: Integers, most: int) -> int:
    """How many of the first rows are whole documents and at most `most`; one document at least."""
    if len(document) <= most:
        return len(document)
    starts = np.flatnonzero(np.diff(document)) + 1
    fitting = starts[starts <= most]
    return int(fitting[-1]) if len(fitting) else int(starts[0]) if len(starts) else len(document)


def token_texts_of(folder: Path, layer: int, head: int, kept: KeptLayer) -> list[str]:
    """The text of each kept token, where the dataset has it; empty ones where it has not."""
    import pyarrow.parquet as pq

    texts: dict[tuple[int, int], str] = {}
    for path in find_vectors(folder).files[HeadName(layer, head, "q")]:
        if TOKEN_COLUMN not in pq.read_schema(path).names:
            continue
        rows = pq.read_table(path, columns=["example_id", "position", TOKEN_COLUMN]).to_pydict()
        places = zip(rows["example_id"], rows["position"], strict=True)
        texts |= dict(zip(places, map(str, rows[TOKEN_COLUMN]), strict=True))
    places = zip(kept.document.tolist(), kept.position.tolist(), strict=True)
    return [texts.get(place, "") for place in places]
