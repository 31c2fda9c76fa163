"""The published protocol of plasticity, to repeat its numbers: what its text, figures and numbers allow to infer.

About 150 query buckets, of which the first few are missing; any two earlier keys of one document. Vectors are turned so
that their first coordinate is the direction in which queries drift. There the mean is one line over the whole context
and the variance what is left of it; in every other coordinate both are the bucket's, and coordinates are taken to be
independent. Before that, each coordinate is flipped so that keys are positive on average, as the public code does:
scores stay, but it changes the basis in which coordinates are taken to be independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkscope.lenses.plasticity.grid import PARTS, Array, Index, distance_class, first_seen
from qkscope.lenses.plasticity.pairs import SampledVectors, Tally
from qkscope.lenses.plasticity.sampled import LayerVectors, PairRequest, normal_pp
from qkscope.lenses.sums import LayerSums

BUCKETS, MISSING = 154, 4  # 0.65 % of the context each; the first 2.6 % has no value
QUERIES = 50  # of each bucket at least, on average (published: about 53): smaller samples have fewer buckets
LEAST_VARIANCE = 1e-12  # of a coordinate, as in the public code


@dataclass(frozen=True)
class QueryLaw:
    """Queries in the turned basis: coordinate 0 on one line over the context, the others bucket by bucket."""

    turned: Array  # (d,): the reflection is x − 2 turned (turned·x); zeros where nothing is turned
    flipped: Array  # (d,): signs
    mean: Array  # (buckets, d)
    variance: Array  # (buckets, d)
    n: Array  # (buckets,)

    def into(self, x: Array) -> Array:
        """Vectors in that basis."""
        return reflected(x * self.flipped, self.turned)


def published_plasticity(sums: LayerSums, vectors: LayerVectors, request: PairRequest) -> Tally:
    """The published estimate of a layer's heads."""
    facts, keys_of = sums.facts, sums.distinct_keys
    low, high = query_buckets(sums.edges, min(len(sample.position) for sample in vectors.q.values()))
    step = (sums.edges[-1] - sums.edges[0]) / PARTS
    laws = [query_law(vectors.q[h], vectors.k[k], low, high) for h, k in zip(sums.heads, sums.kv_heads, strict=True)]
    tally = Tally.empty(low, high, np.stack([law.n for law in laws]), PARTS + 1)
    for key, kv_head in enumerate(keys_of[0]):
        for place in range(len(low)):
            start = first_seen((low[place] + high[place] - 1) / 2, facts.attention, facts.attention_window)
            seen = vectors.k[int(kv_head)].between(max(float(start), float(sums.edges[0])), float(low[place]))
            pairs = request.draw(seen, facts.layer, int(kv_head), place)
            away = distance_class(pairs.apart, step)
            for head in np.flatnonzero(keys_of[1] == key).tolist():
                law = laws[head]
                turned = law.into(pairs.difference)
                tally.add(
                    head, place, pairs, away, normal_pp(turned @ law.mean[place], turned**2 @ law.variance[place])
                )
    return tally


def query_buckets(edges: tuple[int, ...], queries: int) -> tuple[Index, Index]:
    """First position of each query bucket, and the one behind its last; as many buckets as the sample can fill."""
    count = int(np.clip(queries // QUERIES, 2, min(BUCKETS, edges[-1] - edges[0])))
    cuts = np.unique(np.round(np.linspace(edges[0], edges[-1], count + 1)).astype(np.intp))
    used = cuts[:-1] >= int(MISSING / BUCKETS * edges[-1])
    return cuts[:-1][used], cuts[1:][used]


def query_law(q: SampledVectors, k: SampledVectors, low: Index, high: Index) -> QueryLaw:
    """What the protocol takes for the law of a head's queries."""
    inside = q.between(low[0], high[-1])
    of = np.searchsorted(low, inside.position, side="right") - 1
    flipped = _signs(k)
    x, t = inside.vectors * flipped, inside.position.astype(float)
    slope = (x - x.mean(axis=0)).T @ (t - t.mean()) / max(((t - t.mean()) ** 2).sum(), 1.0)
    turned = reflection(slope)
    x = reflected(x, turned)
    n = np.bincount(of, minlength=len(low)).astype(float)
    indicator = (of[:, None] == np.arange(len(low))).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (indicator.T @ x) / n[:, None]
        variance = (indicator.T @ (x - mean[of]) ** 2) / n[:, None]
        at = (indicator.T @ t) / n
    drift = np.polyfit(t, x[:, 0], 1)
    mean[:, 0] = np.polyval(drift, at)
    variance[:, 0] = np.where(n > 0, ((x[:, 0] - np.polyval(drift, t)) ** 2).mean(), np.nan)
    return QueryLaw(turned, flipped, mean, np.maximum(variance, LEAST_VARIANCE), n)


def _signs(k: SampledVectors) -> Array:
    """The sign of each coordinate's mean over buckets of positions, of keys; 0 counts as positive."""
    cuts = np.linspace(0, k.position.max() + 1, PARTS + 1)
    of = np.searchsorted(cuts, k.position, side="right") - 1
    means = [k.vectors[of == bucket].mean(axis=0) for bucket in np.unique(of)]
    return np.where(np.mean(means, axis=0) < 0, -1.0, 1.0)


def reflection(direction: Array) -> Array:
    """The unit vector whose reflection takes coordinate 0 to this direction; zeros where there is nothing to turn."""
    size = np.linalg.norm(direction)
    first = np.eye(len(direction))[0]
    across = first - direction / size if size > 0 else 0.0 * first
    length = np.linalg.norm(across)
    return np.asarray(across / length if length > 0 else across)


def reflected(x: Array, across: Array) -> Array:
    """x mirrored at the plane that is perpendicular to `across`."""
    return np.asarray(x - 2.0 * (x @ across)[..., None] * across)
