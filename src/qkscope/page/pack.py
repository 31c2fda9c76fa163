"""Arrays as one compressed text: bytes of equal significance together, zlib, base64.

Grouping bytes (all first bytes of an array, then all second bytes, ...) lets zlib find what correlations have in
common: sign and exponent. The browser undoes it with DecompressionStream, so the page carries no decoder.

An array that repeats lines of another one (the common window of a checkpoint whose context it is) keeps the others
only. Errors of large studies are one byte each, on a logarithmic scale from the smallest to the largest. Points that
are only drawn are one byte each, on a straight scale from the smallest to the largest of their line.
"""

import base64
import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# How arrays are called in the page; all little-endian, as every browser's typed arrays are.
TYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "uint8": "u1", "log8": "u1", "lin8": "u1"}
ENDS = ".ends"  # of the name of an array with the ends of straight scales
HALF = (0.01, 6e4)  # how large the largest value of an array may be for half precision
STEPS = 254  # of one byte on a straight scale: 0 is NaN
LOG_STEPS = 253  # of one byte: 0 is NaN, 1 is 0, the rest are steps of the scale
WIDEST = 6.0  # decades that one byte spans with steps below 6 %
COARSE = 24  # steps in a decade where errors are only drawn, and printed with two digits: 10 % from one to the next


@dataclass
class Pack:
    """Named arrays and texts on their way into the page."""

    _parts: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    index: dict[str, dict[str, Any]] = field(default_factory=dict)  # name: type, shape, first byte
    _bytes: int = 0

    def add(
        self, name: str, values: npt.NDArray[Any], kind: str, like: str | None = None, *, coarse: bool = False
    ) -> None:
        """Add an array under a name that is not taken yet; lines that `like` has in the same place are not repeated.

        `coarse`: of the type `log8`, only as many steps as a drawing needs, which compresses better.
        """
        entry: dict[str, Any] = {"type": kind}
        if kind == "log8":
            values, scale = to_log8(np.asarray(values, dtype=np.float64), coarse=coarse)
            entry |= scale
        if kind == "lin8":
            values, ends = to_lin8(np.asarray(values, dtype=np.float64))
            self.add(f"{name}{ENDS}", ends, "float32")
        plain = np.ascontiguousarray(values, dtype=np.dtype(TYPES[kind]))
        entry["shape"] = list(plain.shape)
        other = None if like is None or like == name else self._parts.get(like)
        whole = like is not None and "lines" not in self.index.get(like, {}) and kind not in ("log8", "lin8")
        if other is not None and whole and plain.ndim > 1 and (other.shape, other.dtype) == (plain.shape, plain.dtype):
            lines = [i for i in range(len(plain)) if plain[i].tobytes() != other[i].tobytes()]
            if len(lines) < len(plain):
                entry |= {"like": like, "lines": lines}
                plain = plain[lines]
        self._append(name, entry, plain)

    def add_text(self, name: str, text: str) -> None:
        """Add a text."""
        data = np.frombuffer(text.encode("utf-8"), np.uint8)
        self._append(name, {"type": "text", "shape": [len(data)]}, data)

    def _append(self, name: str, entry: dict[str, Any], values: npt.NDArray[Any]) -> None:
        if name in self.index:
            raise ValueError(f"the page has {name!r} twice")
        self.index[name] = {**entry, "first": self._bytes}
        self._parts[name] = values
        self._bytes += values.nbytes

    def text(self) -> str:
        """Everything, compressed, in letters that mean nothing to HTML."""
        squeezer = zlib.compressobj(9)
        bytewise = (part.reshape(-1).view(np.uint8).reshape(-1, part.itemsize).T for part in self._parts.values())
        squeezed = [squeezer.compress(part.tobytes()) for part in bytewise]
        return base64.b64encode(b"".join([*squeezed, squeezer.flush()])).decode("ascii")


def squeeze(value: Any) -> str:
    """JSON, compressed, in letters: an index of hundreds of arrays repeats the same words."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 9)).decode("ascii")


def precision(values: npt.NDArray[np.float64]) -> str:
    """Half precision where it is enough to draw: three digits, and steps of 6e-8 near 0."""
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return "float16" if largest == 0.0 or HALF[0] <= largest <= HALF[1] else "float32"


def exact_precision(values: npt.NDArray[np.float64]) -> str:
    """The smallest floats that hold every digit: counts and windows seldom need eight bytes."""
    for kind in ("float16", "float32"):
        with np.errstate(over="ignore"):
            if np.array_equal(values.astype(TYPES[kind]).astype(np.float64), values, equal_nan=True):
                return kind
    return "float64"


def error_precision(values: npt.NDArray[np.float64], *, large: bool) -> str:
    """How errors are kept: a large study has one byte for each where one byte is enough."""
    known = values[np.isfinite(values) & (values > 0)]
    if large and len(known) and math.log10(float(known.max()) / float(known.min())) <= WIDEST:
        return "log8"
    return precision(values)


def to_log8(values: npt.NDArray[np.float64], *, coarse: bool = False) -> tuple[npt.NDArray[np.uint8], dict[str, float]]:
    """Numbers of at least 0 as one byte each; the logarithms of the smallest and the largest above 0, and the steps."""
    known = np.isfinite(values) & (values > 0)
    logs = np.log10(np.where(known, values, 1.0))
    low, high = (float(logs[known].min()), float(logs[known].max())) if known.any() else (0.0, 0.0)
    count = min(LOG_STEPS, math.ceil(COARSE * (high - low)) or 1) if coarse else LOG_STEPS
    places = np.rint((logs - low) / ((high - low) or 1.0) * count) + 2
    codes = np.where(known, places, np.where(values == 0, 1, 0))
    return codes.astype(np.uint8), {"low": low, "high": high, "steps": count}


def to_lin8(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Numbers as one byte each, and the smallest and the largest of each line: of the last axis."""
    known = np.isfinite(values)
    low = np.min(values, axis=-1, keepdims=True, where=known, initial=np.inf)
    high = np.max(values, axis=-1, keepdims=True, where=known, initial=-np.inf)
    ends = np.where(known.any(axis=-1, keepdims=True), np.concatenate([low, high], axis=-1), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        wide = np.where(ends[..., 1:] > ends[..., :1], ends[..., 1:] - ends[..., :1], 1.0)
        places = np.rint((values - ends[..., :1]) / wide * STEPS) + 1
    return np.where(known, np.nan_to_num(places), 0).astype(np.uint8), ends
