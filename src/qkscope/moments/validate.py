"""Refuse sums that no tokens can have, whatever their checksum says: negative squares, impossible correlations, counts.

Sums of products are a Gram matrix, so a sum of products is at most the root of the two sums of squares. That is checked
for every bucket; for the windows that tables rest on, the whole matrix must be positive semidefinite.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.moments.header import DAMAGED
from qkscope.moments.host_sums import KindMoments, Unrotated
from qkscope.moments.second_moments import Array, SecondMoments, divided, square, triangle

LARGEST = 1e120  # the squares of float32's largest numbers, summed over more tokens than there are, are below
SLACK = 1e-6  # rounding of a sum of positions
ROUNDING = 1e-4  # of sums of products, relative to the sums of squares; observed: below 1e-6
TINY = 1e-5  # the same of coordinates far below the largest, where tokens are alike; observed: below 4e-7
COARSE = 1e-2  # the same of sums that a file keeps in float16, relative to the largest of a vector


def require_possible(where: str, sums: KindMoments) -> None:
    """Refuse one layer's sums of queries or of keys that no tokens can have."""
    try:
        _require_numbers(sums)
        _require_counts(sums)
        _require_squares(sums.buckets)
        _require_windows(sums)
        _require_groups(sums)
        if sums.unrotated is not None:
            require_unrotated(sums.unrotated, sums.crossed.n)
    except ValueError as error:
        raise MomentsFileError(f"{where}: {error}; {DAMAGED}") from None


def require_documents(documents: NDArray[np.int64], first: KindMoments) -> None:
    """Refuse numbers of documents (groups, buckets) that do not fit the tokens of the first layer."""
    tokens = first.crossed.n.max(axis=0).T
    if not ((documents >= 0) & (documents <= tokens) & ((documents > 0) == (tokens > 0))).all():
        raise MomentsFileError(f"documents holds values that are not numbers of documents; {DAMAGED}")


def require_unrotated(unrotated: Unrotated, tokens: Array) -> None:
    """Refuse sums before rotation that do not fit `tokens` (heads, buckets, groups); ValueError says why."""
    n = unrotated.n
    _refuse_unless((n >= 0) & (n == np.floor(n)) & (n <= tokens.max(axis=0)), "counts before rotation")
    whole = unrotated.whole()
    finite = np.isfinite(whole.xx).all(axis=-1) & np.isfinite(whole.x).all(axis=-1)  # float32 may have overflowed
    root = _roots(whole.xx[finite], whole.width, "squares before rotation")
    _require_products(whole.xx[finite], root, COARSE, "products before rotation")
    _refuse_unless(
        np.abs(whole.x[finite]) <= _bound(np.sqrt(whole.n[finite])[:, None], root, COARSE), "sums before rotation"
    )


def _require_numbers(sums: KindMoments) -> None:
    of = sums.buckets
    for name, values in (("pivot", of.pivot), ("x", of.x), ("xu", of.xu), ("xx", of.xx)):
        if not (np.abs(values) <= LARGEST).all():
            raise ValueError(f"{name} holds values that are not sums")
    before = sums.unrotated
    rest = () if before is None else (before.pivot, before.n, before.x, before.xx)
    known = (sums.sketch, None if before is None else before.sketch)
    sketch = [array for each in known if each is not None for array in (each.directions, each.y, each.power)]
    # What is float32 or float16 may have overflowed, which only errors suffer from.
    if any(np.isnan(array).any() for array in (sums.groups, sums.crossed.x, sums.crossed.xu, *rest, *sketch)):
        raise ValueError("it holds values that are not numbers")


def _require_counts(sums: KindMoments) -> None:
    """Whole numbers of tokens, at positions of their bucket."""
    layout = sums.layout
    edges = np.array(list(pairwise(layout.edges)), dtype=np.float64).T[..., None]
    whole = np.array([[[0.0]], [[layout.context]]])
    for counts in (sums.buckets, sums.crossed):
        n, u, uu = (values.reshape(*values.shape[:2], -1) for values in (counts.n, counts.u, counts.uu))
        low, stop = edges if n.shape[1] == layout.buckets else whole
        low, high = low / layout.scale, (stop - 1) / layout.scale
        possible = (n >= 0) & (n == np.floor(n)) & (n <= 2**53)
        possible &= (low * n * (1 - SLACK) <= u) & (u <= high * n * (1 + SLACK))
        possible &= (low * u * (1 - SLACK) <= uu) & (uu <= high * u * (1 + SLACK)) & (u * u <= n * uu * (1 + SLACK))
        _refuse_unless(possible, "counts that no tokens can have")
    if not np.array_equal(sums.buckets.n.sum(axis=1), sums.crossed.n.sum(axis=(1, 2))):
        raise ValueError("buckets and groups count different tokens")


def _require_squares(of: SecondMoments) -> None:
    """Squares, and products of every two coordinates and of each with position, of every bucket."""
    root = _roots(of.xx, of.width, "squares")
    _require_products(of.xx, root, ROUNDING, "products")
    tokens, places = np.sqrt(of.n)[..., None], np.sqrt(of.uu)[..., None]
    _refuse_unless(np.abs(of.x) <= _bound(tokens, root) + TINY * tokens * _largest(root), "sums")
    inverse = divided(np.ones_like(of.n), of.n)[..., None]
    spread = np.sqrt(np.maximum(root**2 - of.x**2 * inverse, 0))
    width = np.sqrt(np.maximum(of.uu - of.u**2 * inverse[..., 0], 0))[..., None]
    covariance = of.xu - of.x * of.u[..., None] * inverse
    _refuse_unless(np.abs(covariance) <= spread * width + ROUNDING * places * root, "covariances with position")


def _require_windows(sums: KindMoments) -> None:
    """The sums up to the end of each span, as one Gram matrix of 1, position and vector: positive semidefinite."""
    for stop in {span.stop for span in sums.spans}:
        of = sums.buckets.summed(slice(0, stop))
        gram = np.empty((len(of.n), of.width + 2, of.width + 2))
        gram[:, 0, 0], gram[:, 1, 1] = of.n, of.uu
        gram[:, 0, 1] = gram[:, 1, 0] = of.u
        gram[:, 0, 2:] = gram[:, 2:, 0] = of.x
        gram[:, 1, 2:] = gram[:, 2:, 1] = of.xu
        gram[:, 2:, 2:] = np.take(of.xx, square(of.width), axis=-1)
        root = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
        root = np.where(root > 0, root, 1.0)
        gram /= root[:, :, None] * root[:, None, :]
        gram += ROUNDING * np.eye(of.width + 2)
        try:
            np.linalg.cholesky(gram)
        except np.linalg.LinAlgError:
            raise ValueError("its second moments are not positive semidefinite") from None


def _require_groups(sums: KindMoments) -> None:
    """No group has more than all groups have together."""
    diagonal = _diagonal(sums.buckets.width)
    squares = sums.buckets.xx[..., diagonal]
    for number, span in enumerate(sums.spans):
        whole = squares[:, span].sum(axis=1)[:, None]
        own = sums.groups[:, :, number, diagonal]
        slack = COARSE * whole.max(axis=-1, keepdims=True)
        _refuse_unless((own >= -slack) & (own <= whole + slack) | ~np.isfinite(own), "squares of document groups")
    root = np.sqrt(squares if sums.is_crossed else squares.sum(axis=1, keepdims=True))[:, :, None]
    for counts, vectors in ((sums.crossed.n, sums.crossed.x), (sums.crossed.uu, sums.crossed.xu)):
        bound = np.sqrt(counts)[..., None] * root
        fits = np.abs(vectors) <= bound + COARSE * bound.max(axis=-1, keepdims=True)
        _refuse_unless(fits | ~np.isfinite(vectors), "sums of document groups")


def _diagonal(width: int) -> NDArray[np.intp]:
    rows, columns = triangle(width)
    return np.flatnonzero(rows == columns)


def _roots(xx: Array, width: int, what: str) -> Array:
    """The roots of the sums of squares, none of which is negative."""
    squares = xx[..., _diagonal(width)]
    _refuse_unless(squares >= 0, what)
    return np.asarray(np.sqrt(squares))


def _require_products(xx: Array, root: Array, slack: float, what: str) -> None:
    rows, columns = triangle(root.shape[-1])
    possible = _bound(root[..., rows], root[..., columns], slack) + TINY * _largest(root) ** 2
    _refuse_unless(np.abs(xx) <= possible, what)


def _largest(root: Array) -> Array:
    return np.asarray(root.max(axis=-1, keepdims=True, initial=0.0))


def _bound(one: Array, other: Array, slack: float = ROUNDING) -> Array:
    return np.asarray(one * other * (1 + slack))


def _refuse_unless(possible: NDArray[np.bool_], what: str) -> None:
    if not possible.all():
        raise ValueError(what if "no tokens" in what else f"{what} that no tokens can have")
