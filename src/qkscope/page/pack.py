"""Arrays as one compressed text: bytes of equal significance together, zlib, base64.

Grouping bytes (all first bytes of an array, then all second bytes, ...) lets zlib find what correlations have in
common: sign and exponent. The browser undoes it with DecompressionStream, so the page carries no decoder.
"""

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# How arrays are called in the page; all little-endian, as every browser's typed arrays are.
TYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "uint8": "u1"}


@dataclass
class Pack:
    """Named arrays and texts on their way into the page."""

    _parts: list[bytes] = field(default_factory=list)
    index: dict[str, dict[str, Any]] = field(default_factory=dict)  # name: type, shape, first byte

    def add(self, name: str, values: npt.NDArray[Any], kind: str) -> None:
        """Add an array under a name that is not taken yet."""
        plain = np.ascontiguousarray(values, dtype=np.dtype(TYPES[kind]))
        grouped = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
        self._append(name, {"type": kind, "shape": list(plain.shape)}, grouped.tobytes())

    def add_text(self, name: str, text: str) -> None:
        """Add a text."""
        data = text.encode("utf-8")
        self._append(name, {"type": "text", "shape": [len(data)]}, data)

    def _append(self, name: str, entry: dict[str, Any], data: bytes) -> None:
        if name in self.index:
            raise ValueError(f"the page has {name!r} twice")
        self.index[name] = {**entry, "first": sum(map(len, self._parts))}
        self._parts.append(data)

    def text(self) -> str:
        """Everything, compressed, in letters that mean nothing to HTML."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 7)).decode("ascii")


def unpack(text: str, index: dict[str, dict[str, Any]], name: str) -> npt.NDArray[Any] | str:
    """What `Pack` was given under this name; the browser does the same."""
    data = zlib.decompress(base64.b64decode(text))
    entry = index[name]
    count = int(np.prod(entry["shape"]))
    if entry["type"] == "text":
        return data[entry["first"] : entry["first"] + count].decode("utf-8")
    kind = np.dtype(TYPES[entry["type"]])
    raw = np.frombuffer(data, np.uint8, count * kind.itemsize, entry["first"])
    return np.ascontiguousarray(raw.reshape(kind.itemsize, count).T).view(kind).reshape(entry["shape"])
