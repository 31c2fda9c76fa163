"""The layout of qk-sniffer datasets (one folder `l{LL}h{HH}{q|k}` per head, Parquet files inside), and their samples.

Columns: bucket, example_id (the document), position, vector, sliding_window (null on full attention), and in some
datasets token_str. Folder names are parsed into numbers and only those numbers travel on; paths come from listing
directories, never from what a file says. Files written by qkscope also carry what it knows of the layer and the
model (`FileFacts`) in the Parquet schema's metadata, which other readers ignore.

A token is kept with a probability that only its position decides, drawn by document, layer and position: all heads of a
layer keep the same tokens; batches, workers and the length a document is cut to make no difference; a lower rate keeps
a part of what a higher one keeps. The published protocol has a rate of 1 / bucket size, one token per bucket and
document on average. A log-uniform sample keeps as many tokens each time that the position doubles, so that it covers
early positions, of which there are few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import scandir
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError, first_line
from qkscope.layers import LayerFacts, require_integer
from qkscope.moments.layout import PADDING
from qkscope.moments.second_moments import Kind

DATA_FILE = "data.parquet"
TOKEN_COLUMN = "token_str"
METADATA_KEY = b"qkscope"
SEARCH_DEPTH = 2  # the predecessor nests a model's heads in a folder of the model's name, its README in the root
MAX_LAYERS = 10_000  # as many as folder names can number

PUBLISHED_BUCKETS = 16  # of the context, so 16 tokens per document and head
Integers = NDArray[np.int64]

HEAD_FOLDER = re.compile(r"l([0-9]{2}|[1-9][0-9]{2,3})h([0-9]{2}|[1-9][0-9]{2,3})([qk])")
_LOOSE = re.compile(r"l[0-9]+h[0-9]+[qk]", re.IGNORECASE)


class VectorsError(InputError):
    """A dataset of vectors cannot be read or written; the message names the file and what to do."""


@dataclass(frozen=True, order=True)
class HeadName:
    """One head's queries or keys."""

    layer: int
    head: int
    kind: Kind

    @property
    def folder(self) -> str:
        """The folder's name: `l03h11q`."""
        return f"l{self.layer:02d}h{self.head:02d}{self.kind}"


def parse_head(name: str) -> HeadName | None:
    """The head a folder holds; None for any other folder. A name that nearly fits is refused, not skipped."""
    if match := HEAD_FOLDER.fullmatch(name):
        return HeadName(int(match[1]), int(match[2]), "q" if match[3] == "q" else "k")
    if _LOOSE.fullmatch(name):
        raise VectorsError(f"folder {name!r} is not named like l03h11q: rename it, so that its head is certain")
    return None


@dataclass(frozen=True)
class VectorFolders:
    """A dataset's heads and their Parquet files."""

    root: Path
    files: Mapping[HeadName, tuple[Path, ...]]

    def heads(self, layer: int, kind: Kind) -> tuple[int, ...]:
        """The heads of one kind that a layer has, rising."""
        return tuple(sorted(name.head for name in self.files if (name.layer, name.kind) == (layer, kind)))

    def layers(self) -> tuple[int, ...]:
        """Layers with queries, rising: without a query there is no head to analyze."""
        return tuple(sorted({name.layer for name in self.files if name.kind == "q"}))


def find_vectors(folder: Path | str, layer: int | None = None) -> VectorFolders:
    """The heads below `folder`, which holds them itself or in one folder inside (as the predecessor nests them).

    With `layer`, those of one layer: others are not looked at.
    """
    root = Path(folder)
    if not root.is_dir():
        raise VectorsError(f"{root}: there is no such folder of vectors")
    roots = _dataset_roots(root, SEARCH_DEPTH)
    if not roots:
        raise VectorsError(f"{root}: no head folder such as l00h00q in it; it is not a dataset of vectors")
    if len(roots) > 1:
        names = ", ".join(str(each.relative_to(root)) for each in list(roots)[:5])
        raise VectorsError(f"{root}: holds {len(roots)} datasets ({names}); give the folder of one of them")
    ((place, heads),) = roots.items()
    if not any(head.kind == "q" for head in heads):
        raise VectorsError(f"{place}: has key heads only (l..h..k); add the query heads (l..h..q)")
    files = {head: _parquet_files(path) for head, path in heads.items() if layer in (None, head.layer)}
    return VectorFolders(place, dict(sorted(files.items())))


def _dataset_roots(folder: Path, depth: int) -> dict[Path, dict[HeadName, Path]]:
    """The folders that hold heads, and those of each head."""
    names = sorted(each.name for each in scandir(folder) if each.is_dir() and not each.name.startswith("."))
    try:
        heads = {head: folder / name for name in names if (head := parse_head(name)) is not None}
    except VectorsError as error:
        raise error.within(str(folder)) from None
    if heads:
        return {folder: heads}
    below = (_dataset_roots(folder / name, depth - 1) for name in names) if depth else ()
    return {root: of_root for roots in below for root, of_root in roots.items()}


def _parquet_files(folder: Path) -> tuple[Path, ...]:
    # Hidden names are temporaries of a writer or a download.
    files = tuple(sorted(path for path in folder.glob("*.parquet") if not path.name.startswith(".")))
    if not files:
        raise VectorsError(f"{folder}: has no parquet file; download it again, or remove the folder")
    if odd := [path for path in files if not path.is_file()]:  # a pipe would never end
        raise VectorsError(f"{odd[0]}: is not a plain file; download it again, or remove it")
    return files


@dataclass(frozen=True)
class FileFacts:
    """What qkscope writes next to the vectors, so that nothing about the model has to be inferred from them."""

    layer: LayerFacts
    n_layers: int
    context: int
    rate: float
    seed: int
    per_doubling: int = 0  # of a log-uniform sample, see `sampling`

    def to_metadata(self) -> dict[bytes, bytes]:
        """For the arrow schema."""
        return {METADATA_KEY: json.dumps(asdict(self), sort_keys=True).encode()}


def facts_from_metadata(metadata: Mapping[bytes, bytes] | None, head: HeadName) -> FileFacts | None:
    """A file's facts; None where another program wrote it. Facts that do not fit the folder are refused."""
    raw = (metadata or {}).get(METADATA_KEY)
    if raw is None:
        return None
    try:
        stored: dict[str, Any] = json.loads(raw)
        facts = FileFacts(
            LayerFacts.from_json(stored["layer"]),
            require_integer(stored["n_layers"], "n_layers", MAX_LAYERS),
            require_integer(stored["context"], "context", 2**31),
            float(stored["rate"]),
            require_integer(stored["seed"], "seed", 2**63, -(2**63)),
            require_integer(stored.get("per_doubling", 0), "per_doubling", 2**31),
        )
        heads = facts.layer.q_heads if head.kind == "q" else facts.layer.kv_heads
        fits = facts.layer.layer == head.layer < facts.n_layers and head.head < heads and facts.context > 0
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise VectorsError(
            f"its qkscope metadata cannot be understood ({type(error).__name__}): write it again"
        ) from None
    if not fits:
        raise VectorsError(f"its qkscope metadata is of another head than {head.folder}: it was moved or renamed")
    return facts


def stored_sample(folder: Path) -> VectorSample | None:
    """The sample that qkscope wrote to a dataset; None where another program wrote it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    head, files = next(iter(find_vectors(folder).files.items()))
    try:
        schema = pq.read_schema(files[0])
    except (pa.ArrowException, OSError) as error:
        raise VectorsError(f"{files[0]}: not a readable parquet file ({first_line(error)})") from None
    facts = facts_from_metadata(schema.metadata, head)
    if facts is None:
        return None
    return VectorSample(facts.rate, facts.seed, TOKEN_COLUMN in schema.names, facts.per_doubling)


def arrow_schema(width: int, facts: FileFacts | None = None, *, tokens: bool = False) -> Any:
    """The predecessor's arrow schema for vectors of `width`, with or without the tokens' texts."""
    import pyarrow as pa

    fields = [
        ("bucket", pa.int32()),
        ("example_id", pa.int32()),
        ("position", pa.int32()),
        ("vector", pa.list_(pa.float32(), width)),
        ("sliding_window", pa.int64()),
        *([(TOKEN_COLUMN, pa.string())] if tokens else []),
    ]
    return pa.schema(fields, metadata=facts.to_metadata() if facts else None)


# -- which tokens are kept -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorSample:
    """A sample of raw vectors: requested (`run --vectors`), or as a dataset states it."""

    rate: float | None = None  # share of tokens; None: the published rate, one token per position bucket
    seed: int = 0
    tokens: bool = False  # whether the texts of tokens are kept next to them
    per_doubling: int = 0  # instead of a rate: log-uniform, so many tokens each time that the position doubles

    def rate_at(self, context: int) -> float:
        """The share of a document's tokens that is kept on average, for a checkpoint of this context."""
        if self.per_doubling:
            return log_uniform_rate(context, self.per_doubling)
        return published_rate(context) if self.rate is None else self.rate


def published_rate(context: int) -> float:
    """1 / bucket size; a context shorter than its buckets is kept whole."""
    return min(1.0, PUBLISHED_BUCKETS / context)


def log_uniform(positions: int, per_doubling: int) -> NDArray[np.float64]:
    """The probability of each position in a sample of so many tokens between 2ⁿ − 1 and 2ⁿ⁺¹ − 1, for every n.

    Where there are fewer positions than that, all are kept.
    """
    octave = np.floor(np.log2(np.arange(1, positions + 1)))
    return np.minimum(1.0, per_doubling / np.exp2(octave))


def log_uniform_rate(context: int, per_doubling: int) -> float:
    """The share of a document's tokens that a log-uniform sample keeps on average."""
    return float(log_uniform(context, per_doubling).mean())


def sampled_positions(
    documents: Sequence[int],
    tokens: int,
    *,
    layer: int,
    rate: float,
    seed: int,
    positions: Integers | None = None,
    per_doubling: int = 0,
) -> Integers:
    """Positions (rows, tokens) of a batch with -1 for every token that is not kept, as `Moments.add` takes them.

    `documents` has the corpus index of each row; `positions` is given where rows are padded (-1 there). With
    `per_doubling`, that decides and not the rate.
    """
    if not 0 < rate <= 1:
        raise InputError(f"a sampling rate is above 0 and at most 1, not {rate}")
    if per_doubling < 0:
        raise InputError(
            f"a log-uniform sample keeps 1 token or more each time that the position doubles, not {per_doubling}"
        )
    if min(seed, layer, *documents) < 0:
        raise InputError(f"seed {seed}, layer {layer} and documents {list(documents)} of a sample must be 0 or more")
    shape = (len(documents), tokens)
    all_positions = np.broadcast_to(np.arange(tokens) if positions is None else positions, shape)
    longest = int(all_positions.max(initial=0)) + 1
    chance = log_uniform(longest, per_doubling) if per_doubling else np.full(longest, rate)
    kept = np.full(shape, PADDING, dtype=np.int64)
    for row, document in enumerate(documents):
        # Named outright: the same tokens with every numpy version that keeps PCG64.
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, layer, document))))
        chosen = generator.random(longest) < chance  # of shorter rows, the first of the same draws
        row_positions = all_positions[row]
        keep = (row_positions >= 0) & chosen[row_positions]  # padding reads the last position, and is left out
        kept[row, keep] = row_positions[keep]
    return kept
