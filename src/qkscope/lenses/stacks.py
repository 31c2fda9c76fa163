"""Several replicates of a layer at once, as further heads: all heads without one group, then all without the next.

Where a layer's arrays are small, calling a lens costs more than its arithmetic. With replicates one after the other
along the axis of heads, a lens is called once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")
# Of bucket covariances in one stack, and of what is computed at once: more is slower, as processors' caches are small.
MOST_BYTES = 8_000_000


def repeated(made: Made, copies: int) -> Made:
    """What was made of all documents, once for each replicate of a stack."""
    changed: Made = made if copies == 1 else _changed(made, lambda array: np.concatenate([array] * copies))
    return changed


def taken(made: Made, copies: int, number: int) -> Made:
    """One replicate's part of what was made of a stack."""
    part: Made = _changed(made, lambda array: array.reshape(copies, -1, *array.shape[1:])[number])
    return part


def joined(parts: Sequence[Any]) -> Any:
    """What was made of each replicate, dataclasses of arrays, as a stack has it; None of none."""
    if len(parts) < 2:
        return next(iter(parts), None)
    names = [each.name for each in fields(parts[0]) if isinstance(getattr(parts[0], each.name), np.ndarray)]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def for_readers(keys: NDArray[Any], which: NDArray[np.intp]) -> NDArray[Any]:
    """What belongs to key heads, to be multiplied with that of equal shares of the heads that read them, in order.

    One entry for all heads that read it, where these are neighbors and as many for every key head; else one for each.
    """
    readers = len(which) // len(keys)
    return keys if np.array_equal(which, np.repeat(np.arange(len(keys)), readers)) else keys[which]


def in_blocks(count: int, size: int, together: int = 1) -> Iterator[slice]:
    """Slices of `count` heads of so many bytes each, as many at a time as are fast: a multiple of those `together`."""
    most = max(1, MOST_BYTES // max(size * together, 1)) * together
    return (slice(start, min(start + most, count)) for start in range(0, count, most))


def _changed(made: Any, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    """With other arrays, wherever they are; all have the axis of heads (or key heads) first."""
    if isinstance(made, np.ndarray):
        return change(made)
    if isinstance(made, tuple):
        return tuple(_changed(each, change) for each in made)
    if isinstance(made, dict):
        return {name: _changed(each, change) for name, each in made.items()}
    if is_dataclass(made) and not isinstance(made, type):
        return replace(made, **{each.name: _changed(getattr(made, each.name), change) for each in fields(made)})
    return made
