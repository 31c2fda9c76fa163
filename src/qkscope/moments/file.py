"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

Bucket sums are float64, exactly as summed. Group sums are float32: they only serve error bars, where seven
digits are plenty, and this keeps a 3B model's file under a gigabyte. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import MomentsFileError
from qkscope.files import replacing
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout
from qkscope.moments.second import Kind, SecondMoments

if TYPE_CHECKING:
    from qkscope.moments.moments import LayerMoments, Moments

SCHEMA = 1
MAX_HEADER = 64 * 1024 * 1024  # bytes; a 1000-layer model's header is far below
COUNTS, SUMS = ("n", "u", "uu"), ("x", "xu", "xx")

Arrays = dict[str, NDArray[Any]]


def save_moments(moments: Moments, path: Path | str) -> str:
    """Write `moments` to a temporary name, make it durable, then rename it; returns the checksum."""
    from safetensors.numpy import save_file

    path = Path(path)
    arrays = dict(_arrays(moments))
    about = json.dumps(_about(moments), sort_keys=True, ensure_ascii=False)
    checksum = _checksum(about, arrays)
    metadata = {"format": "qkscope-moments", "schema": str(SCHEMA), "about": about, "sha256": checksum}
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata=metadata)
    return checksum


def load_moments(path: Path | str) -> Moments:
    """Read a moments file; every way in which it can be wrong is a MomentsFileError that names the file."""
    path = Path(path)
    try:
        about, arrays = _read(path)
        return _assemble(about, arrays)
    except MomentsFileError as error:
        raise error.within(str(path)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise MomentsFileError(f"{path}: its contents do not fit its header ({error}); capture it again") from error


def read_provenance(path: Path | str) -> dict[str, Any]:
    """Only the provenance of a moments file, without reading its sums (and without checking them)."""
    path = Path(path)
    metadata = _metadata(path)
    provenance: dict[str, Any] = _parse(metadata["about"])["provenance"]
    return provenance


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


def _assemble(about: Mapping[str, Any], arrays: Arrays) -> Moments:
    from qkscope.moments.moments import LayerMoments, Moments

    stored = about["layout"]
    layout = Layout(
        edges=tuple(int(edge) for edge in stored["edges"]),
        groups=int(stored["groups"]),
        skip_positions=int(stored["skip_positions"]),
        rate=float(stored["rate"]),
        seed=int(stored["seed"]),
    )
    facts = [LayerFacts(**layer) for layer in about["layers"]]
    layers: dict[int, LayerMoments] = {}
    for each in facts:
        buckets: dict[Kind, SecondMoments] = {}
        groups: dict[Kind, SecondMoments] = {}
        heads: tuple[tuple[Kind, int], ...] = (("q", each.q_heads), ("k", each.kv_heads))
        for kind, count in heads:
            buckets[kind] = _second(arrays, each, kind, "buckets", (count, layout.buckets))
            groups[kind] = _second(arrays, each, kind, "groups", (count, layout.groups))
        layers[each.layer] = LayerMoments(buckets, groups)
    return Moments.from_layers(layout, facts, layers, about["provenance"])


def _second(arrays: Arrays, facts: LayerFacts, kind: str, cells: str, shape: tuple[int, int]) -> SecondMoments:
    width = facts.head_dim
    expected = {"x": (*shape, width), "xu": (*shape, width), "xx": (*shape, width * (width + 1) // 2)}
    parts = []
    for name in COUNTS + SUMS:
        array = arrays[f"{facts.layer}.{kind}.{cells}.{name}"]
        if array.shape != expected.get(name, shape):
            raise ValueError(f"{facts.layer}.{kind}.{cells}.{name} has shape {array.shape}")
        parts.append(array.astype(np.float64, copy=False))
    return SecondMoments(arrays[f"{facts.layer}.{kind}.pivot"], *parts)


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    from safetensors import SafetensorError, safe_open

    metadata = _metadata(path)
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise MomentsFileError(f"cannot be read ({error}); it is truncated or damaged: capture it again") from None
    if _checksum(metadata["about"], arrays) != metadata["sha256"]:
        raise MomentsFileError("its checksum does not match its contents; it is damaged: capture it again")
    return _parse(metadata["about"]), arrays


def _metadata(path: Path) -> dict[str, str]:
    """The header's strings, after bounding what a damaged header may make us allocate."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise MomentsFileError("there is no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > min(size - 8, MAX_HEADER):
        raise MomentsFileError("not a safetensors file, or truncated: capture it again")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise MomentsFileError(f"cannot be read ({error}); it is truncated or damaged: capture it again") from None
    if metadata.get("format") != "qkscope-moments":
        raise MomentsFileError("is not a qkscope moments file")
    if metadata.get("schema") != str(SCHEMA):
        raise MomentsFileError(
            f"has moments schema {metadata.get('schema')!r}, this qkscope reads schema {SCHEMA}: capture it again, "
            "or use the qkscope version that wrote it"
        )
    if not {"about", "sha256"} <= metadata.keys():
        raise MomentsFileError("its header is incomplete: capture it again")
    return metadata


def _parse(about: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(about)
    except ValueError as error:
        raise MomentsFileError(f"its header is damaged ({error}): capture it again") from None
    return parsed


def _checksum(about: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()
