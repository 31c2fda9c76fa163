"""Products of means and covariances that the closed form is made of, for all parts of a head at once."""

from __future__ import annotations

import numpy as np

from qkscope.lenses.plasticity.grid import Array, Index


def plasticity_of(gap: Array, fixed: Array, decided: Array) -> Array:
    """E[4p(1 − p)], where the mean difference of two scores is normal over pairs and the score normal over queries.

    `gap` is the mean over pairs of the mean difference, `fixed` its variance over pairs, `decided` the variance over
    queries. NaN where nothing varies.
    """
    from scipy.special import owens_t

    spread = decided + fixed
    with np.errstate(invalid="ignore", divide="ignore"):
        height, slope = gap / np.sqrt(spread), np.sqrt(decided / (spread + fixed))
    return np.asarray(np.where(spread > 0, np.clip(8.0 * owens_t(height, slope), 0.0, 1.0), np.nan))


def traces_by_keys(matrices: Array, keys: Array, which: Index) -> Array:
    """tr(M_b K_c) of every head: its matrices (heads, b, d, d) with all of its key head (key heads, c, d, d)."""
    heads, count, d, _ = matrices.shape
    flat, traces = matrices.reshape(heads, count, d * d), np.empty((heads, count, keys.shape[1]))
    for key, of_key in enumerate(keys.reshape(len(keys), -1, d * d)):
        traces[which == key] = flat[which == key] @ of_key.T
    return traces


def between_means(matrices: Array, about: Array) -> Array:
    """k_c' M k_d of every head, for each of its matrices and all means (heads, parts, d): (heads, b, c, d)."""
    return np.asarray((about[:, None] @ matrices) @ about.swapaxes(1, 2)[:, None])


def about_centre(keys: Array) -> Array:
    """Means of parts (key heads, parts, d) about their centre: large common means would cost digits."""
    known = np.isfinite(keys).all(axis=2, keepdims=True)
    total = np.where(known, keys, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(keys - total / np.maximum(known.sum(axis=1, keepdims=True), 1))


def quadratic(matrices: Array, vectors: Array) -> Array:
    """x_p' M_g x_p of every row: (rows, p, g)."""
    return np.asarray(np.einsum("rgpd,rpd->rpg", vectors[:, None] @ matrices, vectors))


def on_keys(matrices: Array, vectors: Array, which: Index) -> Array:
    """The same, where the matrices (key heads, …) are those of the key head that each row reads: one product each."""
    forms = np.empty((*vectors.shape[:2], matrices.shape[1]))
    for key, of_key in enumerate(matrices):
        mine = which == key
        stacked = vectors[mine].reshape(1, -1, vectors.shape[2])
        forms[mine] = quadratic(of_key[None], stacked)[0].reshape(forms[mine].shape)
    return forms
