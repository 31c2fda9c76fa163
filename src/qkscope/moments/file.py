"""Moments on disk: one safetensors file with a versioned header, full provenance and a checksum.

What is kept to how many digits is said in packing.py. The header's JSON and every array enter the
checksum, so a flipped bit anywhere is found when the file is read. Files of 0.2, which have no sketches, are read, too.

A header is JSON that anyone can write. So its size is bounded before it is read, its JSON is parsed strictly (no key
twice, no bottomless nesting), and the arrays it lists must be exactly those, of the types, shapes and places in the
file, that the layout and the layers it claims stand for. Only then is anything of the claimed size allocated.

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
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from qkscope.errors import MomentsFileError
from qkscope.files import as_path, replacing
from qkscope.foreign import Unreadable, opened, parse_json
from qkscope.layers import MAX_LAYERS, LayerFacts, require_integer
from qkscope.moments.attention_rows import AttentionSums
from qkscope.moments.host_sums import LayerMoments, Unrotated
from qkscope.moments.layout import Layout, can_unrotate
from qkscope.moments.packing import (
    COUNTS,
    DAMAGED,
    ROWS,
    SCHEMA,
    UNROTATED,
    Arrays,
    ArrayShapes,
    layer_arrays,
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

READABLE = ("2", "3", SCHEMA)  # 2 is that of 0.2: groups have no sketches; 3 was written before 0.3
FORMAT = "qkscope-moments"
MAX_FILE = 64 * 2**40  # bytes; 400 layers of 128 heads of width 512 have 2 TB
MAX_HEADER = 16 * 1024 * 1024  # bytes; a 1000-layer model's header has 4 MB
MAX_ABOUT = 8 * 1024 * 1024  # characters of what it says of itself, of which provenance is the most
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I16": 2}
THREADS = 8  # that turn sums into what is written

# Array types in the order of a file: as numpy names them, and as safetensors does.
DTYPES, NAMES = ("<i8", "<f8", "<f4", "<i2", "<f2"), ("I64", "F64", "F32", "I16", "F16")


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
    metadata = {"format": FORMAT, "schema": SCHEMA, "about": about, "sha256": checksum}
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


# -- header ------------------------------------------------------------------------------------------------


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
            arrays |= layer_arrays(layout, facts, can_unrotate(layout, facts), metadata["schema"])
        _require_arrays(listed, arrays, size - 8 - length)
    except ValueError as error:
        raise MomentsFileError(f"its contents do not fit its header ({error}); {DAMAGED}") from None
    return header


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
