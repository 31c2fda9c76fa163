"""The eight predictions of every step between checkpoints, layer by layer, with those of other samples of documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.draws import drawn_correlations
from qkscope.lenses.rope.positions import Positions
from qkscope.lenses.rope.pre_rope import Basis, KindPreRope, LayerPreRope, basis_of
from qkscope.lenses.rope.predict import RopeWindow, predict, predict_samples
from qkscope.lenses.rope.rotated_moments import Planes
from qkscope.moments.file import PreRopeFile, PreRopeLayer
from qkscope.moments.replicates import BeforeRotation, before_rotation
from qkscope.moments.second_moments import KINDS, Kind

Array = NDArray[np.float64]


@dataclass(frozen=True)
class EntryLayer:
    """One layer of one entry over a window: its vectors before RoPE (of all documents, then without each group)."""

    rest: LayerPreRope
    rotation: Rotation | None
    window: RopeWindow
    sizes: tuple[float, ...]  # tokens of each group that is left out in turn


def entry_layer(
    file: PreRopeFile, layer: int, heads: Sequence[int], window: int, skip: int, groups: Sequence[int]
) -> EntryLayer | None:
    """A layer over a window; None where nothing can be predicted of it."""
    facts, layout, sums = file.layers[layer], file.layout, file.layer(layer)
    cells = layout.buckets_within(window, skip)
    if not sums.n:
        return None
    index = _index(facts, heads)
    whole = {kind: before_rotation(sums.unrotated[kind], cells) for kind in KINDS}
    if basis_of(facts, *whole.values()) > Basis.NOTHING_ROTATES:
        return None
    samples = {kind: _samples(sums, kind, whole[kind], cells, groups, index[kind]) for kind in KINDS}
    where = {}
    for kind in KINDS:
        tokens = sums.n[kind][index[kind][0]][cells].sum(axis=1)
        where[kind] = Positions.filled(layout.edges[cells.start : cells.stop + 1], tokens, layout.skip_positions)
    q, k = where["q"], where["k"]
    if q is None or k is None:
        return None
    n_q, n_k = (float(sums.n[kind][index[kind][0]][cells].sum()) for kind in KINDS)
    keys = np.unique([facts.kv_head(head) for head in heads], return_inverse=True)[1]
    window_at = RopeWindow(q, k, np.full(len(heads), n_q / (n_q + n_k)))
    sizes = tuple(float(sums.n["q"][0][cells][:, group].sum()) for group in groups)
    planes = Planes(facts.rotation, facts.head_dim)
    at_rest_q, at_rest_k = (KindPreRope.of(samples[kind][0], planes) for kind in KINDS)
    rest = LayerPreRope(at_rest_q, at_rest_k, keys.astype(np.intp))
    return EntryLayer(rest.with_samples(samples["q"], samples["k"]), facts.rotation, window_at, sizes)


def _index(facts: LayerFacts, heads: Sequence[int]) -> dict[Kind, NDArray[np.intp]]:
    """Which of a layer's entries are wanted: its query heads, and the distinct key heads that they read."""
    keys = np.unique([facts.kv_head(head) for head in heads])
    return {"q": np.array(heads, dtype=np.intp), "k": keys.astype(np.intp)}


def _samples(
    sums: PreRopeLayer,
    kind: Kind,
    whole: BeforeRotation | None,
    cells: slice,
    groups: Sequence[int],
    index: NDArray[np.intp],
) -> list[BeforeRotation]:
    """All documents, then those without each group."""
    assert whole is not None  # a basis was found
    parts = [before_rotation(sums.unrotated[kind], cells, group, whole) for group in groups]
    return [part.take(index) for part in (whole, *parts) if part is not None]


class Predictions:
    """Predictions of one layer with the weights, rotation and window of entries that are held; each is made once."""

    def __init__(self) -> None:
        self._entries: dict[int, EntryLayer] = {}
        self._turned: dict[tuple[int, Rotation | None], LayerPreRope] = {}
        self._made: dict[tuple[object, ...], tuple[Array, Array]] = {}

    def hold(self, number: int, entry: EntryLayer) -> None:
        """An entry from which, and with which, predictions will be made."""
        self._entries[number] = entry

    def forget(self, number: int) -> None:
        """Nothing more is asked about an entry."""
        del self._entries[number]
        self._turned = {key: rest for key, rest in self._turned.items() if key[0] != number}
        self._made = {key: pair for key, pair in self._made.items() if key[0] != number}

    def of(self, window: int, base: int, weights: int) -> tuple[Array, Array]:
        """(r_q, r_k), each (1 + groups, heads), with the window, rotation and vectors before RoPE of these entries.

        All documents first, then draws: as far from that as another sample of documents would be.
        """
        rotation, at = self._entries[base].rotation, self._entries[window].window
        key = (weights, rotation, at.q, at.k, at.share.tobytes())
        if key not in self._made:
            self._made[key] = self._predicted(weights, rotation, at)
        return self._made[key]

    def _predicted(self, weights: int, rotation: Rotation | None, at: RopeWindow) -> tuple[Array, Array]:
        if (weights, rotation) not in self._turned:
            self._turned[weights, rotation] = self._entries[weights].rest.under(rotation)
        rest, sizes = self._turned[weights, rotation], self._entries[weights].sizes
        whole = predict(rest, at)
        if not sizes:
            return whole.r_q[None], whole.r_k[None]
        samples = predict_samples(rest.left, at, whole)
        drawn = drawn_correlations((whole.r_q, samples.r_q), (whole.r_k, samples.r_k), sizes)
        return np.concatenate([whole.r_q[None], drawn[0]]), np.concatenate([whole.r_k[None], drawn[1]])

    def cube(self, before: int, after: int) -> tuple[Array, Array]:
        """All eight predictions of a step, (2, 2, 2, 1 + groups, heads): window, base, weights before or after."""
        pairs = [self.of(*((before, after)[each] for each in which)) for which in itertools.product((0, 1), repeat=3)]
        r_q, r_k = (np.stack([each[i] for each in pairs]) for i in (0, 1))
        return r_q.reshape(2, 2, 2, *r_q.shape[1:]), r_k.reshape(2, 2, 2, *r_k.shape[1:])
