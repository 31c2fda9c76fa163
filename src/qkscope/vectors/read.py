"""Datasets of vectors in, the same moments out that a capture would have summed.

One head is read at a time and its vectors are added to sums at once, so the cost in memory is that of the sums,
whatever the size of the files. Heads need not have the same tokens. A dataset may hold some heads of a layer only
(the published protocol samples 300): the layer keeps its full numbering, absent heads have no tokens, and
`heads_present` in the provenance says which are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.errors import QkscopeWarning
from qkscope.layers import LayerFacts
from qkscope.moments.host_sums import FirstMoments, KindMoments, LayerMoments
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.placement import Placement
from qkscope.moments.second_moments import KINDS, Kind, SecondMoments
from qkscope.text import counted
from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import HeadName, VectorFolders, find_vectors
from qkscope.vectors.pairing import GroupSize, infer_group_size, pair_heads, size_of_layer
from qkscope.vectors.scan import HeadScan, scan_head, vector_batches


@dataclass(frozen=True)
class Reading:
    """How a dataset is read; whatever is None is taken from the files."""

    context: int | None = None  # the longest position + 1
    buckets: int = 16
    groups: int = 8  # documents go to group example_id % groups
    skip_positions: int = 0
    group_size: GroupSize | None = None  # query heads per key head
    n_layers: int | None = None  # of the model, for depths; the last layer present is taken for the last there is


@dataclass(frozen=True)
class VectorSet:
    """A checked dataset: every head's files have been looked at, no vector has been read."""

    root: Path
    layout: Layout
    layers: Mapping[int, LayerFacts]
    pairs: Mapping[int, Mapping[int, int]]  # layer -> query head -> its key head
    scans: Mapping[HeadName, HeadScan]
    n_layers: int
    notes: tuple[str, ...] = field(default=())

    @property
    def provenance(self) -> dict[str, Any]:
        """What a table or a moments file should say about where its numbers come from."""
        return {
            "vectors": str(self.root),
            "n_layers": self.n_layers,
            "context": self.layout.context,
            "skip_positions": self.layout.skip_positions,
            "heads_present": {str(layer): sorted(of) for layer, of in self.pairs.items()},
            "rows": sum(scan.rows for scan in self.scans.values()),
            "notes": list(self.notes),
        }


def moments_from_vectors(folder: Path | str, reading: Reading = Reading()) -> Moments:  # noqa: B008 - frozen
    """Every present head's moments; absent heads of a layer have zero tokens."""
    vectors = open_vectors(folder, reading)
    layers = {facts.layer: moments for facts, moments in layers_from_vectors(vectors)}
    return Moments.from_layers(vectors.layout, vectors.layers.values(), layers, vectors.provenance)


def layers_from_vectors(vectors: VectorSet) -> Iterator[tuple[LayerFacts, LayerMoments]]:
    """One layer after the other, for whoever does not need them all at once."""
    for layer, facts in vectors.layers.items():
        heads: dict[Kind, list[int]] = {
            "q": sorted(vectors.pairs[layer]),
            "k": sorted(set(vectors.pairs[layer].values())),
        }
        of_kinds: dict[Kind, KindMoments] = {}
        for kind in KINDS:
            sums = {head: _sum_head(vectors.scans[HeadName(layer, head, kind)], vectors.layout) for head in heads[kind]}
            of_kinds[kind] = _stacked(sums, facts.q_heads if kind == "q" else facts.kv_heads)
        yield facts, of_kinds


def open_vectors(folder: Path | str, reading: Reading = Reading()) -> VectorSet:  # noqa: B008 - frozen
    """Find a dataset's heads, pair them and check their files."""
    folders = find_vectors(folder)
    scans = {name: scan_head(name, files) for name, files in folders.files.items() if name.kind == "q"}
    size, how = _group_size(folders, scans, reading)
    pairs, unread = pair_heads(folders, size)
    needed = {HeadName(layer, key, "k") for layer, of in pairs.items() for key in of.values()}
    scans.update({name: scan_head(name, folders.files[name]) for name in sorted(needed)})
    layers = {layer: _layer_facts(folders.root, layer, pairs[layer], size, scans) for layer in pairs}
    layout = _layout(folders.root, scans, reading)
    notes = [how, *_notes(scans)]
    if unread:
        notes.append(
            f"{counted(len(unread), 'key head')} without a query head here, not read, first {unread[0].folder}"
        )
        warnings.warn(f"{folders.root}: {notes[-1]}", QkscopeWarning, stacklevel=3)
    return VectorSet(folders.root, layout, layers, pairs, scans, _n_layers(folders, scans, reading), tuple(notes))


def _group_size(folders: VectorFolders, scans: Mapping[HeadName, HeadScan], reading: Reading) -> tuple[GroupSize, str]:
    """Given, written in the files, or inferred, and a note that says which."""
    stated: dict[int, int] = {}
    for name, scan in scans.items():
        if scan.facts is not None:
            size = scan.facts.layer.q_heads // scan.facts.layer.kv_heads
            if stated.setdefault(name.layer, size) != size:
                raise VectorsError(f"{folders.root}: heads of layer {name.layer} were written by different captures")
    wanted = reading.group_size
    for layer, size in stated.items():
        if wanted is not None and size_of_layer(wanted, layer) != size:
            raise VectorsError(f"{folders.root}: group_size {wanted} was given, but layer {layer}'s files say {size}")
    if wanted is not None:
        return wanted, f"group size {wanted}, as given"
    if all(scan.facts is not None for scan in scans.values()):
        return stated, "group size from the files"
    size = infer_group_size(folders)
    return size, f"group size {size}, inferred from the heads that are there"


def _layer_facts(
    root: Path, layer: int, pairs: Mapping[int, int], size: GroupSize, scans: Mapping[HeadName, HeadScan]
) -> LayerFacts:
    """The layer as its files describe it; heads that contradict each other are refused."""
    names = [HeadName(layer, head, "q") for head in pairs] + [HeadName(layer, key, "k") for key in pairs.values()]
    first = scans[names[0]]
    for scan in (scans[name] for name in names):
        if scan.width != first.width:
            raise VectorsError(
                f"{root}: {scan.name.folder} has vectors of width {scan.width}, {first.name.folder} of {first.width}; "
                "heads of one layer have one width"
            )
        if scan.sliding_window != first.sliding_window:
            raise VectorsError(
                f"{root}: {scan.name.folder} has sliding_window {scan.sliding_window}, {first.name.folder} "
                f"{first.sliding_window}; a layer has one"
            )
        if scan.facts != first.facts:
            raise VectorsError(f"{root}: {scan.name.folder} and {first.name.folder} were written by different captures")
    if first.facts is not None:
        return first.facts.layer
    group = size_of_layer(size, layer)
    kv_heads = max(pairs.values()) + 1
    sliding = first.sliding_window is not None
    return LayerFacts(
        layer,
        kv_heads * group,
        kv_heads,
        first.width,
        attention="sliding" if sliding else "full",
        attention_window=first.sliding_window,
    )


def _layout(root: Path, scans: Mapping[HeadName, HeadScan], reading: Reading) -> Layout:
    longest = max(scans.values(), key=lambda scan: scan.max_position)
    written = max((scan.facts.context for scan in scans.values() if scan.facts), default=0)
    context = reading.context or max(written, longest.max_position + 1)
    if longest.max_position >= context:
        raise VectorsError(
            f"{longest.files[0].parent}: position {longest.max_position} is outside the context of {context}; give a "
            "longer context, or none"
        )
    if reading.buckets < 1:
        raise VectorsError(f"{root}: there must be at least one bucket, not {reading.buckets}")
    try:
        return Layout(bucket_edges(context, reading.buckets), reading.groups, reading.skip_positions)
    except ValueError as error:
        raise VectorsError(f"{root}: {error}") from None


def _n_layers(folders: VectorFolders, scans: Mapping[HeadName, HeadScan], reading: Reading) -> int:
    seen = max(folders.layers()) + 1
    count = reading.n_layers or max((scan.facts.n_layers for scan in scans.values() if scan.facts), default=seen)
    if count < seen:
        raise VectorsError(f"{folders.root}: n_layers {count} was given, but there is a layer {seen - 1}")
    return count


def _notes(scans: Mapping[HeadName, HeadScan]) -> Iterator[str]:
    unsorted = [name.folder for name, scan in scans.items() if not scan.rising]
    if unsorted:
        yield f"unsorted rows, which change no sum, in {counted(len(unsorted), 'head')}, first {unsorted[0]}"


def _sum_head(scan: HeadScan, layout: Layout) -> KindMoments:
    """One head's sums, batch by batch."""
    import torch

    from qkscope.moments.running_sums import RunningSums, Scratch

    kind: Kind = scan.name.kind
    running, scratch = RunningSums(layout, {kind: 1}, scan.width, torch.device("cpu")), Scratch()
    for batch in vector_batches(scan):
        of_row = batch.example_id % layout.groups
        for group in np.unique(of_row):
            rows = np.flatnonzero(of_row == group)
            # Stored vectors cost no forward pass, so float64 products: (1 row, 1 head, tokens, width).
            vectors = torch.from_numpy(batch.vectors[rows]).to(torch.float64)[None, None]
            running.add({kind: vectors}, Placement(layout, batch.position[rows][None], (int(group),)), scratch)
    if not running.tokens:
        raise VectorsError(
            f"{scan.files[0].parent}: all its positions are below skip_positions {layout.skip_positions}"
        )
    return running.to_host()[kind]


def _stacked(of_head: Mapping[int, KindMoments], count: int) -> KindMoments:
    """Heads' sums as one array over all `count` heads of the layer, zero where a head is absent."""
    first = next(iter(of_head.values()))

    def all_heads(part: Callable[[KindMoments], Any]) -> Any:
        like = part(first)
        parts = {name: getattr(like, name) for name in like.__dataclass_fields__}
        arrays = {name: np.zeros((count, *array.shape[1:]), array.dtype) for name, array in parts.items()}
        for head, sums in of_head.items():
            for name, array in arrays.items():
                array[head] = getattr(part(sums), name)[0]
        return type(like)(**arrays)

    buckets: SecondMoments = all_heads(lambda sums: sums.buckets)
    crossed: FirstMoments = all_heads(lambda sums: sums.crossed)
    groups = np.zeros((count, *first.groups.shape[1:]), np.float32)
    for head, sums in of_head.items():
        groups[head] = sums.groups[0]
    return KindMoments(buckets, crossed, groups, first.layout)
