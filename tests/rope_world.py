"""Heads whose vectors at rest are known, turned by hand in complex numbers, and everything by brute force from them."""

import numpy as np

from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.layout import capture_layout
from reference import reference_rows

HALVES = Rotation(((0, 4), (1, 5), (2, 6), (3, 7)), (1.0, 0.21, 0.013, 0.0004))
NEIGHBOURS = Rotation(((0, 1), (2, 3), (4, 5), (6, 7)), (1.0, 0.21, 0.013, 0.0004))
PARTIAL = Rotation(((1, 6), (0, 3)), (0.9, 0.02))  # four of eight coordinates stay
YARN = Rotation(HALVES.pairs, (1.0, 0.15, 0.004, 0.0001), 1.139)
SLOW = Rotation(HALVES.pairs, (0.3, 1e-6, 1e-9, 1e-6 * (1 + 1e-9)))  # tiny angles, and two that hardly differ
WIDTH, HEADS, KEY_HEADS = 8, 4, 2


def turn(x, t, rotation):
    """(…, width) vectors at rest turned to positions t (…): each plane is a complex number times e^{i angle t}."""
    found = np.array(np.broadcast_to(x, np.broadcast_shapes(x.shape, (*np.shape(t), x.shape[-1]))), dtype=float)
    for (first, second), angle in zip(rotation.pairs, rotation.angles, strict=True):
        z = (found[..., first] + 1j * found[..., second]) * np.exp(1j * angle * np.asarray(t))
        found[..., first], found[..., second] = z.real, z.imag
    return found


def cloud(mean, cov):
    """Vectors with exactly this mean and covariance: two along each axis."""
    values, vectors = np.linalg.eigh(cov)
    arms = vectors * np.sqrt(np.maximum(values, 0.0) * len(mean))
    return np.concatenate([mean + arms.T, mean - arms.T])


def everywhere(x, positions, rotation):
    """Every vector at every position: (vectors × positions, width), and the positions."""
    t = np.asarray(positions, dtype=float)
    turned = x[:, None, :] if rotation is None else turn(x[:, None, :], t[None, :], rotation)
    return np.broadcast_to(turned, (len(x), len(t), x.shape[-1])).reshape(-1, x.shape[-1]), np.tile(t, len(x))


def leading(q, k):
    """The first principal component of both together, up to its sign."""
    return np.linalg.eigh(np.cov(np.concatenate([q, k]).T))[1][:, -1]


def brute(q, k, positions, rotation):
    """PC0 of vectors at rest, each turned to every position: sklearn's PCA and scipy's pearsonr on all of them."""
    (q, t_q), (k, t_k) = everywhere(q, positions, rotation), everywhere(k, positions, rotation)
    row = reference_rows(q, k, t_q, t_k, 1).iloc[0]
    return {
        "r_q_rope": row["r_q"], "r_k_rope": row["r_k"], "explained_rope": row["explained_variance"],
        "alpha_rope": row["alpha"], "beta_rope": row["beta"], "bias_rope": np.polyfit(t_k, k @ q.mean(axis=0), 1)[0],
        "direction": leading(q, k),
    }  # fmt: skip


def heads(seed=0, rows=6, length=64, drift=0.0):
    """Queries and keys at rest, (rows, heads, tokens, width), that differ between documents; a drift is a drift."""
    rng, found = np.random.default_rng(seed), []
    for count in (HEADS, KEY_HEADS):
        axes = np.linalg.qr(rng.normal(size=(count, WIDTH, WIDTH)))[
            0
        ]  # variances fall, so that components are distinct
        x = rng.normal(size=(rows, count, length, WIDTH)) * np.geomspace(3, 0.3, WIDTH) @ axes
        x += 1.5 * rng.normal(size=(1, count, 1, WIDTH)) + 0.4 * rng.normal(size=(rows, count, 1, WIDTH))
        x += drift * np.linspace(0, 1, length)[:, None] * rng.normal(size=(1, count, 1, WIDTH))
        found.append(x)
    return found


def facts(rotation, layer=0, rotary=None, **changes):
    rotary = rotary or ("nope" if rotation is None else "rotary")
    about = {"rotation": rotation, "score_scale": WIDTH**-0.5, **changes}
    return LayerFacts(layer, HEADS, KEY_HEADS, WIDTH, rotary, **about)


def capture(rotation, q, k, *, groups=(0, 1, 2, 3, 4, 0), layout=None, of=None, positions=None):
    """Moments of vectors at rest that a layer turns; YaRN's factor is in them already, as the kernel gets it."""
    t = np.arange(q.shape[2]) if positions is None else np.asarray(positions)[:, None, :]
    layout = layout or capture_layout(q.shape[2], buckets=8, groups=5, common=q.shape[2] // 4)
    moments = Moments(layout, [of or facts(rotation)])
    turned = [x if rotation is None else turn(x, t, rotation) for x in (q, k)]
    moments.add(moments.layers[0].layer, *turned, positions=positions, groups=list(groups))
    return moments
