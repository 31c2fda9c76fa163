"""Products of means and covariances that the closed form is made of, for all parts of a head at once."""

from __future__ import annotations

import numpy as np

from qkscope.lenses.plasticity.grid import Array, Cells, Index
from qkscope.lenses.stacks import for_readers


def plasticity_of(gap: Array | None, fixed: Array, decided: Array) -> Array:
    """E[4p(1 − p)], where the mean difference of two scores is normal over pairs and the score normal over queries.

    `gap` is the mean over pairs of the mean difference (None: 0), `fixed` its variance over pairs, `decided` the
    variance over queries. NaN where nothing varies.
    """
    from scipy.special import owens_t

    spread = decided + fixed
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = np.sqrt(decided / (spread + fixed))
        volume = np.arctan(slope) / (2.0 * np.pi) if gap is None else owens_t(gap / np.sqrt(spread), slope)
    return np.asarray(np.where(spread > 0, np.clip(8.0 * volume, 0.0, 1.0), np.nan))


def of_both(table: Array, cells: Cells) -> Array:
    """What a table (heads, b, c) says of both keys of a cell together; never below 0."""
    flat = table.reshape(len(table), -1)
    return np.maximum(flat.take(cells.bc, axis=1) + flat.take(cells.bd, axis=1), 0.0)


def of_differences(form: Array, cells: Cells) -> Array:
    """(k_c − k_d)' Σ_b (k_c − k_d) of each cell, from k_c' Σ_b k_d of all parts (heads, b, c, d)."""
    flat = form.reshape(len(form), -1)
    apart = flat.take(cells.bcc, axis=1)
    apart += flat.take(cells.bdd, axis=1)
    apart -= 2 * flat.take(cells.bcd, axis=1)
    return apart


def traces_by_keys(matrices: Array, keys: Array, which: Index) -> Array:
    """tr(M_b K_c) of every head: its matrices (heads, b, d, d) with all of its key head (key heads, c, d, d)."""
    heads, count, d, _ = matrices.shape
    of_keys = for_readers(keys, which)
    of_keys = of_keys.reshape(*of_keys.shape[:2], d * d)
    traces = matrices.reshape(len(of_keys), -1, d * d) @ of_keys.swapaxes(1, 2)
    return np.asarray(traces.reshape(heads, count, -1))


def between_means(matrices: Array, about: Array) -> Array:
    """k_c' M k_d of every head, for each of its matrices and all means (heads, parts, d): (heads, b, c, d)."""
    along = about[:, None] @ matrices  # (heads, b, parts, d)
    heads, count, parts, d = along.shape
    products = along.reshape(heads, count * parts, d) @ about.swapaxes(1, 2)
    return np.asarray(products.reshape(heads, count, parts, parts))


def about_centre(keys: Array) -> Array:
    """Means of parts (key heads, parts, d) about their centre: large common means would cost digits."""
    known = np.isfinite(keys).all(axis=2, keepdims=True)
    total = np.where(known, keys, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(keys - total / np.maximum(known.sum(axis=1, keepdims=True), 1))


def quadratic(matrices: Array, vectors: Array) -> Array:
    """x_p' M_g x_p of every row: (rows, p, g)."""
    return np.asarray(np.einsum("rgpd,rpd->rpg", vectors[:, None] @ matrices, vectors))


def on_keys(matrices: Array, vectors: Array, which: Index) -> Array:
    """The same, where the matrices (key heads, …) are those of the key head that each row reads."""
    of_keys = for_readers(matrices, which)
    forms = quadratic(of_keys, vectors.reshape(len(of_keys), -1, vectors.shape[2]))
    return forms.reshape(*vectors.shape[:2], -1)
