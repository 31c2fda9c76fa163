"""The sums of a layer's queries, or of its keys, as the arrays of a file, and back, checked.

Squares of segments (between consecutive windows) are float32, first sums float64: r at every window is within 1e-7 of
what was summed. What is kept of buckets and of document groups are 16-bit differences from what their share of the
tokens would have ("shares" below): standard errors are within 1e-4, outliers within 3e-4 (tests/test_digits.py).
Squares are in units of the roots of both coordinates' squares, so that small coordinates keep their digits, too.

What is read is refused if no tokens can have such sums, whatever their checksum says: negative squares, impossible
correlations, counts. Sums of products are a Gram matrix, so a sum of products is at most the root of the two sums of
squares. That is checked for every bucket; for the windows that tables rest on, the whole matrix must be positive
semidefinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.attention_rows import SCALARS, AttentionSums
from qkscope.moments.host_sums import FirstMoments, KindMoments, Sketch, Unrotated, whole_buckets, whole_groups
from qkscope.moments.layout import Layout, heads_by_kind, sketch_blocks
from qkscope.moments.second_moments import Array, SecondMoments, divided, square, triangle

Arrays = dict[str, NDArray[Any]]
ArrayShapes = dict[str, tuple[str, tuple[int, ...]]]  # by name: type and shape
SCHEMA = "4"
COUNTS = ("n", "u", "uu")
DAMAGED = "it is truncated or damaged: capture it again"
SKETCH = "sketch."  # in front of the names of the groups' sketches
ROWS = "rows"  # in front of the names of what is summed of sampled query rows
UNROTATED = "unrotated."  # in front of the names of what was summed before rotation

LARGEST = 1e120  # the squares of float32's largest numbers, summed over more tokens than there are, are below
SLACK = 1e-6  # rounding of a sum of positions
ROUNDING = 1e-4  # of sums of products, relative to the sums of squares; observed: below 1e-6
LEVELS = 32767  # of squares of buckets and groups
COARSE = 1e-2  # the same of sums that a file keeps in float16, relative to the largest of a vector


def layer_arrays(layout: Layout, facts: LayerFacts, unrotated: bool, schema: str = SCHEMA) -> ArrayShapes:
    """Name, type and shape of every array that a layer's sums are written as; `unrotated`: before rotation, too."""
    arrays: ArrayShapes = {}
    width, cells, of_kinds = facts.head_dim, (layout.buckets, layout.groups), heads_by_kind(facts)
    packed, sketched, spans = width * (width + 1) // 2, len(layout.sketch_spans), len(layout.spans)
    size, blocks = sketch_blocks(layout, of_kinds, width)
    for kind, heads in of_kinds.items():
        groups = heads, layout.groups
        of: ArrayShapes = {"pivot": ("F64", (heads, width)), "counts": ("F64", (heads, len(COUNTS), *cells))}
        of |= {f"buckets.{name}": ("F64", (heads, layout.buckets, width)) for name in ("x", "xu")}
        rounded: dict[str, tuple[int, ...]] = {f"crossed.{name}": (heads, *cells, width) for name in ("x", "xu")}
        if schema == SCHEMA:
            segments = len(layout.segments)
            of |= {"segments.xx": ("F32", (heads, segments, packed)), "segments.xx.scale": ("F64", (heads, segments))}
            rounded["buckets.xx"] = heads, layout.buckets - segments, packed
            rounded["groups.xx"] = heads, layout.groups - 1, spans, packed
        else:
            of["buckets.xx"] = "F64", (heads, layout.buckets, packed)
            rounded["groups.xx"] = *groups, spans, packed
        if sketched:
            count = size * blocks[kind]
            of |= {"sketch.directions": ("F32", (heads, width, count)), "sketch.power": ("F32", (*groups, sketched))}
            rounded["sketch.y"] = *groups, sketched, count, width
        if unrotated:
            of |= {"unrotated.pivot": ("F64", (heads, width)), "unrotated.n": ("F64", cells)}
            of |= {"unrotated.x": ("F32", (heads, layout.buckets, width)), "unrotated.xx": ("F32", (heads, packed))}
            rounded["unrotated.crossed.x"] = heads, *cells, width
        if unrotated and (count := min(layout.unrotated_sketched, width)):
            of["unrotated.sketch.directions"] = "F32", (heads, width, count)
            of["unrotated.sketch.power"] = "F32", (*groups, spans)
            rounded["unrotated.sketch.y"] = *groups, spans, count, width
        for name, shape in rounded.items():
            of |= {name: ("I16" if schema == SCHEMA else "F16", shape), f"{name}.scale": ("F32", shape[:-1])}
        arrays |= {f"{facts.layer}.{kind}.{name}": each for name, each in of.items()}
    if layout.rows:
        types = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32"}
        for name, empty in vars(AttentionSums.zeros(layout, facts.q_heads)).items():
            arrays[f"{facts.layer}.{ROWS}.{name}"] = types[empty.dtype], empty.shape
    return arrays


def pack(sums: KindMoments) -> Arrays:
    """The arrays of a file, by name (`layer_arrays` lists them)."""
    buckets, crossed, sketch, layout = sums.buckets, sums.crossed, sums.sketch, sums.layout
    arrays: Arrays = {"pivot": buckets.pivot, "counts": np.stack([crossed.n, crossed.u, crossed.uu], axis=1)}
    arrays |= {f"buckets.{name}": getattr(buckets, name) for name in ("x", "xu")}
    segments, spans = _sums_over(layout.segments, buckets.xx), _sums_over(layout.spans, buckets.xx)[:, None]
    scale = np.abs(segments).max(axis=-1)
    arrays |= {"segments.xx": divided(segments, scale[..., None]).astype(np.float32), "segments.xx.scale": scale}
    share, whole = _bucket_shares(layout, buckets.n, segments)
    arrays |= _rounded("buckets.xx", buckets.xx[:, layout.others], share * whole, _units(whole))
    share = _span_shares(layout.spans, crossed.n)[:, :-1]
    arrays |= _rounded("groups.xx", sums.groups[:, :-1], share * spans, _units(spans))
    directions = None if sketch is None else sketch.directions
    shares = _shares(buckets, crossed.n, layout, directions)
    for name in ("x", "xu"):
        arrays |= _rounded(f"crossed.{name}", getattr(crossed, name), shares[f"crossed.{name}"])
    if sketch is not None:
        arrays |= {f"{SKETCH}directions": sketch.directions, f"{SKETCH}power": sketch.power}
        arrays |= _rounded(f"{SKETCH}y", sketch.y.swapaxes(-1, -2), shares[f"{SKETCH}y"])
    if sums.unrotated is not None:
        arrays |= {f"{UNROTATED}{name}": array for name, array in _pack_unrotated(sums.unrotated).items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _pack_unrotated(before: Unrotated) -> Arrays:
    """The arrays of what was summed before rotation."""
    totals = before.x.sum(axis=2, dtype=np.float64).astype(np.float32)
    shares = _shares_before(before, totals)
    arrays: Arrays = {"pivot": before.pivot, "n": before.n, "x": totals, "xx": before.xx}
    arrays |= _rounded("crossed.x", before.x, shares["crossed.x"])
    if before.sketch is not None:
        arrays |= {f"{SKETCH}directions": before.sketch.directions, f"{SKETCH}power": before.sketch.power}
        arrays |= _rounded(f"{SKETCH}y", before.sketch.y.swapaxes(-1, -2), shares[f"{SKETCH}y"])
    return arrays


def unpack(arrays: Arrays, layout: Layout) -> KindMoments:
    """The sums that such arrays, or those of schemas 2 and 3, hold."""
    n, u, uu = np.moveaxis(arrays["counts"], 1, 0)
    counts, new = (n.sum(axis=2), u.sum(axis=2), uu.sum(axis=2)), "segments.xx" in arrays
    squares = arrays["buckets.xx"]
    if new:
        segments = arrays["segments.xx"].astype(np.float64) * arrays["segments.xx.scale"][..., None]
        share, whole = _bucket_shares(layout, counts[0], segments)
        others = _unrounded(arrays, "buckets.xx", share * whole, _units(whole), np.float64)
        squares = whole_buckets(layout, segments, others, counts[0])
    n_, u_, uu_ = counts
    buckets = SecondMoments(arrays["pivot"], n_, u_, uu_, arrays["buckets.x"], arrays["buckets.xu"], squares)
    with np.errstate(invalid="ignore"):  # non-finite sums are refused when the file is read
        spans = _sums_over(layout.spans, squares)[:, None]
        share = _span_shares(layout.spans, n) * spans
        if new:
            groups = _unrounded(arrays, "groups.xx", share[:, :-1], _units(spans))
            groups = whole_groups(buckets, n, layout, groups)
        else:
            groups = _unrounded(arrays, "groups.xx", share)
    directions = arrays.get(f"{SKETCH}directions")
    shares = _shares(buckets, n, layout, directions)
    x, xu = (_unrounded(arrays, f"crossed.{name}", shares[f"crossed.{name}"]) for name in ("x", "xu"))
    unrotated = unpack_unrotated(arrays, layout) if f"{UNROTATED}pivot" in arrays else None
    sketch = None
    if directions is not None:
        y = _unrounded(arrays, f"{SKETCH}y", shares[f"{SKETCH}y"]).swapaxes(-1, -2)
        sketch = Sketch(directions, np.ascontiguousarray(y), arrays[f"{SKETCH}power"])
    return KindMoments(buckets, FirstMoments(n, u, uu, x, xu), groups, layout, unrotated, sketch)


def unpack_unrotated(arrays: Arrays, layout: Layout) -> Unrotated:
    """What was summed before rotation."""
    mine = {name.removeprefix(UNROTATED): array for name, array in arrays.items() if name.startswith(UNROTATED)}
    pivot, n, totals, xx = (mine[name] for name in ("pivot", "n", "x", "xx"))
    unrotated, directions = Unrotated(pivot, n, totals, xx), mine.get(f"{SKETCH}directions")
    if directions is not None:
        power = mine[f"{SKETCH}power"]
        unrotated = Unrotated(pivot, n, totals, xx, layout.spans, Sketch(directions, power, power))
    shares = _shares_before(unrotated, totals)
    unrotated = replace(unrotated, x=_unrounded(mine, "crossed.x", shares["crossed.x"]))
    if unrotated.sketch is None:
        return unrotated
    y = np.ascontiguousarray(_unrounded(mine, f"{SKETCH}y", shares[f"{SKETCH}y"]).swapaxes(-1, -2))
    return replace(unrotated, sketch=replace(unrotated.sketch, y=y))


def _rounded(name: str, values: NDArray[Any], shares: Array, units: Array | float = 1.0) -> Arrays:
    """Differences from the shares, in 16-bit steps up to the largest of each vector; and the largest."""
    with np.errstate(over="ignore", invalid="ignore"):
        differences = np.asarray(values - shares, dtype=np.float64)
        differences = divided(differences, np.asarray(units))
        largest = np.nan_to_num(np.abs(differences).max(axis=-1), nan=0.0, posinf=0.0).astype(np.float32)
        steps = np.rint(LEVELS * np.clip(divided(differences, largest[..., None]), -1, 1))
    return {name: np.nan_to_num(steps).astype(np.int16), f"{name}.scale": largest}


def _unrounded(
    arrays: Arrays, name: str, shares: Array, units: Array | float = 1.0, dtype: type = np.float32
) -> NDArray[Any]:
    """The values again; in schemas 2 and 3 differences are shares of the largest, as float16."""
    steps, scale = arrays[name], arrays[f"{name}.scale"][..., None]
    scale = scale / np.float32(LEVELS) if steps.dtype == np.int16 else scale
    with np.errstate(over="ignore"):
        return np.asarray(shares + steps.astype(np.float32) * scale * units, dtype=dtype)


def _units(squares: Array) -> Array:
    """The root of the product of both coordinates' squares, for each entry of packed triangles."""
    width = int(np.sqrt(2 * squares.shape[-1]))
    root, (rows, columns) = np.sqrt(np.maximum(squares[..., square(width).diagonal()], 0.0)), triangle(width)
    return np.asarray(root[..., rows] * root[..., columns])


def _sums_over(spans: Sequence[slice], sums: Array) -> Array:
    """Sums of buckets (heads, buckets, …) over each span: (heads, spans, …)."""
    return np.stack([sums[:, span].sum(axis=1) for span in spans], axis=1)


def _bucket_shares(layout: Layout, n: Array, segments: Array) -> tuple[Array, Array]:
    """Of buckets that are not the last of their segment: shares of the segment's tokens, and its squares."""
    owner = np.searchsorted([segment.start for segment in layout.segments], layout.others, side="right") - 1
    return divided(n[:, layout.others], _sums_over(layout.segments, n)[:, owner])[..., None], segments[:, owner]


def _span_shares(spans: Sequence[slice], n: Array) -> Array:
    """Each group's share of a span's tokens: (heads, groups, spans, 1)."""
    tokens = _sums_over(spans, n).swapaxes(1, 2)
    return divided(tokens, tokens.sum(axis=1, keepdims=True))[..., None]


def _shares(buckets: SecondMoments, n: Array, layout: Layout, directions: NDArray[np.float32] | None) -> Arrays:
    """What groups with `n` tokens (heads, buckets, groups) would have of all groups' sums, by the array's name."""
    of_bucket = divided(n, buckets.n[:, :, None])[..., None]
    shares = {f"crossed.{name}": of_bucket * getattr(buckets, name)[:, :, None, :] for name in ("x", "xu")}
    if directions is not None:
        with np.errstate(invalid="ignore"):
            full = np.take(_sums_over(layout.sketch_spans, buckets.xx), square(directions.shape[1]), axis=-1)
            along = directions.astype(np.float64).swapaxes(1, 2)[:, None] @ full  # (heads, spans, m, d)
            shares[f"{SKETCH}y"] = _span_shares(layout.sketch_spans, n)[..., None] * along[:, None]
    return shares


def _shares_before(sums: Unrotated, totals: NDArray[Any]) -> Arrays:
    """The same of what was summed before rotation; `totals` (heads, buckets, d) are of all groups."""
    of_bucket = divided(sums.n, sums.n.sum(axis=1, keepdims=True))[..., None]
    shares = {"crossed.x": np.asarray(of_bucket * totals[:, :, None, :])}
    if sums.sketch is not None:
        directions = sums.sketch.directions
        n = np.stack([sums.n[span].sum(axis=0) for span in sums.spans], axis=1)  # (groups, spans)
        with np.errstate(invalid="ignore"):
            squares = np.take(sums.xx.astype(np.float64), square(directions.shape[1]), axis=-1)
            along = directions.astype(np.float64).swapaxes(1, 2) @ squares  # over all spans: (heads, m, d)
        shares[f"{SKETCH}y"] = (n / max(n.sum(), 1.0))[None, :, :, None, None] * along[:, None, None]
    return shares


# -- checks ------------------------------------------------------------------------------------------------


def require_possible(where: str, sums: KindMoments) -> None:
    """Refuse one layer's sums of queries or of keys that no tokens can have."""
    of, before = sums.buckets, sums.unrotated
    try:
        for name, values in (("pivot", of.pivot), ("x", of.x), ("xu", of.xu), ("xx", of.xx)):
            _refuse_unless(np.abs(values) <= LARGEST, f"{name} holds values that are not sums")
        rest = () if before is None else (before.pivot, before.n, before.x, before.xx)
        known = (sums.sketch, None if before is None else before.sketch)
        sketch = [array for each in known if each is not None for array in (each.directions, each.y, each.power)]
        # What is float32 or float16 may have overflowed, which only errors suffer from.
        for array in (sums.groups, sums.crossed.x, sums.crossed.xu, *rest, *sketch):
            _refuse_unless(~np.isnan(array), "it holds values that are not numbers")
        _require_counts(sums)
        _require_squares(of, COARSE)
        _require_squares(of.map(lambda each: _sums_over(sums.layout.segments, each)), ROUNDING)
        _require_windows(sums)
        _require_groups(sums)
        if before is not None:
            require_unrotated(before, sums.crossed.n)
    except ValueError as error:
        raise MomentsFileError(f"{where}: {error}; {DAMAGED}") from None


def require_documents(documents: NDArray[np.int64], first: KindMoments) -> None:
    """Refuse numbers of documents (groups, buckets) that do not fit the tokens of the first layer."""
    tokens = first.crossed.n.max(axis=0).T
    if not ((documents >= 0) & (documents <= tokens) & ((documents > 0) == (tokens > 0))).all():
        raise MomentsFileError(f"documents holds values that are not numbers of documents; {DAMAGED}")


def require_rows(where: str, rows: AttentionSums) -> None:
    """Refuse sums of sampled rows that no attention can have."""
    weights = rows.scalars[..., SCALARS.index("sink") :]
    count = rows.rows[None, :, :, None] * (1 + COARSE) + SLACK
    of_group = rows.rows.sum(axis=0)[None, None, :, None] * (1 + COARSE) + SLACK
    try:
        for array in (rows.rows, rows.log_keys, rows.scalars, rows.mass, rows.keys, rows.square, rows.far):
            _refuse_unless(np.isfinite(array), "it holds values that are not numbers")
        _refuse_unless(rows.rows == np.floor(rows.rows), "counts that no rows can have")
        for array in (rows.rows, rows.log_keys, rows.keys, rows.square, rows.far):
            _refuse_unless(array >= 0, "sums that no attention can have")
        _refuse_unless((weights >= -SLACK * count) & (weights <= count), "attention weights above 1 or below 0")
        _refuse_unless(
            (rows.mass >= -SLACK * of_group) & (rows.mass <= of_group), "attention weights above 1 or below 0"
        )
        _refuse_unless(~np.isnan(rows.largest) & (rows.largest < np.inf), "logits that are not numbers")
    except ValueError as error:
        raise MomentsFileError(f"{where}: {error}; {DAMAGED}") from None


def require_unrotated(unrotated: Unrotated, tokens: Array) -> None:
    """Refuse sums before rotation that do not fit `tokens` (heads, buckets, groups); ValueError says why."""
    n = unrotated.n
    possible = (n >= 0) & (n == np.floor(n)) & (n <= tokens.max(axis=0))
    _refuse_unless(possible, "counts before rotation that no tokens can have")
    whole = unrotated.whole()
    finite = np.isfinite(whole.xx).all(axis=-1) & np.isfinite(whole.x).all(axis=-1)  # float32 may have overflowed
    root = _checked_roots(whole.xx[finite], COARSE, " before rotation")
    bound = np.sqrt(whole.n[finite])[:, None] * root * (1 + COARSE)
    _refuse_unless(np.abs(whole.x[finite]) <= bound, "sums before rotation that no tokens can have")


def _require_counts(sums: KindMoments) -> None:
    """Whole numbers of tokens, at positions of their bucket."""
    scale = sums.layout.scale
    low, stop = np.array(list(pairwise(sums.layout.edges)), dtype=np.float64).T[..., None]
    low, high = low / scale, (stop - 1) / scale
    for counts in (sums.buckets, sums.crossed):
        n, u, uu = (values.reshape(*values.shape[:2], -1) for values in (counts.n, counts.u, counts.uu))
        possible = (n >= 0) & (n == np.floor(n)) & (n <= 2**53)
        possible &= (low * n * (1 - SLACK) <= u) & (u <= high * n * (1 + SLACK))
        possible &= (low * u * (1 - SLACK) <= uu) & (uu <= high * u * (1 + SLACK)) & (u * u <= n * uu * (1 + SLACK))
        _refuse_unless(possible, "counts that no tokens can have")
    same = np.array(np.array_equal(sums.buckets.n.sum(axis=1), sums.crossed.n.sum(axis=(1, 2))))
    _refuse_unless(same, "buckets and groups count different tokens")


def _require_squares(of: SecondMoments, slack: float) -> None:
    """Squares, and products of every two coordinates and of each with position."""
    root = _checked_roots(of.xx, slack)
    tokens, places = np.sqrt(of.n)[..., None], np.sqrt(of.uu)[..., None]
    rounding = slack * root.max(axis=-1, keepdims=True)
    _refuse_unless(np.abs(of.x) <= tokens * (root + rounding), "sums that no tokens can have")
    inverse = divided(np.ones_like(of.n), of.n)[..., None]
    spread = np.sqrt(np.maximum((root + rounding) ** 2 - of.x**2 * inverse, 0))
    width = np.sqrt(np.maximum(of.uu - of.u**2 * inverse[..., 0], 0))[..., None]
    fits = np.abs(of.xu - of.x * of.u[..., None] * inverse) <= spread * width + slack * places * (root + rounding)
    _refuse_unless(fits, "covariances with position that no tokens can have")


def _require_windows(sums: KindMoments) -> None:
    """The sums up to the end of each span, as one Gram matrix of 1, position and vector: positive semidefinite."""
    for stop in {span.stop for span in sums.layout.spans}:
        of = sums.buckets.summed(slice(0, stop))
        size = of.pivot.shape[1] + 2
        gram = np.empty((len(of.n), size, size))
        gram[:, 0, 0], gram[:, 1, 1] = of.n, of.uu
        gram[:, 0, 1] = gram[:, 1, 0] = of.u
        gram[:, 0, 2:] = gram[:, 2:, 0] = of.x
        gram[:, 1, 2:] = gram[:, 2:, 1] = of.xu
        gram[:, 2:, 2:] = np.take(of.xx, square(size - 2), axis=-1)
        root = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
        root = np.where(root > 0, root, 1.0)
        gram /= root[:, :, None] * root[:, None, :]
        gram += ROUNDING * np.eye(size)
        try:
            np.linalg.cholesky(gram)
        except np.linalg.LinAlgError:
            raise ValueError("its second moments are not positive semidefinite") from None


def _require_groups(sums: KindMoments) -> None:
    """No group has more than all groups have together."""
    diagonal = square(sums.buckets.pivot.shape[1]).diagonal()
    squares = np.maximum(sums.buckets.xx[..., diagonal], 0.0)  # rounding may leave less than nothing
    for number, span in enumerate(sums.layout.spans):
        whole = squares[:, span].sum(axis=1)[:, None]
        own = sums.groups[:, :, number, diagonal]
        slack = COARSE * whole.max(axis=-1, keepdims=True)
        fits = (own >= -slack) & (own <= whole + slack) | ~np.isfinite(own)
        _refuse_unless(fits, "squares of document groups that no tokens can have")
    for counts, vectors in ((sums.crossed.n, sums.crossed.x), (sums.crossed.uu, sums.crossed.xu)):
        bound = np.sqrt(counts)[..., None] * np.sqrt(squares)[:, :, None]
        fits = np.abs(vectors) <= bound + COARSE * bound.max(axis=-1, keepdims=True)
        _refuse_unless(fits | ~np.isfinite(vectors), "sums of document groups that no tokens can have")


def _checked_roots(xx: Array, slack: float, what: str = "") -> Array:
    """The roots of the sums of squares; refuses negative ones, and products that are too large for them."""
    width = int(np.sqrt(2 * xx.shape[-1]))
    squares = xx[..., square(width).diagonal()]
    largest = np.abs(squares).max(axis=-1, keepdims=True)
    _refuse_unless(squares >= -(slack**2) * largest, f"squares{what} that no tokens can have")
    root, (rows, columns) = np.sqrt(np.maximum(squares, 0)), triangle(width)
    fits = np.abs(xx) <= root[..., rows] * root[..., columns] + slack * largest
    _refuse_unless(fits, f"products{what} that no tokens can have")
    return np.asarray(root)


def _refuse_unless(possible: NDArray[np.bool_], what: str) -> None:
    if not possible.all():
        raise ValueError(what)
