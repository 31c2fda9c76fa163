"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

Bucket sums are float64, exactly as summed. Group sums are float32: they only serve error bars, where seven
digits are plenty, and this keeps a 3B model's file under a gigabyte. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.files import as_path, replacing
from qkscope.moments.header import (
    COUNTS,
    DAMAGED,
    FORMAT,
    MAX_ABOUT,
    SUMS,
    Header,
    expected_arrays,
    read_header,
)
from qkscope.moments.header import SCHEMA as SCHEMA
from qkscope.moments.second import Kind, SecondMoments

if TYPE_CHECKING:
    from qkscope.moments.moments import LayerMoments, Moments

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
    for layer in moments.layers:
        sums = moments.layer_moments(layer)
        for kind in ("q", "k"):
            yield f"{layer}.{kind}.pivot", sums.buckets[kind].pivot
            for cells, of, dtype in (
                ("buckets", sums.buckets, np.float64),
                ("groups", sums.groups, np.float32),
            ):
                about_pivot = of[kind].translated(sums.buckets[kind].pivot)
                for name in COUNTS:
                    yield f"{layer}.{kind}.{cells}.{name}", np.ascontiguousarray(getattr(about_pivot, name))
                for name in SUMS:
                    yield (
                        f"{layer}.{kind}.{cells}.{name}",
                        np.ascontiguousarray(getattr(about_pivot, name), dtype),
                    )


def _assemble(header: Header, arrays: Arrays) -> Moments:
    from qkscope.moments.moments import LayerMoments, Moments

    layers: dict[int, LayerMoments] = {}
    for facts in header.layers:
        buckets: dict[Kind, SecondMoments] = {}
        groups: dict[Kind, SecondMoments] = {}
        kinds: tuple[Kind, Kind] = ("q", "k")
        for kind in kinds:
            where = f"{facts.layer}.{kind}"
            buckets[kind] = _second(arrays, where, "buckets")
            groups[kind] = _second(arrays, where, "groups")
            _require_possible(where, buckets[kind], groups[kind])
        layers[facts.layer] = LayerMoments(buckets, groups)
    return Moments.from_layers(header.layout, header.layers, layers, header.provenance)


def _second(arrays: Arrays, where: str, cells: str) -> SecondMoments:
    parts = [arrays[f"{where}.{cells}.{name}"].astype(np.float64, copy=False) for name in COUNTS + SUMS]
    return SecondMoments(arrays[f"{where}.pivot"], *parts)


def _require_possible(where: str, buckets: SecondMoments, groups: SecondMoments) -> None:
    """Refuse sums that no tokens can have: counts that are none, values that are not numbers."""
    for cells, of in (("buckets", buckets), ("groups", groups)):
        for name in COUNTS + SUMS:
            values = getattr(of, name)
            # Group sums are float32 and may have overflowed, which only error bars suffer from.
            wrong = np.isnan(values) if cells == "groups" and name in SUMS else ~(np.abs(values) <= LARGEST)
            if wrong.any():
                raise MomentsFileError(f"{where}.{cells}.{name} holds values that are no sums; {DAMAGED}")
        counts_fit = (of.n >= 0) & (of.n == np.floor(of.n)) & (of.n <= 2**53)
        # Scaled positions are in [0, 1): their sums and squares stay below the count, up to rounding.
        positions_fit = (of.uu >= 0) & (of.uu <= of.u * (1 + SLACK)) & (of.u <= of.n * (1 + SLACK))
        if not (counts_fit & positions_fit).all():
            raise MomentsFileError(f"{where}.{cells} has counts that no tokens can have; {DAMAGED}")
    if not (np.abs(buckets.pivot) <= LARGEST).all():
        raise MomentsFileError(f"{where}.pivot holds values that are no means; {DAMAGED}")
    if not np.array_equal(buckets.n.sum(axis=1), groups.n.sum(axis=1)):
        raise MomentsFileError(f"{where}: buckets and groups count different tokens; {DAMAGED}")


def _read(path: Path, header: Header) -> Arrays:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise MomentsFileError(f"cannot be read ({error}); {DAMAGED}") from None
    expected = dict(expected_arrays(header.layout, header.layers))
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
