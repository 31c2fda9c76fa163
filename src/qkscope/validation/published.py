"""The published protocol of plasticity, to repeat its numbers: what its text, figures and numbers allow to infer.

About 150 query buckets, of which the first few are missing; any two earlier keys of one document. Vectors are reflected
so that their first coordinate is the direction in which queries drift. There the mean is one line over the context and
the variance what is left of it; in every other coordinate both are the bucket's, and coordinates are taken to be
independent. Before that, each coordinate is flipped so that keys are positive on average, as the public code does:
scores stay, but it changes the basis in which coordinates are taken to be independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkscope.lenses.plasticity.grid import PARTS, Array, Index, distance_class
from qkscope.lenses.sums import LayerSums
from qkscope.validation.kept import KeptLayer
from qkscope.validation.plasticity import Tally, key_draws, normal_pp
from qkscope.validation.sampling import Integers

BUCKETS, MISSING = 154, 4  # 0.65 % of the context each; the first 2.6 % has no value
QUERIES = 50  # of each bucket at least, on average (published: about 53): smaller samples have fewer buckets
LEAST_VARIANCE = 1e-12  # of a coordinate, as in the public code


@dataclass(frozen=True)
class QueryLaw:
    """Queries in the reflected basis: coordinate 0 on one line over the context, the others bucket by bucket."""

    axis: Array  # (d,): the reflection is x − 2 axis (axis·x); zeros where there is nothing to reflect
    flipped: Array  # (d,): signs
    mean: Array  # (buckets, d)
    variance: Array  # (buckets, d)
    n: Array  # (buckets,)

    def into(self, x: Array) -> Array:
        """Vectors in that basis."""
        return reflected(x * self.flipped, self.axis)


def published_plasticity(sums: LayerSums, kept: KeptLayer, most: int) -> Tally:
    """The published estimate of a layer's heads, from at most so many pairs for each query bucket."""
    low, high = query_buckets(sums.edges, len(kept.position))
    step = (sums.edges[-1] - sums.edges[0]) / PARTS
    laws = [query_law(kept, h, k, low, high) for h, k in zip(sums.heads, sums.kv_heads, strict=True)]
    tally = Tally.empty(low, high, np.stack([law.n for law in laws]), PARTS + 1)
    for heads, draws in key_draws(sums, kept, low, (low + high - 1) / 2, range(len(low)), most):
        for bucket, pairs in draws:
            away = distance_class(pairs.distance, step)
            for head in heads:
                x, law = laws[head].into(pairs.difference), laws[head]
                tally.add(head, bucket, pairs, away, normal_pp(x @ law.mean[bucket], x**2 @ law.variance[bucket]))
    return tally


def query_buckets(edges: tuple[int, ...], queries: int) -> tuple[Index, Index]:
    """First position of each query bucket, and the one behind its last; as many buckets as the sample can fill."""
    count = int(np.clip(queries // QUERIES, 2, min(BUCKETS, edges[-1] - edges[0])))
    cuts = np.unique(np.round(np.linspace(edges[0], edges[-1], count + 1)).astype(np.intp))
    used = cuts[:-1] >= int(MISSING / BUCKETS * edges[-1])
    return cuts[:-1][used], cuts[1:][used]


def query_law(kept: KeptLayer, head: int, key: int, low: Index, high: Index) -> QueryLaw:
    """What the protocol takes for the law of a head's queries."""
    inside = (kept.position >= low[0]) & (kept.position < high[-1])
    position = kept.position[inside]
    bucket, t = np.searchsorted(low, position, side="right") - 1, position.astype(float)
    flipped = _signs(kept.position, kept.k[key].astype(np.float64))
    x = kept.q[head][inside].astype(np.float64) * flipped
    slope = (x - x.mean(axis=0)).T @ (t - t.mean()) / max(((t - t.mean()) ** 2).sum(), 1.0)
    axis = reflection(slope)
    x = reflected(x, axis)
    n = np.bincount(bucket, minlength=len(low)).astype(float)
    indicator = (bucket[:, None] == np.arange(len(low))).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (indicator.T @ x) / n[:, None]
        variance = (indicator.T @ (x - mean[bucket]) ** 2) / n[:, None]
        at = (indicator.T @ t) / n
    drift = np.polyfit(t, x[:, 0], 1)
    mean[:, 0] = np.polyval(drift, at)
    variance[:, 0] = np.where(n > 0, ((x[:, 0] - np.polyval(drift, t)) ** 2).mean(), np.nan)
    return QueryLaw(axis, flipped, mean, np.maximum(variance, LEAST_VARIANCE), n)


def _signs(position: Integers, keys: Array) -> Array:
    """The sign of each coordinate's mean over buckets of positions; 0 counts as positive."""
    cuts = np.linspace(0, position.max() + 1, PARTS + 1)
    bucket = np.searchsorted(cuts, position, side="right") - 1
    means = [keys[bucket == each].mean(axis=0) for each in np.unique(bucket)]
    return np.where(np.mean(means, axis=0) < 0, -1.0, 1.0)


def reflection(direction: Array) -> Array:
    """The unit vector whose reflection takes coordinate 0 to this direction; zeros where it is there already."""
    size = np.linalg.norm(direction)
    first = np.eye(len(direction))[0]
    across = first - direction / size if size > 0 else 0.0 * first
    length = np.linalg.norm(across)
    return np.asarray(across / length if length > 0 else across)


def reflected(x: Array, axis: Array) -> Array:
    """x mirrored at the plane that is perpendicular to `axis`."""
    return np.asarray(x - 2.0 * (x @ axis)[..., None] * axis)
