"""The eigenvector of a matrix that belongs to one of a matrix nearby: what replicates of a component are.

Leaving out a few documents changes a covariance a little. From the whole's component, a few multiplications find the
replicate's to more digits than an error has, and the matrix itself need never be written down.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.pca import one_blas_thread

Array = NDArray[np.float64]
STEPS = 10  # multiplications: on pretrained models less than a thousandth of a replicate's change is left
NOTHING = 1e-13  # of the matrix's size: what is left of a vector that lies in the space already


def followed(apply: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Of the eigenvectors of symmetric matrices, those that lie closest to unit vectors `start` (…, d), and along them.

    Returns eigenvalues (…) and unit vectors (…, d). `apply` multiplies (…, d) vectors, each with its matrix.
    """
    with one_blas_thread():
        basis, small = _space(apply, start)
        values, turns = np.linalg.eigh(small)
    best = np.abs(turns[..., 0, :]).argmax(axis=-1)[..., None]  # the start is the first vector of the basis
    turn = np.take_along_axis(turns, best[..., None], axis=-1)[..., 0]
    turn = turn * np.where(turn[..., :1] < 0, -1.0, 1.0)
    vector = (turn[..., None, :] @ basis)[..., 0, :]
    return np.take_along_axis(values, best, axis=-1)[..., 0], vector / np.linalg.norm(vector, axis=-1, keepdims=True)


def _space(apply: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """An orthonormal basis (…, steps, d) of the start and its images, and the matrices in it (Lanczos)."""
    steps = min(STEPS, start.shape[-1])
    basis = np.zeros((*start.shape[:-1], steps, start.shape[-1]))
    small = np.zeros((*start.shape[:-1], steps, steps))
    vector, size = start, np.zeros(start.shape[:-1])
    for step in range(steps):
        basis[..., step, :] = vector
        known, image = basis[..., : step + 1, :], apply(vector)
        along = (known @ image[..., None])[..., 0]
        small[..., step, : step + 1] = small[..., : step + 1, step] = along
        for _ in range(2):  # once more removes what rounding left
            image = image - ((known @ image[..., None]).swapaxes(-1, -2) @ known)[..., 0, :]
        length = np.sqrt((image**2).sum(axis=-1))
        size = np.maximum(size, np.hypot(length, np.abs(along).max(axis=-1)))
        ended = length <= NOTHING * size  # the space is complete; what follows stays 0
        vector = np.where(ended[..., None], 0.0, image / np.where(ended, 1.0, length)[..., None])
    return basis, small
