"""The vectors that a run kept of an entry, beside its sums: what tables of samples are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.moments.moments import Moments


@dataclass(frozen=True)
class KeptSample:
    """One entry's sample, and over which positions it is looked at."""

    model: str
    folder: Path  # with the vectors
    moments: Moments
    windows: Sequence[int]
    skip: int  # positions that are left out at the beginning
