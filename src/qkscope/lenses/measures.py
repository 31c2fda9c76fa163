"""How much of position is in a head's queries and keys, from their sums, without choosing a component.

Component 0 is one direction. Where two eigenvalues are nearly equal it can swap with its neighbour from one checkpoint
to the next, which reads as movement; these numbers do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dtrtri

from qkscope.lenses.base import Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.pca import NO_VARIANCE, Array, one_blas_thread
from qkscope.lenses.stacks import repeated
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BucketMeans
from qkscope.moments.second_moments import Statistics

FILE = "measures"
SHARE, CORRELATION = (0.0, 1.0), (-1.0, 1.0)
# Directions with less than this share of the largest variance are left out of the read-out: activations in bfloat16
# have relative steps of 2^-8, so below about a millionth there is only what rounding put there.
FAINTEST = 1e-6

_WORDS = {
    "decode": ("Share of the variance of position that a linear read-out of whole {} recovers.",
               "position decodable from {}"),
    "share": ("Share of the variance of {}, in all directions, that is linear in position.",
              "variance of {} linear in position"),
    "shape": ("Share of the variance of {} that lies between the means of position buckets.",
              "variance of {} between positions"),
}  # fmt: skip
COLUMNS = (
    *(
        Measure(f"{measure}_{name[0]}", words.format(name), "", SHARE, bias=True, title=title.format(name))
        for measure, (words, title) in _WORDS.items()
        for name in ("queries", "keys")
    ),
    Measure("best_pc", "The component, of those kept, with the largest absolute r_q.", "", error=None, kind="code",
            title="best component"),
    Measure("best_r_q", "The r_q of that component.", "", CORRELATION, "fisher", title="r_q of the best component"),
    Measure("best_is_pc0", "1 if that component is component 0, otherwise 0.", "", SHARE, error=None,
            title="heads whose best component is PC0", kind="indicator"),
)  # fmt: skip


def measures(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """All measures of a layer's heads; query heads that read the same keys share the keys' numbers.

    decode, share and shape are NaN where vectors do not vary, or are fewer than their dimensions. The best component of
    a replicate is the whole's, so that its r_q has an error.
    """
    first, which = sums.first_readers, sums.distinct_keys[1]
    keys = of_kind(sums.k.take(first), sums.bucket_means("k").take(first))
    columns = {f"{name}_q": values for name, values in of_kind(sums.q, sums.bucket_means("q")).items()}
    columns |= {f"{name}_k": values[which] for name, values in keys.items()}
    sizes = np.abs(sums.principal.r_q if sums.whole is None else repeated(sums.whole.principal.r_q, sums.copies))
    best = np.nan_to_num(sizes, nan=-1.0).argmax(axis=1)
    known = np.isfinite(sizes).any(axis=1)
    r_q = np.take_along_axis(sums.principal.r_q, best[:, None], axis=1)[:, 0]
    of_best = {"best_pc": best, "best_r_q": r_q, "best_is_pc0": best == 0}
    return columns | {name: np.where(known, values, np.nan) for name, values in of_best.items()}


def of_kind(of: Statistics, buckets: BucketMeans) -> dict[str, Array]:
    """decode, share and shape of queries or of keys."""
    trace = np.trace(of.cov_xx, axis1=-2, axis2=-1)
    exists = (trace > NO_VARIANCE * of.spread) & (of.var_t > 0) & (of.n >= of.mean_x.shape[-1])
    weights = (buckets.n / buckets.n.sum(axis=1, keepdims=True))[..., None]
    means = np.where(buckets.n[..., None] == 0, 0.0, buckets.mean)  # buckets without tokens count for nothing
    centre = (weights * means).sum(axis=1, keepdims=True)
    between = (weights * (means - centre) ** 2).sum(axis=(1, 2))  # Σ_b n_b |μ_b − μ|² / n
    with np.errstate(invalid="ignore", divide="ignore"):
        linear = (of.cov_xt**2).sum(axis=-1) / (of.var_t * trace)
        shares = {"decode": read_out(of.cov_xx, of.cov_xt) / of.var_t, "share": linear, "shape": between / trace}
    return {name: np.where(exists, np.clip(values, 0.0, 1.0), np.nan) for name, values in shares.items()}


def read_out(cov_xx: Array, cov_xt: Array) -> Array:
    """c' Σ⁻¹ c of each head, over the directions that are not FAINTEST: the variance that the best line recovers."""
    recovered = np.full(len(cov_xx), np.nan)
    known = np.isfinite(cov_xx).all(axis=(1, 2)) & np.isfinite(cov_xt).all(axis=1)
    if known.any():
        with one_blas_thread():
            recovered[known] = _inverted(cov_xx[known], cov_xt[known])
            faint = known & np.isnan(recovered)
            if faint.any():
                recovered[faint] = _without_faintest(cov_xx[faint], cov_xt[faint])
    return recovered


def _inverted(cov_xx: Array, cov_xt: Array) -> Array:
    """c' Σ⁻¹ c where no direction is faint, which a triangular inverse shows sooner than eigenvectors; NaN elsewhere.

    With Σ = L L', no eigenvalue is smaller than 1 over the sum of squares of L⁻¹, and none is larger than the trace.
    """
    recovered = np.full(len(cov_xx), np.nan)
    for head, (cov, drift) in enumerate(zip(cov_xx, cov_xt, strict=True)):
        factor, failed = dpotrf(cov, lower=1)  # what lies above the diagonal becomes 0
        if failed:
            continue
        inverse, singular = dtrtri(factor, lower=1)
        if not singular and FAINTEST * np.trace(cov) * (inverse**2).sum() < 1.0:
            recovered[head] = ((inverse @ drift) ** 2).sum()
    return recovered


def _without_faintest(cov_xx: Array, cov_xt: Array) -> Array:
    """The same over the directions that are left."""
    values, vectors = np.linalg.eigh(cov_xx)
    along = np.einsum("hdc,hd->hc", vectors, cov_xt) ** 2
    used = values > FAINTEST * values[:, -1:]
    return np.asarray(np.divide(along, values, out=np.zeros_like(along), where=used).sum(axis=1))


TABLE = HeadTable(FILE, COLUMNS, measures, stackable=True)


LENS = Lens(
    name="measures",
    title="Position without components",
    question="How much of the position can be decoded from a head, and how much of its variance is position?",
    tables=(TABLE,),
    figures=(
        Figure(
            "measures",
            title="Position Without Components",
            chart=Trajectories(
                (
                    Panel(("decode_q", "decode_k"), "Position decodable from whole vectors"),
                    Panel(("shape_q", "shape_k"), "Variance between positions"),
                )
            ),
            caption="Position decodable by a linear read-out of whole queries or keys "
            "(top), and the share of their variance between positions (bottom).",
        ),
    ),
    views=(
        View("curve", "Position in queries", ("decode_q", "shape_q", "share_q"), "Means over heads.", "measures"),
        View("curve", "Position in keys", ("decode_k", "shape_k", "share_k"), "Means over heads."),
        View("heatmap", "Position decodable from every head's queries", ("decode_q",)),
        View("heatmap", "Variance of every head's queries between positions", ("shape_q",)),
        View("scatter", "Variance between positions, queries against keys", ("shape_q", "shape_k")),
    ),
)
