"""What the first batch decides: the pivot that sums are about, and the directions of sketches (see host_sums.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qkscope.moments.layout import sketch_blocks
from qkscope.moments.placement import BatchPlacement
from qkscope.moments.second_moments import Array, Kind
from qkscope.moments.unrotate import rotation_tables

if TYPE_CHECKING:
    from qkscope.moments.running_sums import RunningSums

PIVOT_TOKENS = 256  # tokens, evenly taken from the first ones, that decide on the pivot
PILOT_TOKENS = 512  # tokens of each window, evenly taken, that the directions come from
STEPS, PLACES = 4, 16  # from the windows' common component to each window's; positions that it is turned back from
ITERATIONS, MORE = 12, 4  # of the subspace iteration, and vectors that it takes beyond those asked for


def coarse_mean(x: Tensor, placed: BatchPlacement) -> Tensor:
    """The mean of (rows, heads, tokens, width), to within a standard deviation or so: some tokens will do.

    A pivot of few bits leaves the vectors on the grid of their own precision: subtracting it rounds almost nothing
    away, and products of half-precision vectors about it need little rounding either.
    """
    rows, tokens = placed.sample(PIVOT_TOKENS)
    some = x.permute(1, 0, 2, 3)[:, torch.from_numpy(rows).to(x.device), torch.from_numpy(tokens).to(x.device)]
    some = some.to(torch.float32 if x.device.type == "mps" else torch.float64)
    mean = some.mean(dim=1)
    deviation = (some - mean[:, None]).square_().mean(dim=1).sqrt_()  # torch's own takes three times as long
    grid = torch.exp2(torch.floor(torch.log2(deviation)))
    coarse = torch.where(grid > 0, torch.round(mean / grid) * grid, mean)
    return torch.where(torch.isfinite(coarse), coarse, 0.0).to(torch.float32).to(some.dtype)


def choose_directions(
    sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement
) -> tuple[Tensor | None, Tensor | None]:
    """(blocks of all heads, width, m): the leading components of each query head, and those that its keys need.

    They lead in the mean over windows of the covariance of queries and keys together, each in units of its trace. Then
    (heads, width, m): the same of what each window's first component was before rotation. None of what is not sketched.
    """
    by_window = _pooled(vectors, placed)
    pooled = np.mean(list(by_window.values()), axis=0)
    unrotated = _unrotated_directions(sums, pooled, by_window) if sums.unrotated_spans else None
    if not sums.layout.sketch_spans:
        return None, unrotated
    size, blocks = sketch_blocks(sums.layout, sums.heads, sums.width)
    queries = leading(pooled, size)
    keys = sums.heads["k"]
    weighted = queries * np.linspace(1.0, 0.5, size)  # where keys have no room for all, the first ones stay
    readers = weighted.reshape(keys, -1, sums.width, size).transpose(0, 2, 1, 3).reshape(keys, sums.width, -1)
    of_keys = np.linalg.svd(readers, full_matrices=False)[0][..., : size * blocks["k"]]
    of_keys = of_keys.reshape(keys, sums.width, blocks["k"], size).transpose(0, 2, 1, 3)
    every = np.concatenate([queries, of_keys.reshape(-1, sums.width, size)])
    return torch.from_numpy(every.astype(np.float32)).to(sums.device), unrotated


def _unrotated_directions(sums: RunningSums, pooled: Array, by_window: Mapping[int, Array]) -> Tensor:
    """At position t, a component v sees queries before RoPE along R(t)ᵀv: where most of these lie, over all windows."""
    start, seen = leading(pooled, 1), []
    for window, covariance in by_window.items():
        component = start
        for _ in range(STEPS):
            component = covariance @ component
            length = np.linalg.norm(component, axis=1, keepdims=True)
            component = np.where(length > 0, component / np.where(length > 0, length, 1.0), start)
        pre_rope = component[:, None, :, 0]
        if sums.rotation is not None:
            positions = np.linspace(0, window - 1, PLACES).astype(np.int64)
            partner, cosines, sines = rotation_tables(sums.rotation, sums.width, positions)
            pre_rope = pre_rope * cosines + pre_rope[..., partner] * sines
        seen.append(pre_rope)
    every = np.concatenate(seen, axis=1)  # (query heads, windows × places, width)
    size, keys = min(sums.layout.unrotated_sketched, sums.width), sums.heads["k"]
    of_keys = every.reshape(keys, -1, sums.width)  # of all heads that read them
    squares = [of.swapaxes(1, 2) @ of for of in (every, of_keys)]
    return torch.from_numpy(leading(np.concatenate(squares), size).astype(np.float32)).to(sums.device)


def _pooled(vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> dict[int, Array]:
    """By window, the covariance of each head's queries and keys together."""
    known: dict[int, Tensor] = {}
    for window in placed.layout.windows():
        rows, tokens = (torch.from_numpy(of).to(vectors["q"].device) for of in placed.sample(PILOT_TOKENS, window))
        if not len(rows):
            continue
        q, k = (vectors[kind].transpose(0, 1)[:, rows, tokens].to(torch.float32) for kind in ("q", "k"))
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        both = torch.cat([q, k], dim=1)
        both = both - both.mean(dim=1, keepdim=True)
        covariance = both.transpose(1, 2) @ both
        trace = covariance.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
        known[window] = covariance / torch.where(trace > 0, trace, 1.0)
    assert known  # a batch without tokens is not added
    by_window: dict[int, Array] = {}
    for window, covariance in known.items():
        # Tensors without contents have the shapes and the memory of others; any directions do for them.
        host = torch.zeros(covariance.shape) if covariance.is_meta else covariance.cpu()
        by_window[window] = np.nan_to_num(host.numpy().astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return by_window


def leading(covariance: Array, count: int) -> Array:
    """(heads, d, count): about the leading eigenvectors of (heads, d, d), orthonormal; faster than finding all."""
    width = covariance.shape[-1]
    block = min(width, count + MORE)
    start = np.random.default_rng(0).standard_normal((width, block))
    basis = np.linalg.qr(np.broadcast_to(start, (len(covariance), width, block)))[0]
    for _ in range(ITERATIONS):
        basis = np.linalg.qr(covariance @ basis)[0]
    _, inside = np.linalg.eigh(basis.swapaxes(1, 2) @ covariance @ basis)
    return np.asarray(basis @ inside[..., ::-1][..., :count])
