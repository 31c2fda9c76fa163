"""The kept tokens of a head along two of its axes, which are those of all its tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.lenses.rotation.axes import axes_of
from qkscope.lenses.sample import distances
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path, vectors_path
from qkscope.validation.kept import kept_layer, token_texts_of
from qkscope.validation.layout import find_vectors

Array = NDArray[np.float64]
AT_RANDOM, SEED = 4, 42  # heads of a collage where none is named, as published
MOST_TOKENS = 20_000  # drawn of a head; more only hide each other
OUTLIERS = 5  # of each kind, named
_HEAD = re.compile(r"[Ll](\d{1,4})[Hh](\d{1,4})")


@dataclass(frozen=True)
class Axes:
    """Which two axes: two components, or the plane of drift (a) and separation (b)."""

    components: tuple[int, int] | None = (0, 1)

    @property
    def names(self) -> tuple[str, str]:
        """For the axes of a figure."""
        if self.components is None:
            return "a (drift)", "b (separation)"
        return f"PC{self.components[0]}", f"PC{self.components[1]}"


@dataclass(frozen=True)
class HeadPoints:
    """A head's kept tokens: kind, document, position, x, y, token, and how far each is out."""

    layer: int
    head: int
    table: pd.DataFrame
    facts: str  # what the axes are of this head, for its title

    @property
    def name(self) -> str:
        """L5H3."""
        return f"L{self.layer}H{self.head}"

    def outliers(self, kind: str, document: int | None = None) -> pd.DataFrame:
        """The tokens, of one document or of all, that are farthest from their kind's line in position."""
        mine = self.table[self.table["kind"] == kind]
        if document is not None:
            mine = mine[mine["document"] == document]
        return mine.nlargest(OUTLIERS, "distance")


def parse_heads(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`L5H3` as layer and head."""
    heads = []
    for text in texts:
        match = _HEAD.fullmatch(text)
        if match is None:
            raise InputError(f"--head {text[:40]}: write layer and head, such as L5H3")
        heads.append((int(match[1]), int(match[2])))
    return heads


class CheckpointVectors:
    """A checkpoint of a results folder that has moments and kept vectors."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.checkpoint, self.place = checkpoint, vectors_path(folder, checkpoint)
        if not self.place.is_dir():
            raise InputError(
                f"{folder}: {checkpoint!r} has no vectors to draw; keep a sample with `qkscope run STUDY --vectors`"
            )
        moments = moments_path(folder, checkpoint)
        if not moments.is_file():
            raise InputError(f"{folder}: {checkpoint!r} has no moments, which a head's axes are computed from")
        self.moments = Moments.load(moments)
        self.there = find_vectors(self.place)

    def chosen(self, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The heads that were asked for, or some at random."""
        every = [(layer, head) for layer in self.there.layers() for head in self.there.heads(layer, "q")]
        missing = [pair for pair in wanted if pair not in set(every)]
        if missing:
            raise InputError(
                f"--head L{missing[0][0]}H{missing[0][1]}: {self.place} has no vectors for this head; it has "
                f"{len(every)} heads, from L{every[0][0]}H{every[0][1]} to L{every[-1][0]}H{every[-1][1]}"
            )
        return list(wanted) or sorted(random.Random(SEED).sample(every, min(AT_RANDOM, len(every))))

    def points(self, layer: int, head: int, axes: Axes) -> HeadPoints:
        """A head's kept tokens along two axes."""
        components = 1 if axes.components is None else max(axes.components) + 1
        sums = layer_sums(self.moments, layer, [head], components=components)
        key = sums.facts.kv_head(head)
        kept = kept_layer(self.place, layer, [head], [key], low=0, high=self.moments.layout.context, most=MOST_TOKENS)
        if kept is None:
            raise InputError(f"{self.place}: lacks the keys that L{layer}H{head} reads")
        directions, facts = _directions(sums, axes, f"L{layer}H{head}")
        texts = token_texts_of(self.place, layer, head, kept)
        parts = []
        for kind, vectors in (("q", kept.q[head]), ("k", kept.k[key])):
            xy = vectors.astype(np.float64) @ directions
            columns = {"kind": kind, "document": kept.document, "position": kept.position, "x": xy[:, 0], "y": xy[:, 1]}
            part = pd.DataFrame({"head": f"L{layer}H{head}", **columns})
            parts.append(part.assign(token=texts, distance=distances(xy, kept.position)))
        return HeadPoints(layer, head, pd.concat(parts, ignore_index=True), facts)


def _directions(sums: LayerSums, axes: Axes, name: str) -> tuple[Array, str]:
    """Two unit vectors (d, 2) of the only head of a layer's sums, and what they are worth."""
    if axes.components is None:
        plane = axes_of(sums)
        plane_axes = np.stack([plane.a[0], plane.b[0]], axis=1)
        if not np.isfinite(plane_axes).all():
            raise InputError(f"{name}: has no axis a, because its queries and keys do not move with position")
        return plane_axes, "plane of drift and separation"
    of, width = sums.principal, sums.facts.head_dim
    if max(axes.components) >= width:
        raise InputError(f"--components: {name} has components 0 to {width - 1}")
    chosen = list(axes.components)
    share = [
        f"PC{i} {100 * of.explained_variance[0, i]:.0f} %, r_q {of.r_q[0, i]:.2f}, r_k {of.r_k[0, i]:.2f}"
        for i in chosen
    ]
    return np.asarray(of.directions[0][:, chosen]), "; ".join(share)
