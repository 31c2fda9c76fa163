"""The header of a moments file, read and checked before a single sum is allocated.

A header is JSON that anyone can write. So its size is bounded before it is read, its JSON is parsed strictly (no key
twice, no bottomless nesting), and the arrays it lists must be exactly those, of the types, shapes and places in the
file, that the layout and the layers it claims stand for. Only then is anything of the claimed size allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.errors import MomentsFileError
from qkscope.foreign import Unreadable, opened, parse_json
from qkscope.layers import MAX_LAYERS, LayerFacts, require_integer
from qkscope.moments.attention_rows import AttentionSums
from qkscope.moments.layout import Layout, can_unrotate, heads_by_kind, sketch_blocks

SCHEMA = 3
READABLE = ("2", "3")  # 2 is that of 0.2: groups have no sketches
FORMAT = "qkscope-moments"
MAX_FILE = 64 * 2**40  # bytes; 400 layers of 128 heads of width 512 have 2 TB
MAX_HEADER = 16 * 1024 * 1024  # bytes; a 1000-layer model's header has 4 MB
MAX_ABOUT = 8 * 1024 * 1024  # characters of what it says of itself, of which provenance is the most
COUNTS = ("n", "u", "uu")
ROWS = "rows"  # in front of the names of what is summed of sampled rows
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "I64": 8}
DAMAGED = "it is truncated or damaged: capture it again"

ArrayShapes = dict[str, tuple[str, tuple[int, ...]]]  # by name: type and shape


@dataclass(frozen=True)
class Header:
    """What a moments file claims to hold, checked to be possible and to fit the file."""

    layout: Layout
    layers: tuple[LayerFacts, ...]
    provenance: dict[str, Any]
    about: str  # as written: it enters the checksum
    checksum: str


def read_header(path: Path) -> Header:
    """The header of a moments file; MomentsFileError where it is damaged, foreign, or claims what cannot be."""
    try:
        with opened(path, MAX_FILE, follow=True) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise MomentsFileError("not a safetensors file, or truncated: capture it again")
            raw = file.read(length)
    except Unreadable as error:
        raise MomentsFileError(str(error)) from None
    except OSError as error:
        raise MomentsFileError(f"cannot be read ({error.strerror or error})") from None
    try:
        listed = parse_json(raw)
        metadata = _metadata(listed)
        about = parse_json(metadata["about"])
    except Unreadable as error:
        raise MomentsFileError(f"its header is damaged ({error}): capture it again") from None
    try:
        header = _header(about, metadata)
        layout = header.layout
        arrays: ArrayShapes = {"documents": ("I64", (layout.groups, layout.buckets))}
        for facts in header.layers:
            arrays |= layer_arrays(layout, facts, can_unrotate(layout, facts))
        _require_arrays(listed, arrays, size - 8 - length)
    except ValueError as error:
        raise MomentsFileError(f"its contents do not fit its header ({error}); {DAMAGED}") from None
    return header


def layer_arrays(layout: Layout, facts: LayerFacts, unrotated: bool) -> ArrayShapes:
    """Name, type and shape of every array that a layer's sums are written as; `unrotated`: before rotation, too.

    Float64 is what tables are made from. What serves errors alone is float16: differences from what a group's share of
    the tokens would have, each in units of its scale.
    """
    arrays: ArrayShapes = {}
    width, cells, of_kinds = facts.head_dim, (layout.buckets, layout.groups), heads_by_kind(facts)
    packed, sketched, spans = width * (width + 1) // 2, len(layout.sketch_spans), len(layout.spans)
    size, blocks = sketch_blocks(layout, of_kinds, width)
    for kind, heads in of_kinds.items():
        groups = heads, layout.groups
        of: ArrayShapes = {"pivot": ("F64", (heads, width)), "counts": ("F64", (heads, len(COUNTS), *cells))}
        of |= {
            f"buckets.{name}": ("F64", (heads, layout.buckets, n))
            for name, n in (("x", width), ("xu", width), ("xx", packed))
        }
        rounded = {"crossed.x": (heads, *cells, width), "crossed.xu": (heads, *cells, width)}
        rounded["groups.xx"] = *groups, spans, packed
        if sketched:
            count = size * blocks[kind]
            of |= {"sketch.directions": ("F32", (heads, width, count)), "sketch.power": ("F32", (*groups, sketched))}
            rounded["sketch.y"] = *groups, sketched, count, width
        if unrotated:
            of |= {"unrotated.pivot": ("F64", (heads, width)), "unrotated.n": ("F64", cells)}
            of |= {"unrotated.x": ("F32", (heads, layout.buckets, width)), "unrotated.xx": ("F32", (heads, packed))}
            rounded["unrotated.crossed.x"] = heads, *cells, width
        if unrotated and (count := min(layout.unrotated_sketched, width)):
            of["unrotated.sketch.directions"] = "F32", (heads, width, count)
            of["unrotated.sketch.power"] = "F32", (*groups, spans)
            rounded["unrotated.sketch.y"] = *groups, spans, count, width
        for name, shape in rounded.items():
            of |= {name: ("F16", shape), f"{name}.scale": ("F32", shape[:-1])}
        arrays |= {f"{facts.layer}.{kind}.{name}": each for name, each in of.items()}
    if layout.rows:
        arrays |= {f"{facts.layer}.{ROWS}.{name}": each for name, each in attention_arrays(layout, facts).items()}
    return arrays


def attention_arrays(layout: Layout, facts: LayerFacts) -> ArrayShapes:
    """Name, type and shape of what is summed of a layer's sampled rows."""
    empty = AttentionSums.zeros(layout, facts.q_heads)
    of = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32"}
    return {name: (of[array.dtype], array.shape) for name, array in vars(empty).items()}


def _metadata(listed: Mapping[str, Any]) -> dict[str, str]:
    metadata = listed.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise MomentsFileError("is not a qkscope moments file")
    if metadata.get("schema") not in READABLE:
        raise MomentsFileError(
            f"has moments schema {str(metadata.get('schema'))[:20]!r}, this qkscope reads schemas 2 to {SCHEMA}: "
            "capture it again, or use the qkscope version that wrote it"
        )
    if not all(isinstance(metadata.get(key), str) for key in ("about", "sha256")):
        raise MomentsFileError("its header is incomplete: capture it again")
    if len(metadata["about"]) > MAX_ABOUT:
        raise MomentsFileError(
            f"its description is larger than {MAX_ABOUT // 2**20} MiB: it is damaged, or not qkscope's"
        )
    return metadata


def _header(about: Mapping[str, Any], metadata: Mapping[str, str]) -> Header:
    if set(about) != {"layout", "layers", "provenance"}:
        raise ValueError("it should have layout, layers and provenance, and nothing else")
    stored = about["layers"]
    if not isinstance(stored, list) or not 0 < len(stored) <= MAX_LAYERS:
        raise ValueError(f"layers should be a list of 1 to {MAX_LAYERS}")
    layers = tuple(LayerFacts.from_json(layer) for layer in stored)
    if len({facts.layer for facts in layers}) != len(layers):
        raise ValueError("a layer is listed twice")
    provenance, layout = _provenance(about["provenance"], layers), Layout.from_json(about["layout"])
    return Header(layout, layers, provenance, metadata["about"], metadata["sha256"])


def _provenance(stored: Any, layers: tuple[LayerFacts, ...]) -> dict[str, Any]:
    """The provenance; of what it says only that is checked which later stages compute with."""
    if not isinstance(stored, dict):
        raise ValueError("provenance should be an object")
    last = max(facts.layer for facts in layers)
    if stored.get("n_layers") is not None:
        require_integer(stored["n_layers"], "n_layers", MAX_LAYERS + 1, last + 1)
    if stored.get("context") is not None:
        require_integer(stored["context"], "context", 2**31, 1)
    for name in ("name", "label", "phase", "fingerprint"):
        if not isinstance(stored.get(name, ""), str | None):
            raise ValueError(f"{name} should be text")
    seconds = stored.get("seconds", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e15:
        raise ValueError("seconds should be a number")
    skipped = stored.get("documents_skipped")
    if skipped is not None and not (isinstance(skipped, list) and all(isinstance(each, dict) for each in skipped)):
        raise ValueError("documents_skipped should be a list of objects")
    return stored


def _require_arrays(listed: Mapping[str, Any], expected: ArrayShapes, room: int) -> None:
    """Exactly the expected arrays, one behind the other, filling the file to its end."""
    if odd := sorted(listed.keys() - {"__metadata__"} ^ expected.keys()):
        raise ValueError(f"array {odd[0][:60]!r} is {'missing' if odd[0] in expected else 'unexpected'}")
    places = []
    for name, (of, shape) in expected.items():
        entry = listed[name]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"array {name} is not described the way safetensors does it")
        if entry["dtype"] != of or entry["shape"] != list(shape) or any(isinstance(n, bool) for n in entry["shape"]):
            raise ValueError(f"array {name} should be {of} of shape {shape}")
        if not isinstance(entry["data_offsets"], list) or len(entry["data_offsets"]) != 2:
            raise ValueError(f"array {name} should have two offsets")
        start, stop = (require_integer(offset, "an offset", 2**63) for offset in entry["data_offsets"])
        places.append((start, stop, ELEMENT_BYTES[of] * prod(shape), name))
    end = 0
    for start, stop, length, name in sorted(places):
        if start != end or stop - start != length:
            raise ValueError(f"array {name} overlaps another, or leaves a gap")
        end = stop
    if end != room:
        raise ValueError(f"its arrays have {end} bytes, the file has {room}")
