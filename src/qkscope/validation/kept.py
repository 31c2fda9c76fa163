"""The sample of vectors that a run kept of a checkpoint (`run --vectors`), one layer at a time.

All heads of a layer have the same tokens there, in order of document and position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.second_moments import Kind
from qkscope.validation.layout import TOKEN_COLUMN, HeadName, VectorsError, find_vectors, stored_sample
from qkscope.validation.sampling import Integers, VectorSample
from qkscope.validation.scan import HeadScan, head_vectors, scan_tokens


@dataclass(frozen=True)
class KeptLayer:
    """Some tokens of a layer: their documents and positions, and the vectors of some heads."""

    document: Integers  # (tokens,), rising
    position: Integers  # (tokens,), rising within a document
    q: Mapping[int, NDArray[Any]]  # by query head: (tokens, d), float32 as kept
    k: Mapping[int, NDArray[Any]]  # by key head

    def take(self, rows: NDArray[Any]) -> KeptLayer:
        """Some of the tokens, by index or mask."""
        q, k = ({head: vectors[rows] for head, vectors in heads.items()} for heads in (self.q, self.k))
        return KeptLayer(self.document[rows], self.position[rows], q, k)


def kept_layer(
    folder: Path,
    layer: int,
    heads: Iterable[int],
    keys: Iterable[int],
    *,
    low: int = 0,
    high: float = inf,
    most: float = inf,
    draw: np.random.Generator | None = None,
) -> KeptLayer | None:
    """The tokens at positions `low` … `high` (without `high`) that were kept; None where none were, of these heads.

    Of more than `most`, the first documents that fit are taken, or with `draw`, tokens at random; the others do not
    need memory. Heads that were not kept are left out.
    """
    files = find_vectors(folder, layer).files
    names = [HeadName(layer, head, "q") for head in heads] + [HeadName(layer, head, "k") for head in keys]
    names = [name for name in names if name in files]
    if {name.kind for name in names} != {"q", "k"}:
        return None
    document, position = _tokens(names[0], files[names[0]])[:2]
    inside = np.flatnonzero((position >= low) & (position < high))
    if draw is not None and len(inside) > most:
        inside = inside[np.sort(draw.choice(len(inside), int(most), replace=False))]
    inside = inside[: _whole_documents(document[inside], most)]
    if not len(inside):  # a sparse sample can miss a short window
        return None
    vectors: dict[Kind, dict[int, NDArray[np.float32]]] = {"q": {}, "k": {}}
    for name in names:
        documents, positions, order, scan = _tokens(name, files[name])
        if not (np.array_equal(documents, document) and np.array_equal(positions, position)):
            where = files[name][0].parent
            raise VectorsError(f"{where}: has other tokens than the rest of its layer; capture it again")
        vectors[name.kind][name.head] = head_vectors(scan, order[inside]).astype(np.float32, copy=False)
    return KeptLayer(document[inside], position[inside], vectors["q"], vectors["k"])


def _tokens(name: HeadName, files: tuple[Path, ...]) -> tuple[Integers, Integers, NDArray[np.intp], HeadScan]:
    """A head's documents and positions in order, the rows of its files in that order, and what its files hold."""
    scan, document, position = scan_tokens(name, files)
    order = np.lexsort((position, document))
    return document[order], position[order], order, scan


def _whole_documents(document: Integers, most: float) -> int:
    """How many of the first tokens are whole documents and at most `most`; one document at least."""
    ends = [*(np.flatnonzero(np.diff(document)) + 1).tolist(), len(document)]
    return max([end for end in ends if end <= most] or ends[:1])


def token_texts_of(folder: Path, layer: int, head: int, kept: KeptLayer) -> list[str]:
    """The text of each kept token; empty where the dataset has no texts."""
    import pyarrow.parquet as pq

    texts: dict[tuple[int, int], str] = {}
    for path in find_vectors(folder, layer).files[HeadName(layer, head, "q")]:
        if TOKEN_COLUMN not in pq.read_schema(path).names:
            continue
        rows = pq.read_table(path, columns=["example_id", "position", TOKEN_COLUMN]).to_pydict()
        places = zip(rows["example_id"], rows["position"], strict=True)
        texts |= dict(zip(places, map(str, rows[TOKEN_COLUMN]), strict=True))
    places = zip(kept.document.tolist(), kept.position.tolist(), strict=True)
    return [texts.get(place, "") for place in places]


def sample_mismatch(folder: Path, wanted: VectorSample, context: int) -> str | None:
    """Why the vectors in `folder` are not the wanted sample of a checkpoint of this context; None if they are."""
    stored = stored_sample(folder)
    if stored is None or replace(stored, tokens=wanted.tokens) != replace(wanted, rate=wanted.rate_at(context)):
        return "vectors of another run or rate"
    return "vectors without the texts of their tokens" if wanted.tokens and not stored.tokens else None
