"""A layer's sums of one kind as the arrays of a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.host_sums import FirstMoments, KindMoments, Sketch, Unrotated
from qkscope.moments.layout import Layout
from qkscope.moments.second_moments import Array, SecondMoments, square

Arrays = dict[str, NDArray[Any]]
SKETCH = "sketch."  # in front of the names of the groups' sketches
UNROTATED = "unrotated."  # in front of the names of what was summed before rotation


def pack(held: KindMoments) -> Arrays:
    """The arrays of a file, by name (moments/header.py lists them)."""
    of, crossed = held.buckets, held.crossed
    arrays: Arrays = {"pivot": of.pivot, "counts": np.stack([crossed.n, crossed.u, crossed.uu], axis=1)}
    arrays.update({f"buckets.{name}": getattr(of, name) for name in ("x", "xu", "xx")})
    for name in ("x", "xu"):
        arrays.update(_as_shares(f"crossed.{name}", getattr(crossed, name), _shares(held, getattr(of, name))))
    arrays.update(_as_shares("groups.xx", held.groups, _group_shares(held)))
    if held.sketch is not None:
        arrays.update(_written_sketch(held, held.sketch))
    if held.unrotated is not None:
        arrays.update({f"{UNROTATED}{name}": array for name, array in _written_unrotated(held.unrotated).items()})
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def unpack(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> KindMoments:
    """The sums that such arrays hold."""
    n, u, uu = np.moveaxis(arrays["counts"], 1, 0)
    summed = (part.sum(axis=2) for part in (n, u, uu))
    of = SecondMoments(arrays["pivot"], *summed, *(arrays[f"buckets.{name}"] for name in ("x", "xu", "xx")))
    none = np.zeros(0, dtype=np.float32)
    counted = KindMoments(of, FirstMoments(n, u, uu, none, none), none, layout)
    x, xu = (_from_shares(arrays, f"crossed.{name}", _shares(counted, getattr(of, name))) for name in ("x", "xu"))
    groups = _from_shares(arrays, "groups.xx", _group_shares(counted))
    unrotated = unpack_unrotated(arrays) if f"{UNROTATED}pivot" in arrays else None
    sketch = _read_sketch(arrays, counted) if f"{SKETCH}y" in arrays else None
    return KindMoments(of, FirstMoments(n, u, uu, x, xu), groups, layout, unrotated, sketch)


def unpack_schema_1(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> KindMoments:
    """The sums of a file of schema 1: its groups are over all buckets, as if there were one."""
    pivot, names = arrays["pivot"], ("n", "u", "uu", "x", "xu", "xx")
    of = SecondMoments(pivot, *(arrays[f"buckets.{name}"] for name in names))
    counts = (arrays[f"groups.{name}"][:, None] for name in ("n", "u", "uu"))
    vectors = (arrays[f"groups.{name}"][:, None] for name in ("x", "xu"))
    return KindMoments(of, FirstMoments(*counts, *vectors), arrays["groups.xx"][:, :, None], layout)


def _shares(held: KindMoments, sums: Array) -> Array:
    """What each group would have of a bucket's sums by its number of tokens: (heads, buckets, groups, d)."""
    return _share(held.crossed.n, held.buckets.n[:, :, None])[..., None] * sums[:, :, None, :]


def _group_shares(held: KindMoments) -> Array:
    """The same of the squares over each span: (heads, groups, spans, packed)."""
    with np.errstate(invalid="ignore"):  # what is not finite is refused by whoever reads the file
        parts = [_span_share(held, span) * held.buckets.xx[:, span].sum(axis=1)[:, None] for span in held.spans]
    return np.stack(parts, axis=2)


def _sketch_shares(held: KindMoments, directions: NDArray[Any]) -> Array:
    """The same of the sketches: (heads, groups, spans, m, d), each direction for itself."""
    parts = []
    with np.errstate(invalid="ignore"):
        for span in held.layout.sketch_spans:
            squares = np.take(held.buckets.xx[:, span].sum(axis=1), square(directions.shape[1]), axis=-1)
            whole = directions.astype(np.float64).swapaxes(1, 2) @ squares
            parts.append(_span_share(held, span)[..., None] * whole[:, None])
    return np.stack(parts, axis=2)


def _span_share(held: KindMoments, span: slice) -> Array:
    """Each group's share of the tokens: (heads, groups, 1)."""
    n, whole = held.crossed.n[:, span].sum(axis=1), held.buckets.n[:, span].sum(axis=1)
    return _share(n, whole[:, None])[..., None]


def _written_sketch(held: KindMoments, sketch: Sketch) -> Arrays:
    arrays: Arrays = {f"{SKETCH}directions": sketch.directions, f"{SKETCH}power": sketch.power}
    shares = _sketch_shares(held, sketch.directions)
    return {**arrays, **_as_shares(f"{SKETCH}y", sketch.y.swapaxes(-1, -2), shares)}


def _read_sketch(arrays: Mapping[str, NDArray[Any]], counted: KindMoments) -> Sketch:
    directions, power = arrays[f"{SKETCH}directions"], arrays[f"{SKETCH}power"]
    y = _from_shares(arrays, f"{SKETCH}y", _sketch_shares(counted, directions))
    return Sketch(directions, np.ascontiguousarray(y.swapaxes(-1, -2)), power)


def _share(part: Array, whole: Array) -> Array:
    whole = np.broadcast_to(whole, part.shape)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _as_shares(name: str, values: NDArray[Any], shares: Array) -> Arrays:
    """Differences from the shares in float16, in units of the largest of each vector."""
    differences = values - shares
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.nan_to_num(np.abs(differences).max(axis=-1), nan=0.0, posinf=0.0).astype(np.float32)
        units = np.divide(differences, scale[..., None], out=np.zeros_like(differences), where=scale[..., None] > 0)
        return {name: np.clip(units, -1, 1).astype(np.float16), f"{name}.scale": scale}


def _from_shares(arrays: Mapping[str, NDArray[Any]], name: str, shares: Array) -> NDArray[np.float32]:
    differences = arrays[name].astype(np.float32) * arrays[f"{name}.scale"][..., None]
    return np.asarray(shares + differences, dtype=np.float32)


def _written_unrotated(unrotated: Unrotated) -> Arrays:
    totals = unrotated.x.sum(axis=2, dtype=np.float64).astype(np.float32)
    arrays: Arrays = {"pivot": unrotated.pivot, "n": unrotated.n, "x": totals, "xx": unrotated.xx}
    return {**arrays, **_as_shares("crossed.x", unrotated.x, _unrotated_shares(unrotated.n, totals))}


def unpack_unrotated(arrays: Mapping[str, NDArray[Any]]) -> Unrotated:
    """What was summed before rotation."""
    pivot, n, totals, xx = (arrays[f"{UNROTATED}{name}"] for name in ("pivot", "n", "x", "xx"))
    return Unrotated(pivot, n, _from_shares(arrays, f"{UNROTATED}crossed.x", _unrotated_shares(n, totals)), xx)


def _unrotated_shares(n: Array, totals: NDArray[Any]) -> Array:
    return np.asarray(_share(n, n.sum(axis=1, keepdims=True))[..., None] * totals[:, :, None, :])
