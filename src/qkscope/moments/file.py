"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

Bucket sums are float64, exactly as summed. What serves errors alone is float16, as differences from a group's share,
where three digits are plenty: this keeps a 3B model's file below 1.2 GB. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read. Files of schema 1, which have groups over the whole
context only and nothing from before rotation, and of schema 2, which have no sketches, are read as far as they go.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.files import as_path, replacing
from qkscope.moments.header import DAMAGED, FORMAT, MAX_ABOUT, Header, arrays_of, read_header
from qkscope.moments.header import SCHEMA as SCHEMA
from qkscope.moments.held import KindMoments, LayerMoments
from qkscope.moments.packing import read, read_schema_1, written
from qkscope.moments.second import Kind

if TYPE_CHECKING:
    from qkscope.moments.moments import Moments

THREADS = 8  # that turn sums into what is written
LARGEST = 1e120  # the squares of float32's largest numbers, summed over more tokens than there are, are below
SLACK = 1e-6  # rounding of a sum of positions

Arrays = dict[str, NDArray[Any]]


def save_moments(moments: Moments, path: Path | str) -> str:
    """Write `moments` to a temporary name, make it durable, then rename it; returns the checksum."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = as_path(path, "the file to save moments in")
    arrays = dict(_arrays(moments))
    about = json.dumps(_about(moments), sort_keys=True, ensure_ascii=False)
    if len(about) > MAX_ABOUT:
        raise MomentsFileError(f"{path}: its provenance is larger than {MAX_ABOUT // 2**20} MiB; keep it elsewhere")
    checksum = _checksum(about, arrays)
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "about": about, "sha256": checksum}
    with replacing(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=metadata)
        except SafetensorError as error:  # its own wrapping of what the system said
            raise _system_error(error) from error
    return checksum


def _system_error(error: Exception) -> OSError:
    """The OSError inside safetensors' error, by the number in its text."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error))


def load_moments(path: Path | str) -> Moments:
    """Read a moments file; every way in which it can be wrong is a MomentsFileError that names the file."""
    path = as_path(path, "a moments file")
    try:
        header = read_header(path)
        return _assemble(header, _read(path, header))
    except MomentsFileError as error:
        raise error.within(str(path)) from None


def as_stored(moments: Moments) -> Moments:
    """The same moments as their file would give them back: what serves errors alone is rounded."""
    from qkscope.moments.moments import Moments

    layers: dict[int, LayerMoments] = {
        layer: {kind: read(written(held), moments.layout) for kind, held in moments.layer_moments(layer).items()}
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
        for (where, _), arrays in zip(parts, threads.map(lambda part: written(part[1]), parts), strict=True):
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
            of_kinds[kind] = read_schema_1(own, header.layout) if header.schema == 1 else read(own, header.layout)
            _require_possible(where, of_kinds[kind])
        layers[facts.layer] = of_kinds
    documents = arrays.get("documents")
    if documents is not None and not ((documents >= 0) & (documents <= 2**53)).all():
        raise MomentsFileError(f"documents holds values that are not numbers of documents; {DAMAGED}")
    return Moments.from_layers(header.layout, header.layers, layers, header.provenance, documents)


def _require_possible(where: str, held: KindMoments) -> None:
    """Refuse sums that no tokens can have: counts that are none, values that are not numbers."""
    of = held.buckets
    for name, values in (("pivot", of.pivot), ("x", of.x), ("xu", of.xu), ("xx", of.xx)):
        if not (np.abs(values) <= LARGEST).all():
            raise MomentsFileError(f"{where}: {name} holds values that are not sums; {DAMAGED}")
    rest = () if held.unrotated is None else (held.unrotated.pivot, held.unrotated.n, held.unrotated.x)
    # What is float32 or float16 may have overflowed, which only errors suffer from.
    sketch = () if held.sketch is None else (held.sketch.directions, held.sketch.y, held.sketch.power)
    for array in (held.groups, held.crossed.x, held.crossed.xu, *rest, *sketch):
        if np.isnan(array).any():
            raise MomentsFileError(f"{where} holds values that are not numbers; {DAMAGED}")
    for counts in (of, held.crossed):
        n, u, uu = counts.n, counts.u, counts.uu
        counts_fit = (n >= 0) & (n == np.floor(n)) & (n <= 2**53)
        # Scaled positions are in [0, 1): their sums and squares stay below the count, up to rounding.
        positions_fit = (uu >= 0) & (uu <= u * (1 + SLACK)) & (u <= n * (1 + SLACK))
        if not (counts_fit & positions_fit).all():
            raise MomentsFileError(f"{where} has counts that no tokens can have; {DAMAGED}")
    if not np.array_equal(of.n.sum(axis=1), held.crossed.n.sum(axis=(1, 2))):
        raise MomentsFileError(f"{where}: buckets and groups count different tokens; {DAMAGED}")


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
