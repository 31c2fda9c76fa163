"""The contributions of context length, RoPE base, and weights to a change between two checkpoints.

A prediction needs vectors before RoPE (weights), a rotation (RoPE base), and positions (context length). Each can be
taken from either checkpoint: eight predictions, and six orders of replacing one checkpoint's by the other's. A cause's
contribution is its mean over the orders (Shapley); the spread over orders shows how much the causes interact. The rest
of the measured change is unexplained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from qkscope.layers import Rotation
from qkscope.lenses.base import error_name
from qkscope.lenses.draws import drawn_correlations
from qkscope.lenses.rope.predict import (
    Basis,
    KindPreRope,
    LayerPreRope,
    RopeWindow,
    basis_of,
    predict,
    predict_samples,
)
from qkscope.lenses.rotated_moments import Array, Planes, Positions
from qkscope.moments.file import PreRopeFile
from qkscope.moments.replicates import before_rotation
from qkscope.moments.second_moments import KINDS

PARTS = ("window", "base", "weights")
ORDERS = tuple(itertools.permutations(range(len(PARTS))))


class CauseShares(NamedTuple):
    """Each part's share of a change (parts, …), and how far the orders differ about it."""

    shares: Array
    spread: Array


def shapley(predictions: Array) -> CauseShares:
    """The shares of the change from predictions[0, 0, 0] to predictions[1, 1, 1], which they add up to.

    `predictions` is (2, 2, 2, …): window, base and weights before (0) or after (1).
    """
    shares = np.empty((len(ORDERS), len(PARTS), *predictions.shape[3:]))
    for number, order in enumerate(ORDERS):
        at = [0, 0, 0]
        for part in order:
            before = predictions[tuple(at)]
            at[part] = 1
            shares[number, part] = predictions[tuple(at)] - before
    return CauseShares(shares.mean(axis=0), shares.max(axis=0) - shares.min(axis=0))


def together(predictions: Array) -> CauseShares:
    """The share of window and base, changed at once, and that of the weights: (2, …) from two orders.

    A longer window and a larger base often undo each other. Then their two shares are large and depend on the order,
    and only what they do together is well defined.
    """
    both = np.stack([predictions[0, 0], predictions[1, 1]])  # (2, 2, …): window and base, weights
    first, last = both[1, 0] - both[0, 0], both[1, 1] - both[0, 1]
    share = (first + last) / 2
    rest = both[1, 1] - both[0, 0] - share
    return CauseShares(np.stack([share, rest]), np.abs(np.stack([last - first, last - first])))


def split_columns(before: Array, after: Array, predictions: Array) -> dict[str, Array]:
    """The columns of a measured change and its parts: (1 + draws, …) each, `predictions` (2, 2, 2, 1 + draws, …).

    The first is of all documents; draws spread by as much as their error, which is NaN where there are none.
    """
    parts, joint, change = shapley(predictions), together(predictions), after - before
    numbers = {"change": change, **dict(zip(PARTS, parts.shares, strict=True))}
    numbers |= dict(zip(("joint", "joint_weights"), joint.shares, strict=True))
    numbers["unexplained"] = change - parts.shares.sum(axis=0)
    columns = {"before": before[0], "after": after[0]}
    columns |= {"before_rope": predictions[0, 0, 0, 0], "after_rope": predictions[1, 1, 1, 0]}
    for name, (whole, *draws) in numbers.items():
        columns |= {name: whole, error_name(name): np.std(draws, axis=0) if draws else np.full_like(whole, np.nan)}
    spreads = zip((*PARTS, "joint"), (*parts.spread, joint.spread[0]), strict=True)
    return columns | {f"{name}_spread": spread[0] for name, spread in spreads}


# --- eight predictions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryLayer:
    """One layer of one entry over a window: its vectors before RoPE, of all documents and without each group."""

    rest: LayerPreRope
    rotation: Rotation | None
    window: RopeWindow
    sizes: tuple[float, ...]  # tokens of each group that is left out in turn
    _made: dict[tuple[object, ...], Array] = field(default_factory=dict, repr=False, compare=False)

    def predicted(self, rotation: Rotation | None, at: RopeWindow) -> Array:
        """r_q and r_k, (2, 1 + groups, heads), of these vectors with another rotation and window; made once.

        All documents first, then draws: as far from that as another sample of documents would be.
        """
        key = (rotation, at.q, at.k, at.share.tobytes())
        if key not in self._made:
            rest = self.rest.under(rotation)
            whole = predict(rest, at)
            numbers = np.stack([whole.r_q, whole.r_k])[:, None]
            if self.sizes:
                samples = predict_samples(rest, at, whole)
                drawn = drawn_correlations((whole.r_q, samples.r_q), (whole.r_k, samples.r_k), self.sizes)
                numbers = np.concatenate([numbers, np.stack(drawn)], axis=1)
            self._made[key] = numbers
        return self._made[key]


def cube_of(before: EntryLayer, after: EntryLayer) -> Array:
    """All eight predictions of a step, (2, 2, 2, 2, 1 + groups, heads): r_q and r_k; window, base, weights."""
    ends = (before, after)
    made = [ends[w].predicted(ends[b].rotation, ends[t].window) for t, b, w in itertools.product((0, 1), repeat=3)]
    return np.stack(made, axis=1).reshape(2, 2, 2, 2, *made[0].shape[1:])


def entry_layer(
    file: PreRopeFile, layer: int, heads: Sequence[int], window: int, skip: int, groups: Sequence[int]
) -> EntryLayer | None:
    """A layer over a window, with samples without each of these groups; None where nothing can be predicted of it."""
    facts, layout, sums = file.layers[layer], file.layout, file.layer(layer)
    cells, planes = layout.buckets_within(window, skip), Planes.of(facts.rotation, facts.head_dim)
    distinct, keys = np.unique([facts.kv_head(head) for head in heads], return_inverse=True)
    wholes = [before_rotation(sums.unrotated[kind], cells) for kind in KINDS] if sums.n else [None]
    if basis_of(facts, *wholes) > Basis.NOTHING_ROTATES:
        return None
    kinds, positions, tokens = [], [], []
    indices = (np.array(heads, dtype=np.intp), distinct.astype(np.intp))
    for kind, index, whole in zip(KINDS, indices, wholes, strict=True):
        without = [before_rotation(sums.unrotated[kind], cells, group, whole) for group in groups]
        of = [part.take(index) for part in (whole, *without) if part is not None]
        rest = KindPreRope.of(of[0], planes)
        kinds.append(rest.with_samples(of[1:]) if groups else rest)
        in_cells = sums.n[kind][index[0]][cells]
        tokens.append(float(in_cells.sum()))
        edges = layout.edges[cells.start : cells.stop + 1]
        positions.append(Positions.filled(edges, in_cells.sum(axis=1), layout.skip_positions))
    if positions[0] is None or positions[1] is None:
        return None
    at = RopeWindow(positions[0], positions[1], np.full(len(heads), tokens[0] / (tokens[0] + tokens[1])))
    sizes = tuple(float(sums.n["q"][0][cells][:, group].sum()) for group in groups)
    return EntryLayer(LayerPreRope(kinds[0], kinds[1], keys.astype(np.intp)), facts.rotation, at, sizes)
