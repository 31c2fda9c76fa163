"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

Bucket sums are float64, exactly as summed. What serves errors alone is float16, as differences from a group's share,
where three digits are plenty: this keeps a 3B model's file below 1.2 GB. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read. Files of schema 1, which have groups over the whole
context only and nothing from before rotation, and of schema 2, which have no sketches, are read as far as they go.

`RestFile` reads only what was summed before rotation, layer by layer: a few hundredths of a file's bytes, for whoever
wants several checkpoints at once. The header is checked as ever; the checksum, which needs the whole file, is not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.files import as_path, replacing
from qkscope.layers import LayerFacts
from qkscope.moments.header import COUNTS, DAMAGED, FORMAT, MAX_ABOUT, Header, arrays_of, read_header
from qkscope.moments.header import SCHEMA as SCHEMA
from qkscope.moments.host_sums import KindMoments, LayerMoments, Unrotated
from qkscope.moments.packing import UNROTATED, pack, unpack, unpack_schema_1, unpack_unrotated
from qkscope.moments.second_moments import Array, Kind
from qkscope.moments.validate import require_documents, require_possible, require_unrotated

if TYPE_CHECKING:
    from qkscope.moments.moments import Moments

THREADS = 8  # that turn sums into what is written

# What arrays are made of, in the order of a file: as numpy names it, and as safetensors does.
DTYPES, NAMES = ("<i8", "<f8", "<f4", "<f2"), ("I64", "F64", "F32", "F16")

Arrays = dict[str, NDArray[Any]]


def save_moments(moments: Moments, path: Path | str) -> str:
    """Write `moments` to a temporary name, make it durable, then rename it; returns the checksum."""
    path = as_path(path, "the file to save moments in")
    arrays = dict(_arrays(moments))
    about = json.dumps(_about(moments), sort_keys=True, ensure_ascii=False)
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
    path = as_path(path, "a moments file")
    try:
        header = read_header(path)
        return _assemble(header, _read(path, header))
    except MomentsFileError as error:
        raise error.within(str(path)) from None


def round_as_stored(moments: Moments) -> Moments:
    """The same moments as their file would give them back: what serves errors alone is rounded."""
    from qkscope.moments.moments import Moments

    layers: dict[int, LayerMoments] = {
        layer: {kind: unpack(pack(held), moments.layout) for kind, held in moments.layer_moments(layer).items()}
        for layer in moments.layers
    }
    return Moments.from_layers(moments.layout, moments.layers.values(), layers, moments.provenance, moments.documents)


def read_provenance(path: Path | str) -> dict[str, Any]:
    """Only the provenance of a moments file, without reading its sums (and without checking them)."""
    return read_header(Path(path)).provenance


def _about(moments: Moments) -> dict[str, Any]:
    return {
        "layout": asdict(moments.layout),
        "layers": [facts.to_json() for facts in moments.layers.values()],
        "provenance": moments.provenance,
    }


def _arrays(moments: Moments) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "documents", moments.documents
    parts = [
        (f"{layer}.{kind}", held) for layer in moments.layers for kind, held in moments.layer_moments(layer).items()
    ]
    if not all(held.is_crossed for _, held in parts):
        raise MomentsFileError("moments of schema 1 cannot be written again; keep their file, or capture them again")
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        for (where, _), arrays in zip(parts, threads.map(lambda part: pack(part[1]), parts), strict=True):
            for name, array in arrays.items():
                yield f"{where}.{name}", array


def _assemble(header: Header, arrays: Arrays) -> Moments:
    from qkscope.moments.moments import KINDS, Moments

    layers: dict[int, LayerMoments] = {}
    for facts in header.layers:
        of_kinds: dict[Kind, KindMoments] = {}
        for kind in KINDS:
            where = f"{facts.layer}.{kind}"
            own = {name.removeprefix(f"{where}."): arrays[name] for name in arrays if name.startswith(f"{where}.")}
            of_kinds[kind] = unpack_schema_1(own, header.layout) if header.schema == 1 else unpack(own, header.layout)
            require_possible(where, of_kinds[kind], header.layout)
        layers[facts.layer] = of_kinds
    documents = arrays.get("documents")
    if documents is not None:
        require_documents(documents, layers[min(layers)]["q"])
    return Moments.from_layers(header.layout, header.layers, layers, header.provenance, documents)


def _read(path: Path, header: Header) -> Arrays:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise MomentsFileError(f"cannot be read ({error}); {DAMAGED}") from None
    expected = dict(arrays_of(header))
    if {name: array.shape for name, array in arrays.items()} != {name: shape for name, (_, shape) in expected.items()}:
        raise MomentsFileError(f"changed while it was read; {DAMAGED}")
    if _checksum(header.about, arrays) != header.checksum:
        raise MomentsFileError("its checksum does not match its contents; it is damaged: capture it again")
    return arrays


def _checksum(about: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(about.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


KINDS: tuple[Kind, Kind] = ("q", "k")


@dataclass(frozen=True)
class PreRopeLayer:
    """One layer before rotation, and how many tokens it has where; None where that was not summed."""

    unrotated: Mapping[Kind, Unrotated | None]
    n: Mapping[Kind, Array]  # (heads, buckets, groups), of all tokens


class PreRopeFile:
    """A moments file of which only the vectors before rotation are read, when they are asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._header: Header = read_header(path)
        except MomentsFileError as error:
            raise error.within(str(path)) from None
        self.path, self.layout, self.provenance = path, self._header.layout, self._header.provenance
        self.layers: dict[int, LayerFacts] = {facts.layer: facts for facts in self._header.layers}

    def layer(self, layer: int) -> PreRopeLayer:
        """One layer's sums; MomentsFileError where they cannot be read."""
        if self._header.schema == 1:  # which tells groups apart over the whole context only, and sums nothing at rest
            return PreRopeLayer(dict.fromkeys(KINDS), {})
        arrays = self._arrays(layer)
        unrotated: dict[Kind, Unrotated | None] = {}
        for kind in KINDS:
            there = f"{UNROTATED}pivot" in arrays[kind]
            unrotated[kind] = unpack_unrotated(arrays[kind]) if there else None
        n = {kind: arrays[kind]["counts"][:, COUNTS.index("n")] for kind in KINDS}
        for kind, of in unrotated.items():
            try:
                if of is not None:
                    require_unrotated(of, n[kind])
            except ValueError as error:
                raise MomentsFileError(f"{self.path}: {layer}.{kind}: {error}; {DAMAGED}") from None
        return PreRopeLayer(unrotated, n)

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
