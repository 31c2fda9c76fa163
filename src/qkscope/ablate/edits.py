"""What is done to a head's scores: each edit takes one thing away and leaves the rest.

A head's score of key j for query i is q_i.k_j. What the head's queries and keys are on average at each position comes
from moments of other documents than those an edit is measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.layers import Rotation
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class HeadEdit:
    """A change of one head's scores, for positions 0 … tokens - 1. An edit with nothing in it changes nothing.

    Scores become (q_i - query_shift_i).(k_j - key_shift_j) - mean_query_i.mean_key_j + by_distance[i - j].
    """

    query_shift: Array | None = None  # (tokens, d)
    key_shift: Array | None = None  # (tokens, d)
    mean_pair: tuple[Array, Array] | None = None  # (tokens, d) each
    by_distance: Array | None = None  # (tokens,)
    silent: bool = False  # the head puts out zeros


Needs = Literal["before rotation", "after rotation"]


@dataclass(frozen=True)
class EditKind:
    """A kind of edit: its definition, and how it is made for the heads of a layer."""

    name: str
    definition: str  # one sentence, for help, docs and tables
    make: Callable[[LayerSums, int, int], list[HeadEdit]]  # (sums, tokens, seed) -> one for each of sums.heads
    needs: Needs | None  # which sums it is made of; None: it needs none


def edits_of(name: str, sums: LayerSums, tokens: int, seed: int = 0) -> dict[int, HeadEdit]:
    """The edit of that name for each head of `sums`; InputError where the sums do not carry it."""
    if name not in KINDS:
        raise InputError(f"{name!r} is not an edit; the edits are {', '.join(KINDS)}")
    return dict(zip(sums.heads, KINDS[name].make(sums, tokens, seed), strict=True))


# -- mean queries and keys at every position ----------------------------------------------------------------


def rotated_mean(mean: Array, rotation: Rotation | None, tokens: int) -> Array:
    """A pre-RoPE mean (d,) rotated to each position 0 … tokens - 1: (tokens, d). Without a rotation it is repeated.

    `rotation.scale` (YaRN) is not applied: pre-RoPE sums are rotated back from captured vectors, which contain it.
    """
    rotated = np.tile(np.asarray(mean, dtype=np.float64), (tokens, 1))
    if rotation is None:
        return rotated
    first, second = np.array(rotation.pairs).T
    angle = np.arange(tokens)[:, None] * np.array(rotation.angles)
    cos, sin = np.cos(angle), np.sin(angle)
    rotated[:, first] = mean[first] * cos - mean[second] * sin
    rotated[:, second] = mean[second] * cos + mean[first] * sin
    return rotated


def before_means(sums: LayerSums, tokens: int) -> tuple[list[Array], list[Array]]:
    """What RoPE makes of each head's mean query and mean key: (tokens, d) for each head."""
    facts = sums.facts
    if sums.q_before is None or sums.k_before is None or (facts.rotary != "nope" and facts.rotation is None):
        raise InputError(
            f"layer {facts.layer}: these moments have no sums from before rotation (it could not be measured, "
            "or the file is of an earlier version); capture again, or use the edit kernel_measured"
        )
    rotation = facts.rotation if facts.rotary != "nope" else None
    queries = [rotated_mean(mean, rotation, tokens) for mean in sums.q_before.mean]
    keys = [rotated_mean(mean, rotation, tokens) for mean in sums.k_before.mean]
    return queries, [keys[which] for which in sums.distinct_keys[1]]


def measured_means(sums: LayerSums, tokens: int) -> tuple[list[Array], list[Array]]:
    """The mean query and key of each position as buckets tell them, a line inside each bucket."""
    queries, keys = _by_position(sums.q_buckets, sums.edges, tokens), _by_position(sums.k_buckets, sums.edges, tokens)
    return list(queries), [keys[which] for which in sums.distinct_keys[1]]


def _by_position(of: Statistics, edges: tuple[int, ...], tokens: int) -> Array:
    """(heads, tokens, d): the mean of each position's bucket, with its drift; beyond the last bucket, that one's."""
    t = np.arange(tokens)
    bucket = np.clip(np.searchsorted(edges, t, side="right") - 1, 0, len(edges) - 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = np.where(of.var_t[..., None] > 0, of.cov_xt / of.var_t[..., None], 0.0)
    return np.asarray(of.mean_x[:, bucket] + (t - of.mean_t[:, bucket])[..., None] * slope[:, bucket])


def kernel_of(query: Array, key: Array) -> Array:
    """Mean score by distance, 0 … tokens - 1: the mean query at each position with the mean key at position 0.

    RoPE makes it a function of the distance alone.
    """
    return np.asarray(query @ key[0])


# -- the edits ------------------------------------------------------------------------------------------------


def _kernel(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    queries, keys = before_means(sums, tokens)
    return [HeadEdit(by_distance=-kernel_of(q, k)) for q, k in zip(queries, keys, strict=True)]


def _kernel_measured(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    queries, keys = measured_means(sums, tokens)
    return [HeadEdit(mean_pair=pair) for pair in zip(queries, keys, strict=True)]


def _shuffle(sums: LayerSums, tokens: int, seed: int) -> list[HeadEdit]:
    """Every head has its own order of distances, which does not depend on what other heads are edited."""
    queries, keys = before_means(sums, tokens)
    edits = []
    for head, q, k in zip(sums.heads, queries, keys, strict=True):
        kernel = kernel_of(q, k)
        order = np.random.default_rng([seed, sums.facts.layer, head]).permutation(tokens)
        edits.append(HeadEdit(by_distance=kernel[order] - kernel))
    return edits


def _query_mean(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    return [HeadEdit(query_shift=mean) for mean in before_means(sums, tokens)[0]]


def _key_mean(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    return [HeadEdit(key_shift=mean) for mean in before_means(sums, tokens)[1]]


def _flatten(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    """Along a, the direction in which queries and keys together go with position most (docs/lenses/rotation.md)."""
    share = (sums.q.n / (sums.q.n + sums.k.n))[:, None]
    apart = share * (1 - share) * (sums.q.mean_t - sums.k.mean_t)[:, None] * (sums.q.mean_x - sums.k.mean_x)
    drift = share * sums.q.cov_xt + (1 - share) * sums.k.cov_xt + apart
    with np.errstate(invalid="ignore", divide="ignore"):
        axis = drift / np.linalg.norm(drift, axis=1, keepdims=True)
    return _without_line(sums, axis, tokens)


def _flatten_pc0(sums: LayerSums, tokens: int, _: int) -> list[HeadEdit]:
    return _without_line(sums, sums.principal.directions[:, :, 0], tokens)


def _without_line(sums: LayerSums, axes: Array, tokens: int) -> list[HeadEdit]:
    t = np.arange(tokens)
    shifts = []
    for of in (sums.q, sums.k):
        slope = np.einsum("hd,hd->h", axes, of.cov_xt) / of.var_t
        line = (t - of.mean_t[:, None]) * slope[:, None]  # (heads, tokens)
        shifts.append(np.nan_to_num(line[..., None] * axes[:, None]))
    return [HeadEdit(query_shift=q, key_shift=k) for q, k in zip(*shifts, strict=True)]


def _zero(sums: LayerSums, _: int, __: int) -> list[HeadEdit]:
    return [HeadEdit(silent=True) for _head in sums.heads]


def _nothing(sums: LayerSums, _: int, __: int) -> list[HeadEdit]:
    return [HeadEdit() for _head in sums.heads]


_BEFORE: Needs = "before rotation"
_AFTER: Needs = "after rotation"
_ALL = (
    EditKind(
        "kernel",
        "Subtract the mean score at each distance that RoPE makes of the mean query and key.",
        _kernel,
        _BEFORE,
    ),
    EditKind(
        "kernel_measured", "Subtract the mean score of each pair of positions, as measured.", _kernel_measured, _AFTER
    ),
    EditKind("key_mean", "Subtract the mean key, as RoPE turns it, from every key.", _key_mean, _BEFORE),
    EditKind("query_mean", "Subtract the mean query, as RoPE turns it, from every query.", _query_mean, _BEFORE),
    EditKind("flatten", "Subtract the drift with position along axis a from queries and keys.", _flatten, _AFTER),
    EditKind(
        "flatten_pc0", "Subtract the drift with position along component 0 from queries and keys.", _flatten_pc0, _AFTER
    ),
    EditKind("shuffle", "Give every distance the mean score of another distance.", _shuffle, _BEFORE),
    EditKind("zero", "The head puts out zeros: what it is worth at all.", _zero, None),
    EditKind("nothing", "Compute the head again without a change: what rounding alone does.", _nothing, None),
)
KINDS: Mapping[str, EditKind] = {kind.name: kind for kind in _ALL}
