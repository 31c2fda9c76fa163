"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

Bucket sums are float64, exactly as summed. What serves errors alone is float16, as differences from a group's share,
where three digits are plenty: this keeps a 3B model's file below 1.2 GB. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read. Files of 0.2, which have no sketches, are read, too.

`PreRopeFile` reads only the sums before rotation, layer by layer: a few hundredths of a file's bytes, for analyses that
need several checkpoints at once. The header is checked as ever; the checksum, which needs the whole file, is not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from qkscope.errors import MomentsFileError
from qkscope.files import as_path, replacing
from qkscope.moments.attention_rows import AttentionSums
from qkscope.moments.header import COUNTS, DAMAGED, FORMAT, MAX_ABOUT, ROWS, SCHEMA, read_header
from qkscope.moments.host_sums import LayerMoments, Unrotated
from qkscope.moments.packing import (
    UNROTATED,
    Arrays,
    pack,
    require_documents,
    require_possible,
    require_rows,
    require_unrotated,
    unpack,
    unpack_unrotated,
)
from qkscope.moments.second_moments import KINDS, Array, Kind

if TYPE_CHECKING:
    from qkscope.moments.moments import Moments

THREADS = 8  # that turn sums into what is written

# Array types in the order of a file: as numpy names them, and as safetensors does.
DTYPES, NAMES = ("<i8", "<f8", "<f4", "<f2"), ("I64", "F64", "F32", "F16")


def save_moments(moments: Moments, path: Path | str) -> str:
    """Write `moments` to a temporary name, make it durable, then rename it; returns the checksum."""
    path = as_path(path, "the file to save moments in")
    arrays: Arrays = {"documents": moments.documents}
    parts = {f"{layer}.{kind}": sums for layer in moments.layers for kind, sums in moments.layer_moments(layer).items()}
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        for where, packed in zip(parts, threads.map(pack, parts.values()), strict=True):
            arrays |= {f"{where}.{name}": array for name, array in packed.items()}
    if moments.layout.rows:
        for layer, facts in moments.layers.items():
            rows = moments.attention(layer) or AttentionSums.zeros(moments.layout, facts.q_heads)
            arrays |= {f"{layer}.{ROWS}.{name}": array for name, array in vars(rows).items()}
    layout, layers = asdict(moments.layout), [facts.to_json() for facts in moments.layers.values()]
    described = {"layout": layout, "layers": layers, "provenance": moments.provenance}
    about = json.dumps(described, sort_keys=True, ensure_ascii=False)
    if len(about) > MAX_ABOUT:
        raise MomentsFileError(f"{path}: its provenance is larger than {MAX_ABOUT // 2**20} MiB; keep it elsewhere")
    checksum = _checksum(about, arrays)
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "about": about, "sha256": checksum}
    with replacing(path) as temporary, temporary.open("r+b") as file:
        _serialize(file, arrays, metadata)
    return checksum


def _serialize(file: BinaryIO, arrays: Arrays, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file into the open file, array by array.

    Its own library renames a private temporary file instead, which is neither ours to lock nor readable by others.
    """
    order = sorted(arrays, key=lambda name: (DTYPES.index(arrays[name].dtype.str), name))  # as the library orders them
    listed: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        array, start = arrays[name], end
        end += array.nbytes
        listed[name] = {
            "dtype": NAMES[DTYPES.index(array.dtype.str)],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in order:
        if arrays[name].size:
            file.write(np.ascontiguousarray(arrays[name]).data)


def load_moments(path: Path | str) -> Moments:
    """Read a moments file; every way in which it can be wrong is a MomentsFileError that names the file."""
    from qkscope.moments.moments import Moments

    path = as_path(path, "a moments file")
    try:
        header = read_header(path)
        arrays = _read_arrays(path, lambda name: True)
        if _checksum(header.about, arrays) != header.checksum:
            raise MomentsFileError("its checksum does not match its contents; it is damaged: capture it again")
        parts, layers = _by_kind(arrays), dict[int, LayerMoments]()
        for layer in (facts.layer for facts in header.layers):
            layers[layer] = {kind: unpack(parts[f"{layer}.{kind}"], header.layout) for kind in KINDS}
            for kind, sums in layers[layer].items():
                require_possible(f"{layer}.{kind}", sums)
        require_documents(arrays["documents"], layers[min(layers)]["q"])
        attention = {layer: AttentionSums(**parts[f"{layer}.{ROWS}"]) for layer in layers if header.layout.rows}
        for layer, rows in attention.items():
            require_rows(f"{layer}.{ROWS}", rows)
    except MomentsFileError as error:
        raise error.within(str(path)) from None
    return Moments.from_layers(header.layout, header.layers, layers, header.provenance, arrays["documents"], attention)


def round_as_stored(moments: Moments) -> Moments:
    """The same moments as their file would give them back: what serves errors alone is rounded."""
    from qkscope.moments.moments import Moments

    layers: dict[int, LayerMoments] = {
        layer: {kind: unpack(pack(sums), moments.layout) for kind, sums in moments.layer_moments(layer).items()}
        for layer in moments.layers
    }
    return Moments.from_layers(
        moments.layout, moments.layers.values(), layers, moments.provenance, moments.documents, moments.all_attention()
    )


def read_provenance(path: Path | str) -> dict[str, Any]:
    """Only the provenance of a moments file, without reading its sums (and without checking them)."""
    return read_header(Path(path)).provenance


def _read_arrays(path: Path, wanted: Callable[[str], bool]) -> Arrays:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise MomentsFileError(f"cannot be read ({error}); {DAMAGED}") from None


def _by_kind(arrays: Arrays) -> dict[str, Arrays]:
    """The arrays of each layer's queries and keys ("0.q", "0.k", …), by their names inside them."""
    parts: dict[str, Arrays] = defaultdict(dict)
    for name, array in arrays.items():
        layer, _, rest = name.partition(".")
        kind, _, inside = rest.partition(".")
        parts[f"{layer}.{kind}"][inside] = array
    return parts


def _checksum(about: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(about.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


@dataclass(frozen=True)
class PreRopeLayer:
    """One layer's sums before rotation (None where they were not summed), and its number of tokens."""

    unrotated: Mapping[Kind, Unrotated | None]
    n: Mapping[Kind, Array]  # (heads, buckets, groups), of all tokens


class PreRopeFile:
    """A moments file of which only the sums before rotation are read, one layer at a time."""

    def __init__(self, path: Path) -> None:
        try:
            header = read_header(path)
        except MomentsFileError as error:
            raise error.within(str(path)) from None
        self.path, self.layout, self.provenance = path, header.layout, header.provenance
        self.layers = {facts.layer: facts for facts in header.layers}

    def layer(self, layer: int) -> PreRopeLayer:
        """One layer's sums; MomentsFileError where they cannot be read."""
        prefixes = tuple(f"{layer}.{kind}.{part}" for kind in KINDS for part in ("counts", UNROTATED))
        unrotated: dict[Kind, Unrotated | None] = dict.fromkeys(KINDS)
        n: dict[Kind, Array] = {}
        try:
            parts = _by_kind(_read_arrays(self.path, lambda name: name.startswith(prefixes)))
            for kind in KINDS:
                where, arrays = f"{layer}.{kind}", parts[f"{layer}.{kind}"]
                if "counts" not in arrays or any(np.isnan(array).any() for array in arrays.values()):
                    raise MomentsFileError(f"{where} holds values that are not numbers; {DAMAGED}")
                n[kind] = arrays["counts"][:, COUNTS.index("n")]
                if f"{UNROTATED}pivot" in arrays:
                    unrotated[kind] = known = unpack_unrotated(arrays, self.layout)
                    try:
                        require_unrotated(known, n[kind])
                    except ValueError as error:
                        raise MomentsFileError(f"{where}: {error}; {DAMAGED}") from None
        except MomentsFileError as error:
            raise error.within(str(self.path)) from None
        return PreRopeLayer(unrotated, n)
