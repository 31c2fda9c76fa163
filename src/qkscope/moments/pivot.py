"""The point that sums are about, and where a number is that cannot be summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkscope.moments.placing import Placed
from qkscope.moments.second import Kind

PIVOT_TOKENS = 256  # tokens, evenly taken from the first ones, that decide on the pivot


class NonFinite(Exception):
    """A NaN or infinite activation, at (kind, row, head, token) of the tensors that were added."""

    def __init__(self, kind: str, row: int, head: int, token: int, value: float) -> None:
        super().__init__(f"{value} in {kind} row {row}, head {head}, token {token}")
        self.kind, self.row, self.head, self.token, self.value = kind, row, head, token, value


def coarse_mean(x: Tensor, placed: Placed) -> Tensor:
    """The mean of (rows, heads, tokens, width), to within a standard deviation or so: some tokens will do.

    A pivot of few bits leaves the vectors on the grid of their own precision: subtracting it rounds almost nothing
    away, and products of half-precision vectors about it need little rounding either.
    """
    rows, tokens = placed.evenly(PIVOT_TOKENS)
    some = x.permute(1, 0, 2, 3)[:, torch.from_numpy(rows).to(x.device), torch.from_numpy(tokens).to(x.device)]
    some = some.to(torch.float32 if x.device.type == "mps" else torch.float64)
    mean = some.mean(dim=1)
    deviation = (some - mean[:, None]).square_().mean(dim=1).sqrt_()  # torch's own takes three times as long
    grid = torch.exp2(torch.floor(torch.log2(deviation)))
    coarse = torch.where(grid > 0, torch.round(mean / grid) * grid, mean)
    return torch.where(torch.isfinite(coarse), coarse, 0.0).to(torch.float32).to(some.dtype)


def locate(vectors: Mapping[Kind, Tensor], placed: Placed) -> NonFinite:
    """The first NaN or infinity, or where all are finite the largest number: its square is not."""
    real = torch.from_numpy(placed.real)
    largest: NonFinite | None = None
    for kind, of_kind in vectors.items():
        shown = of_kind.detach().cpu().where(real[:, None, :, None], torch.zeros((), dtype=of_kind.dtype))
        bad = (~torch.isfinite(shown)).nonzero()
        place = bad[0] if len(bad) else torch.stack(torch.unravel_index(shown.abs().argmax(), shown.shape))
        row, head, token, width = (int(i) for i in place)
        candidate = NonFinite(kind, row, head, token, float(shown[row, head, token, width]))
        if len(bad):
            return candidate
        if largest is None or abs(candidate.value) > abs(largest.value):
            largest = candidate
    assert largest is not None  # there are two kinds
    return largest
