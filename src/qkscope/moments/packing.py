"""The sums of a layer's queries, or of its keys, as the arrays of a file, and back, checked.

Each document group's sums are stored as float16 differences from what its share of the tokens would have of the sums of
all groups ("shares" below), which float64 bucket sums give back exactly.

What is read is refused if no tokens can have such sums, whatever their checksum says: negative squares, impossible
correlations, counts. Sums of products are a Gram matrix, so a sum of products is at most the root of the two sums of
squares. That is checked for every bucket; for the windows that tables rest on, the whole matrix must be positive
semidefinite.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.attention_rows import SCALARS, AttentionSums
from qkscope.moments.host_sums import FirstMoments, KindMoments, Sketch, Unrotated
from qkscope.moments.layout import Layout, heads_by_kind, sketch_blocks
from qkscope.moments.second_moments import Array, SecondMoments, divided, square, triangle

Arrays = dict[str, NDArray[Any]]
ArrayShapes = dict[str, tuple[str, tuple[int, ...]]]  # by name: type and shape
COUNTS = ("n", "u", "uu")
DAMAGED = "it is truncated or damaged: capture it again"
SKETCH = "sketch."  # in front of the names of the groups' sketches
ROWS = "rows"  # in front of the names of what is summed of sampled query rows
UNROTATED = "unrotated."  # in front of the names of what was summed before rotation

LARGEST = 1e120  # the squares of float32's largest numbers, summed over more tokens than there are, are below
SLACK = 1e-6  # rounding of a sum of positions
ROUNDING = 1e-4  # of sums of products, relative to the sums of squares; observed: below 1e-6
TINY = 1e-5  # the same of coordinates far below the largest, where tokens are alike; observed: below 4e-7
COARSE = 1e-2  # the same of sums that a file keeps in float16, relative to the largest of a vector


def layer_arrays(layout: Layout, facts: LayerFacts, unrotated: bool) -> ArrayShapes:
    """Name, type and shape of every array that a layer's sums are written as; `unrotated`: before rotation, too.

    Float64 is what tables are made from. What serves errors alone is float16: differences from what a group's share of
    the tokens would have, each in units of its scale.
    """
    arrays: ArrayShapes = {}
    width, cells, of_kinds = facts.head_dim, (layout.buckets, layout.groups), heads_by_kind(facts)
    packed, sketched, spans = width * (width + 1) // 2, len(layout.sketch_spans), len(layout.spans)
    size, blocks = sketch_blocks(layout, of_kinds, width)
    for kind, heads in of_kinds.items():
        groups = heads, layout.groups
        of: ArrayShapes = {"pivot": ("F64", (heads, width)), "counts": ("F64", (heads, len(COUNTS), *cells))}
        of |= {
            f"buckets.{name}": ("F64", (heads, layout.buckets, n))
            for name, n in (("x", width), ("xu", width), ("xx", packed))
        }
        rounded: dict[str, tuple[int, ...]] = {
            "crossed.x": (heads, *cells, width),
            "crossed.xu": (heads, *cells, width),
        }
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
            of |= {name: ("F16", shape), f"{name}.scale": ("F32", shape[:-1])}
        arrays |= {f"{facts.layer}.{kind}.{name}": each for name, each in of.items()}
    if layout.rows:
        types = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32"}
        for name, empty in vars(AttentionSums.zeros(layout, facts.q_heads)).items():
            arrays[f"{facts.layer}.{ROWS}.{name}"] = types[empty.dtype], empty.shape
    return arrays


def pack(sums: KindMoments) -> Arrays:
    """The arrays of a file, by name (`layer_arrays` lists them)."""
    buckets, crossed, sketch = sums.buckets, sums.crossed, sums.sketch
    arrays: Arrays = {"pivot": buckets.pivot, "counts": np.stack([crossed.n, crossed.u, crossed.uu], axis=1)}
    arrays |= {f"buckets.{name}": getattr(buckets, name) for name in ("x", "xu", "xx")}
    rounded: Arrays = {"crossed.x": crossed.x, "crossed.xu": crossed.xu, "groups.xx": sums.groups}
    if sketch is not None:
        arrays |= {f"{SKETCH}directions": sketch.directions, f"{SKETCH}power": sketch.power}
        rounded[f"{SKETCH}y"] = sketch.y.swapaxes(-1, -2)
    shares = _shares(buckets, crossed.n, sums.layout, None if sketch is None else sketch.directions)
    if (before := sums.unrotated) is not None:
        totals = before.x.sum(axis=2, dtype=np.float64).astype(np.float32)
        whole = {"pivot": before.pivot, "n": before.n, "x": totals, "xx": before.xx}
        arrays |= {f"{UNROTATED}{name}": array for name, array in whole.items()}
        rounded[f"{UNROTATED}crossed.x"] = before.x
        if before.sketch is not None:
            arrays[f"{UNROTATED}{SKETCH}directions"] = before.sketch.directions
            arrays[f"{UNROTATED}{SKETCH}power"] = before.sketch.power
            rounded[f"{UNROTATED}{SKETCH}y"] = before.sketch.y.swapaxes(-1, -2)
        shares |= _shares_before(before, totals)
    for name, values in rounded.items():  # differences in units of the largest of each vector, and these units
        differences = values - shares[name]
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.nan_to_num(np.abs(differences).max(axis=-1), nan=0.0, posinf=0.0).astype(np.float32)
            units = np.clip(divided(differences, scale[..., None]), -1, 1).astype(np.float16)
        arrays |= {name: units, f"{name}.scale": scale}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def unpack(arrays: Arrays, layout: Layout) -> KindMoments:
    """The sums that such arrays hold."""
    n, u, uu = np.moveaxis(arrays["counts"], 1, 0)
    counts = (part.sum(axis=2) for part in (n, u, uu))
    buckets = SecondMoments(arrays["pivot"], *counts, *(arrays[f"buckets.{name}"] for name in ("x", "xu", "xx")))
    directions = arrays.get(f"{SKETCH}directions")
    shares = _shares(buckets, n, layout, directions)
    crossed = FirstMoments(n, u, uu, *(_unrounded(arrays, name, shares) for name in ("crossed.x", "crossed.xu")))
    unrotated = unpack_unrotated(arrays, layout) if f"{UNROTATED}pivot" in arrays else None
    sketch = None
    if directions is not None:
        y = _unrounded(arrays, f"{SKETCH}y", shares).swapaxes(-1, -2)
        sketch = Sketch(directions, np.ascontiguousarray(y), arrays[f"{SKETCH}power"])
    return KindMoments(buckets, crossed, _unrounded(arrays, "groups.xx", shares), layout, unrotated, sketch)


def unpack_unrotated(arrays: Arrays, layout: Layout) -> Unrotated:
    """What was summed before rotation."""
    pivot, n, totals, xx = (arrays[f"{UNROTATED}{name}"] for name in ("pivot", "n", "x", "xx"))
    directions = arrays.get(f"{UNROTATED}{SKETCH}directions")
    unrotated = Unrotated(pivot, n, totals, xx)
    if directions is not None:
        power = arrays[f"{UNROTATED}{SKETCH}power"]
        unrotated = Unrotated(pivot, n, totals, xx, layout.spans, Sketch(directions, power, power))
    shares = _shares_before(unrotated, totals)
    unrotated = replace(unrotated, x=_unrounded(arrays, f"{UNROTATED}crossed.x", shares))
    if unrotated.sketch is None:
        return unrotated
    y = np.ascontiguousarray(_unrounded(arrays, f"{UNROTATED}{SKETCH}y", shares).swapaxes(-1, -2))
    return replace(unrotated, sketch=replace(unrotated.sketch, y=y))


def _unrounded(arrays: Arrays, name: str, shares: Arrays) -> NDArray[np.float32]:
    differences = arrays[name].astype(np.float32) * arrays[f"{name}.scale"][..., None]
    return np.asarray(shares[name] + differences, dtype=np.float32)


def _shares(buckets: SecondMoments, n: Array, layout: Layout, directions: NDArray[np.float32] | None) -> Arrays:
    """What groups with `n` tokens (heads, buckets, groups) would have of all groups' sums, by the array's name."""
    of_bucket = divided(n, buckets.n[:, :, None])[..., None]
    shares = {f"crossed.{name}": of_bucket * getattr(buckets, name)[:, :, None, :] for name in ("x", "xu")}
    for name, spans in (("groups.xx", layout.spans), (f"{SKETCH}y", layout.sketch_spans)):
        if name != "groups.xx" and directions is None:
            continue
        parts = []
        for span in spans:
            share = divided(n[:, span].sum(axis=1), buckets.n[:, span].sum(axis=1)[:, None])[..., None]
            squares = buckets.xx[:, span].sum(axis=1)  # of all groups: (heads, packed)
            with np.errstate(invalid="ignore"):  # non-finite sums are refused when the file is read
                if name == "groups.xx" or directions is None:
                    parts.append(share * squares[:, None])
                else:  # along the directions: (heads, groups, m, d)
                    full = np.take(squares, square(directions.shape[1]), axis=-1)
                    along = directions.astype(np.float64).swapaxes(1, 2) @ full
                    parts.append(share[..., None] * along[:, None])
        shares[name] = np.stack(parts, axis=2)
    return shares


def _shares_before(sums: Unrotated, totals: NDArray[Any]) -> Arrays:
    """The same of what was summed before rotation; `totals` (heads, buckets, d) are of all groups."""
    of_bucket = divided(sums.n, sums.n.sum(axis=1, keepdims=True))[..., None]
    shares = {f"{UNROTATED}crossed.x": np.asarray(of_bucket * totals[:, :, None, :])}
    if sums.sketch is not None:
        directions = sums.sketch.directions
        n = np.stack([sums.n[span].sum(axis=0) for span in sums.spans], axis=1)  # (groups, spans)
        with np.errstate(invalid="ignore"):
            squares = np.take(sums.xx.astype(np.float64), square(directions.shape[1]), axis=-1)
            along = directions.astype(np.float64).swapaxes(1, 2) @ squares  # over all spans: (heads, m, d)
        shares[f"{UNROTATED}{SKETCH}y"] = (n / max(n.sum(), 1.0))[None, :, :, None, None] * along[:, None, None]
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
        _require_squares(of)
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


def _require_squares(of: SecondMoments) -> None:
    """Squares, and products of every two coordinates and of each with position, of every bucket."""
    root = _checked_roots(of.xx, ROUNDING)
    tokens, places = np.sqrt(of.n)[..., None], np.sqrt(of.uu)[..., None]
    bound = tokens * (root * (1 + ROUNDING) + TINY * _largest(root))
    _refuse_unless(np.abs(of.x) <= bound, "sums that no tokens can have")
    inverse = divided(np.ones_like(of.n), of.n)[..., None]
    spread = np.sqrt(np.maximum(root**2 - of.x**2 * inverse, 0))
    width = np.sqrt(np.maximum(of.uu - of.u**2 * inverse[..., 0], 0))[..., None]
    fits = np.abs(of.xu - of.x * of.u[..., None] * inverse) <= spread * width + ROUNDING * places * root
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
    squares = sums.buckets.xx[..., diagonal]
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
    _refuse_unless(squares >= 0, f"squares{what} that no tokens can have")
    root, (rows, columns) = np.sqrt(squares), triangle(width)
    bound = root[..., rows] * root[..., columns] * (1 + slack) + TINY * _largest(root) ** 2
    _refuse_unless(np.abs(xx) <= bound, f"products{what} that no tokens can have")
    return np.asarray(root)


def _largest(root: Array) -> Array:
    return np.asarray(root.max(axis=-1, keepdims=True, initial=0.0))


def _refuse_unless(possible: NDArray[np.bool_], what: str) -> None:
    if not possible.all():
        raise ValueError(what)
