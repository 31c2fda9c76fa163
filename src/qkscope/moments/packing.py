"""The sums of a layer's queries, or of its keys, as the arrays of a file, and back.

Each document group's sums are stored as float16 differences from what its share of the tokens would have of the sums of
all groups ("shares" below), which float64 bucket sums give back exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.host_sums import FirstMoments, KindMoments, Sketch, Unrotated
from qkscope.moments.layout import Layout
from qkscope.moments.second_moments import FIRST_SUMS, SUMS, Array, SecondMoments, divided, square

Arrays = dict[str, NDArray[Any]]
SKETCH = "sketch."  # in front of the names of the groups' sketches
UNROTATED = "unrotated."  # in front of the names of what was summed before rotation


def pack(sums: KindMoments) -> Arrays:
    """The arrays of a file, by name (moments/header.py lists them)."""
    buckets, crossed = sums.buckets, sums.crossed
    arrays: Arrays = {"pivot": buckets.pivot, "counts": np.stack([crossed.n, crossed.u, crossed.uu], axis=1)}
    arrays |= {f"buckets.{name}": getattr(buckets, name) for name in ("x", "xu", "xx")}
    for name in ("x", "xu"):
        arrays |= _to_float16(f"crossed.{name}", getattr(crossed, name), _bucket_shares(sums, name))
    arrays |= _to_float16("groups.xx", sums.groups, _span_shares(sums))
    if sums.sketch is not None:
        arrays |= {f"{SKETCH}directions": sums.sketch.directions, f"{SKETCH}power": sums.sketch.power}
        shares = _sketch_shares(sums, sums.sketch.directions)
        arrays |= _to_float16(f"{SKETCH}y", sums.sketch.y.swapaxes(-1, -2), shares)
    if (before := sums.unrotated) is not None:
        totals = before.x.sum(axis=2, dtype=np.float64).astype(np.float32)
        whole = {"pivot": before.pivot, "n": before.n, "x": totals, "xx": before.xx}
        arrays |= {f"{UNROTATED}{name}": array for name, array in whole.items()}
        arrays |= _to_float16(f"{UNROTATED}crossed.x", before.x, _unrotated_shares(before.n, totals))
        if before.sketch is not None:
            where, sketch = f"{UNROTATED}{SKETCH}", before.sketch
            arrays |= {f"{where}directions": sketch.directions, f"{where}power": sketch.power}
            shares = _unrotated_sketch_shares(before, sketch.directions)
            arrays |= _to_float16(f"{where}y", sketch.y.swapaxes(-1, -2), shares)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def unpack(arrays: Arrays, layout: Layout) -> KindMoments:
    """The sums that such arrays hold."""
    n, u, uu = np.moveaxis(arrays["counts"], 1, 0)
    counts = (part.sum(axis=2) for part in (n, u, uu))
    buckets = SecondMoments(arrays["pivot"], *counts, *(arrays[f"buckets.{name}"] for name in ("x", "xu", "xx")))
    none = np.zeros(0, dtype=np.float32)
    counted = KindMoments(buckets, FirstMoments(n, u, uu, none, none), none, layout)
    x, xu = (_from_float16(arrays, f"crossed.{name}", _bucket_shares(counted, name)) for name in ("x", "xu"))
    groups = _from_float16(arrays, "groups.xx", _span_shares(counted))
    unrotated = unpack_unrotated(arrays, layout) if f"{UNROTATED}pivot" in arrays else None
    sketch = _unpack_sketch(arrays, counted) if f"{SKETCH}y" in arrays else None
    return KindMoments(buckets, FirstMoments(n, u, uu, x, xu), groups, layout, unrotated, sketch)


def unpack_schema_1(arrays: Arrays, layout: Layout) -> KindMoments:
    """The sums of a file of schema 1: its groups are over all buckets, as if there were one."""
    buckets = SecondMoments(arrays["pivot"], *(arrays[f"buckets.{name}"] for name in SUMS))
    crossed = FirstMoments(*(arrays[f"groups.{name}"][:, None] for name in FIRST_SUMS))
    return KindMoments(buckets, crossed, arrays["groups.xx"][:, :, None], layout)


def unpack_unrotated(arrays: Arrays, layout: Layout) -> Unrotated:
    """What was summed before rotation."""
    pivot, n, totals, xx = (arrays[f"{UNROTATED}{name}"] for name in ("pivot", "n", "x", "xx"))
    x = _from_float16(arrays, f"{UNROTATED}crossed.x", _unrotated_shares(n, totals))
    where = f"{UNROTATED}{SKETCH}"
    if f"{where}y" not in arrays:
        return Unrotated(pivot, n, x, xx)
    whole = Unrotated(pivot, n, x, xx, layout.spans)
    directions, power = arrays[f"{where}directions"], arrays[f"{where}power"]
    y = _from_float16(arrays, f"{where}y", _unrotated_sketch_shares(whole, directions))
    return replace(whole, sketch=Sketch(directions, np.ascontiguousarray(y.swapaxes(-1, -2)), power))


def _unpack_sketch(arrays: Arrays, counted: KindMoments) -> Sketch:
    directions, power = arrays[f"{SKETCH}directions"], arrays[f"{SKETCH}power"]
    y = _from_float16(arrays, f"{SKETCH}y", _sketch_shares(counted, directions))
    return Sketch(directions, np.ascontiguousarray(y.swapaxes(-1, -2)), power)


def _to_float16(name: str, values: NDArray[Any], shares: Array) -> Arrays:
    """Differences from the shares, in units of the largest of each vector, and these units."""
    differences = values - shares
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.nan_to_num(np.abs(differences).max(axis=-1), nan=0.0, posinf=0.0).astype(np.float32)
        units = divided(differences, scale[..., None])
        return {name: np.clip(units, -1, 1).astype(np.float16), f"{name}.scale": scale}


def _from_float16(arrays: Arrays, name: str, shares: Array) -> NDArray[np.float32]:
    differences = arrays[name].astype(np.float32) * arrays[f"{name}.scale"][..., None]
    return np.asarray(shares + differences, dtype=np.float32)


def _bucket_shares(sums: KindMoments, name: str) -> Array:
    """Shares of each bucket's sums: (heads, buckets, groups, d)."""
    whole: Array = getattr(sums.buckets, name)
    return divided(sums.crossed.n, sums.buckets.n[:, :, None])[..., None] * whole[:, :, None, :]


def _span_shares(sums: KindMoments) -> Array:
    """Shares of the squares over each span: (heads, groups, spans, packed)."""
    with np.errstate(invalid="ignore"):  # non-finite sums are refused when the file is read
        parts = [_token_share(sums, span) * sums.buckets.xx[:, span].sum(axis=1)[:, None] for span in sums.spans]
    return np.stack(parts, axis=2)


def _sketch_shares(sums: KindMoments, directions: NDArray[Any]) -> Array:
    """Shares of the sketches: (heads, groups, spans, m, d)."""
    parts = []
    with np.errstate(invalid="ignore"):
        for span in sums.layout.sketch_spans:
            squares = np.take(sums.buckets.xx[:, span].sum(axis=1), square(directions.shape[1]), axis=-1)
            whole = directions.astype(np.float64).swapaxes(1, 2) @ squares
            parts.append(_token_share(sums, span)[..., None] * whole[:, None])
    return np.stack(parts, axis=2)


def _unrotated_sketch_shares(sums: Unrotated, directions: NDArray[Any]) -> Array:
    """Shares of the sketches before rotation, (heads, groups, spans, m, d), of the squares over all spans together."""
    n = np.stack([sums.n[span].sum(axis=0) for span in sums.spans], axis=1)  # (groups, spans)
    with np.errstate(invalid="ignore"):
        squares = np.take(sums.xx.astype(np.float64), square(directions.shape[1]), axis=-1)
        whole = directions.astype(np.float64).swapaxes(1, 2) @ squares
    return np.asarray((n / max(n.sum(), 1.0))[None, :, :, None, None] * whole[:, None, None])


def _token_share(sums: KindMoments, span: slice) -> Array:
    """Each group's share of the tokens: (heads, groups, 1)."""
    n, whole = sums.crossed.n[:, span].sum(axis=1), sums.buckets.n[:, span].sum(axis=1)
    return divided(n, whole[:, None])[..., None]


def _unrotated_shares(n: Array, totals: NDArray[Any]) -> Array:
    return np.asarray(divided(n, n.sum(axis=1, keepdims=True))[..., None] * totals[:, :, None, :])
