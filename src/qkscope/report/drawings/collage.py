"""`qkscope collage`: single heads of a run that kept vectors, along two of each head's axes.

The axes are those of all the head's tokens, from its moments; the kept sample of queries and keys is projected on them.
They are two principal components, or (None) the axes of drift and separation.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qkscope.draw import style
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.lenses.rotation.axes import axes_of
from qkscope.lenses.sample import distances
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.report.drawings.heads import shades
from qkscope.results.csv_files import write_csv
from qkscope.results.entries import Entries
from qkscope.results.folder import (
    CARD,
    COLLAGE,
    COLLAGE_PNG,
    COLLAGE_SVG,
    POINTS_CSV,
    moments_path,
    output_folder,
    plain_name,
    vectors_path,
)
from qkscope.validation.layout import find_vectors
from qkscope.validation.scan import kept_layer, token_texts_of
from qkscope.words.blocks import AnyBlock, TableBlock, heading, paragraph, to_markdown
from qkscope.words.phrases import shortened

Components = tuple[int, int] | None
AT_RANDOM, SEED = 4, 42  # heads of a collage where none is named, as published
MOST_TOKENS = 20_000  # drawn of a head; more only hide each other
OUTLIERS = 5  # of each kind, named
HEAD = re.compile(r"[Ll](\d{1,4})[Hh](\d{1,4})")
KINDS = {"q": ("query", "queries"), "k": ("key", "keys")}


class HeadPoints(NamedTuple):
    """A head's kept tokens: kind, document, position, x, y, token, and the distance of each from its kind's line."""

    name: str  # L5H3
    table: pd.DataFrame
    facts: str  # about the axes, for its title

    def outliers(self, document: int | None = None) -> list[dict[Any, Any]]:
        """The queries and keys, of one document or of all, that are farthest from their kind's line in position."""
        mine = self.table if document is None else self.table[self.table["document"] == document]
        parts = [mine[mine["kind"] == kind].nlargest(OUTLIERS, "distance") for kind in KINDS]
        return pd.concat(parts).to_dict("records")


def write_collage(
    folder: Path,
    checkpoint: str,
    heads: Sequence[str],
    components: Components,
    document: int | None = None,
    out: Path | None = None,
) -> Path:
    """Draw heads of a checkpoint and write points, figure and card; returns the folder where they are."""
    vectors = CheckpointVectors(folder, checkpoint)
    points = [vectors.points(layer, head, components) for layer, head in vectors.choose(parse_heads(heads))]
    documents = sorted(set(points[0].table["document"]))
    if document is not None and document not in documents:
        raise InputError(
            f"--document {document}: none of its tokens was kept; there are {documents[:8]} … {documents[-1]}"
        )
    place = out or output_folder(folder, COLLAGE, plain_name(f"{checkpoint}-{'-'.join(axis_names(components))}"))
    write_csv(pd.concat([each.table for each in points], ignore_index=True), place / POINTS_CSV)
    figure = _draw_collage(points, axis_names(components), checkpoint, document)
    style.save_as(figure, place / COLLAGE_PNG, place / COLLAGE_SVG)
    write_text(place / CARD, to_markdown(_card(checkpoint, points, axis_names(components), document)))
    return place


def axis_names(components: Components) -> tuple[str, str]:
    """For the axes of a figure."""
    return ("a (drift)", "b (separation)") if components is None else (f"PC{components[0]}", f"PC{components[1]}")


def parse_heads(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`L5H3` as layer and head."""
    matches = [HEAD.fullmatch(text) for text in texts]
    for text, match in zip(texts, matches, strict=True):
        if match is None:
            raise InputError(f"--head {text[:40]}: write layer and head, such as L5H3")
    return [(int(match[1]), int(match[2])) for match in matches if match]


# --- points -----------------------------------------------------------------------------------------


class CheckpointVectors:
    """A checkpoint of a results folder that has moments and kept vectors."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.place = vectors_path(folder, checkpoint)
        if not self.place.is_dir():
            raise InputError(
                f"{folder}: {checkpoint!r} has no vectors to draw; keep a sample with `qkscope run STUDY --vectors`"
            )
        moments = moments_path(folder, checkpoint)
        if not moments.is_file():
            raise InputError(f"{folder}: {checkpoint!r} has no moments, which a head's axes are computed from")
        self.moments = Moments.load(moments)

    def choose(self, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The heads that were asked for, or some at random."""
        there = find_vectors(self.place)
        every = [(layer, head) for layer in there.layers() for head in there.heads(layer, "q")]
        for layer, head in set(wanted) - set(every):
            raise InputError(
                f"--head L{layer}H{head}: {self.place} has no vectors for this head; it has "
                f"{len(every)} heads, from L{every[0][0]}H{every[0][1]} to L{every[-1][0]}H{every[-1][1]}"
            )
        return list(wanted) or sorted(random.Random(SEED).sample(every, min(AT_RANDOM, len(every))))

    def points(self, layer: int, head: int, components: Components) -> HeadPoints:
        """A head's kept tokens along two axes."""
        name = f"L{layer}H{head}"
        sums = layer_sums(self.moments, layer, [head], components=1 + max(components or (0,)))
        key = sums.facts.kv_head(head)
        kept = kept_layer(self.place, layer, [head], [key], low=0, high=self.moments.layout.context, most=MOST_TOKENS)
        if kept is None:
            raise InputError(f"{self.place}: lacks the keys that {name} reads")
        directions, facts = _directions(sums, components, name)
        texts = token_texts_of(self.place, layer, head, kept)
        parts = []
        for kind, vectors in (("q", kept.q[head]), ("k", kept.k[key])):
            xy = vectors.astype(np.float64) @ directions
            columns = {"kind": kind, "document": kept.document, "position": kept.position, "x": xy[:, 0], "y": xy[:, 1]}
            part = pd.DataFrame({"head": name, **columns})
            parts.append(part.assign(token=texts, distance=distances(xy, kept.position)))
        return HeadPoints(name, pd.concat(parts, ignore_index=True), facts)


def _directions(sums: LayerSums, components: Components, name: str) -> tuple[NDArray[np.float64], str]:
    """Two unit vectors (d, 2) of the only head of a layer's sums, and facts about them."""
    if components is None:
        plane = axes_of(sums)
        directions = np.stack([plane.a[0], plane.b[0]], axis=1)
        if not np.isfinite(directions).all():
            raise InputError(f"{name}: has no axis a, because its queries and keys do not move with position")
        return directions, "plane of drift and separation"
    principal, width = sums.principal, sums.facts.head_dim
    if max(components) >= width:
        raise InputError(f"--components: {name} has components 0 to {width - 1}")
    facts = [
        f"PC{i} {100 * principal.explained_variance[0, i]:.0f} %, r_q {principal.r_q[0, i]:.2f}, "
        f"r_k {principal.r_k[0, i]:.2f}"
        for i in components
    ]
    return np.asarray(principal.directions[0][:, list(components)]), "; ".join(facts)


# --- figure and card --------------------------------------------------------------------------------


def _draw_collage(heads: Sequence[HeadPoints], names: tuple[str, str], title: str, document: int | None) -> Figure:
    """A panel per head, darker with position; with `document`, its tokens in color over the others in gray."""
    columns = min(3, max(2, math.ceil(math.sqrt(len(heads))))) if len(heads) > 1 else 1
    rows = math.ceil(len(heads) / columns)
    longest = max(int(head.table["position"].max()) for head in heads)
    what = f"document {document} over the others (grey)" if document is not None else "kept tokens"
    note = f"{what}; darker is later, up to position {longest:,}; labels are the tokens farthest from their line"
    with matplotlib.rc_context(style.RC):
        study, headline = Entries(title, (), ()), " and ".join(names)
        figure = style.new_figure(4.4 * columns + 1.2, 3.9 * rows + 0.9, study, headline, note)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for spare in panels[len(heads) :]:
            spare.set_visible(False)
        for panel, head in zip(panels, heads, strict=False):
            _draw_head(panel, head, longest, document)
            panel.set(xlabel=names[0], ylabel=names[1])
        for kind, (_, plural) in KINDS.items():
            mappable = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, longest), shades(kind))
            bar = figure.colorbar(mappable, ax=panels[: len(heads)], shrink=0.5, pad=0.01, aspect=30)
            bar.set_label(f"position of {plural}", fontsize=7.5)
        return style.finish(figure)


def _draw_head(panel: Panel, head: HeadPoints, longest: int, document: int | None) -> None:
    shown = head.table if document is None else head.table[head.table["document"] == document]
    if document is not None:
        other = head.table[head.table["document"] != document]
        panel.scatter(other["x"], other["y"], s=5, color=style.FAINT, linewidth=0, zorder=1, gid="others")
    for kind in KINDS:
        mine = shown[shown["kind"] == kind]
        panel.scatter(
            mine["x"], mine["y"], s=9, c=mine["position"], cmap=shades(kind), vmin=0, vmax=longest, linewidth=0,
            alpha=0.8, zorder=2, gid=kind,
        )  # fmt: skip
    for row in head.outliers(document):
        panel.annotate(
            style.plain(_token_name(row), 16), (row["x"], row["y"]), xytext=(3, 3), textcoords="offset points",
            fontsize=7, color=style.INK, gid="outlier",
        )  # fmt: skip
    panel.set_title(f"{head.name}: {head.facts}", fontsize=7.5, loc="left")


def _token_name(row: Mapping[Any, Any]) -> str:
    """A token's text, or its document and position."""
    text = str(row["token"])
    return repr(text)[1:-1] if text else f"doc {row['document']}, {row['position']}"


def _card(checkpoint: str, heads: Sequence[HeadPoints], names: tuple[str, str], document: int | None) -> list[AnyBlock]:
    tokens, documents = len(heads[0].table) // 2, heads[0].table["document"].nunique()
    rows = [
        (
            head.name,
            KINDS[row["kind"]][0],
            shortened(repr(row["token"])) if row["token"] else "(not kept)",
            str(row["document"]),
            str(row["position"]),
            f"{row['distance']:.1f}",
        )
        for head in heads
        for row in head.outliers(document)
    ]
    return [
        heading(1, f"{shortened(checkpoint)}: heads along {shortened(' and '.join(names))}"),
        paragraph(
            f"{tokens:,} kept tokens of {documents} documents per head: queries blue, keys red, darker with position. "
            "Axes are those of all tokens of the head, from its moments; nothing is centered."
            + (f" Document {document} is in color, the others are gray." if document is not None else "")
        ),
        heading(2, "Tokens farthest from their line in position"),
        paragraph(
            "Mahalanobis distances, in standard deviations of the residuals from a line in position, of the kept "
            "tokens only."
        ),
        TableBlock(("head", "kind", "token", "document", "position", "distance"), rows),
    ]
