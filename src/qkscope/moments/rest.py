"""Of a moments file only what was summed before rotation, layer by layer: a few hundredths of its bytes.

Whoever wants several checkpoints at once reads these. The header is checked as ever; the checksum, which needs the
whole file, is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.header import COUNTS, DAMAGED, Header, read_header
from qkscope.moments.held import Unrotated
from qkscope.moments.packing import UNROTATED, read_unrotated
from qkscope.moments.second import Array, Kind
from qkscope.moments.validate import require_unrotated

KINDS: tuple[Kind, Kind] = ("q", "k")


@dataclass(frozen=True)
class RestLayer:
    """One layer before rotation, and how many tokens it has where; None where that was not summed."""

    unrotated: Mapping[Kind, Unrotated | None]
    n: Mapping[Kind, Array]  # (heads, buckets, groups), of all tokens


class RestFile:
    """A moments file of which only the vectors before rotation are read, when they are asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._header: Header = read_header(path)
        except MomentsFileError as error:
            raise error.within(str(path)) from None
        self.path, self.layout, self.provenance = path, self._header.layout, self._header.provenance
        self.layers: dict[int, LayerFacts] = {facts.layer: facts for facts in self._header.layers}

    def layer(self, layer: int) -> RestLayer:
        """One layer's sums; MomentsFileError where they cannot be read."""
        if self._header.schema == 1:  # which tells groups apart over the whole context only, and sums nothing at rest
            return RestLayer(dict.fromkeys(KINDS), {})
        arrays = self._arrays(layer)
        unrotated: dict[Kind, Unrotated | None] = {}
        for kind in KINDS:
            there = f"{UNROTATED}pivot" in arrays[kind]
            unrotated[kind] = read_unrotated(arrays[kind]) if there else None
        n = {kind: arrays[kind]["counts"][:, COUNTS.index("n")] for kind in KINDS}
        for kind, of in unrotated.items():
            try:
                if of is not None:
                    require_unrotated(of, n[kind])
            except ValueError as error:
                raise MomentsFileError(f"{self.path}: {layer}.{kind}: {error}; {DAMAGED}") from None
        return RestLayer(unrotated, n)

    def _arrays(self, layer: int) -> dict[Kind, dict[str, NDArray[Any]]]:
        from safetensors import SafetensorError, safe_open

        by_kind: dict[Kind, dict[str, NDArray[Any]]] = {"q": {}, "k": {}}
        try:
            with safe_open(self.path, framework="numpy") as file:
                names = set(file.keys())
                for kind, arrays in by_kind.items():
                    prefix = f"{layer}.{kind}."
                    wanted = [n for n in names if n.startswith(f"{prefix}{UNROTATED}") or n == f"{prefix}counts"]
                    arrays.update({name.removeprefix(prefix): file.get_tensor(name) for name in wanted})
        except (SafetensorError, OSError, ValueError) as error:
            raise MomentsFileError(f"{self.path}: cannot be read ({error}); {DAMAGED}") from None
        for kind, arrays in by_kind.items():
            if "counts" not in arrays or any(np.isnan(array).any() for array in arrays.values()):
                raise MomentsFileError(f"{self.path}: {layer}.{kind} holds values that are not numbers; {DAMAGED}")
        return by_kind
