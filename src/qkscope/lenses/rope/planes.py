"""`rope_planes.csv`: which planes carry a head's positional kernel, and how much of its queries and keys they hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.rope.kernel import plane_products
from qkscope.lenses.rope.positions import Array, Complex, Positions
from qkscope.lenses.rope.pre_rope import KindPreRope, pre_rope
from qkscope.lenses.rope.rotated_moments import Planes, turning
from qkscope.lenses.rope.table import HELD
from qkscope.lenses.sums import LayerSums

FILE = "rope_planes"
SHARE = (0.0, 1.0)

COLUMNS = (
    Measure("wavelength", "Tokens per full rotation of the plane.", "tokens", (2.0, np.inf), error=None),
    Measure("amplitude", "Amplitude of the plane's cosine in the kernel.", "score", (0.0, np.inf)),
    Measure("phase", "Phase of that cosine: it peaks at distance phase / angle per token.", "radians"),
    Measure(
        "kernel_share", "Share of the kernel's variance over distances below the window; below 0 it works against."
    ),
    Measure("variance_q", "Share of the variance of queries that lies in the plane.", "", SHARE, error=None),
    Measure("variance_k", "Share of the variance of keys that lies in the plane.", "", SHARE, error=None),
)


def plane_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """A layer's planes; a layer in which nothing is known to rotate has one empty row per head."""
    rest, heads = sums.once(pre_rope)[1], len(sums.heads)
    planes = Planes(None, sums.facts.head_dim) if rest is None else rest.q.planes
    nothing = np.full((heads, max(planes.count, 1)), np.nan)
    if rest is None or planes.count == 0:
        return {column.name: nothing for column in COLUMNS}
    products = plane_products(rest)
    phase = np.angle(products)
    if sums.whole is not None:  # so that an error does not see a turn where a phase passes π
        known = sums.whole.once(pre_rope)[1]
        before = np.angle(plane_products(known)) if known is not None else phase
        phase = before + np.angle(np.exp(1j * (phase - before)))
    return {
        "wavelength": np.broadcast_to(2 * np.pi / planes.angles, nothing.shape),
        "amplitude": np.abs(products),
        "phase": phase,
        "kernel_share": kernel_shares(products, planes, sums.window),
        "variance_q": variance_shares(rest.q),
        "variance_k": variance_shares(rest.k)[rest.keys],
    }


def kernel_shares(products: Complex, planes: Planes, window: int) -> Array:
    """Each plane's covariance with the whole kernel over distances below the window, as a share of its variance.

    CauseShares add up to 1. NaN where the kernel does not vary.
    """
    by = turning(planes, Positions.window(window))
    with_all = products @ by.spread_minus.T + products.conj() @ by.spread_plus.T
    covariance = 0.5 * (products.conj() * with_all).real
    variance = covariance.sum(axis=1, keepdims=True)
    size = (np.abs(products) ** 2).sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(variance > 1e-14 * size, covariance / variance, np.nan)


def variance_shares(of: KindPreRope) -> Array:
    """(heads, planes): the part of the variance that lies in each plane, which no rotation changes."""
    diagonal, count = np.diagonal(of.cov, axis1=1, axis2=2), of.planes.count
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((diagonal[:, :count] + diagonal[:, count : 2 * count]) / diagonal.sum(axis=1, keepdims=True))


TABLE = HeadTable(FILE, COLUMNS, plane_rows, across="plane", detail=True, holds_fixed=HELD)
