"""`qkscope collage`: points, picture and card of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qkscope.collage.points import Axes, CheckpointVectors, HeadPoints, parse_heads
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, POINTS_CSV, collage_folder, plain_name
from qkscope.words.blocks import AnyBlock, TableBlock, heading, paragraph, to_markdown
from qkscope.words.phrases import shortened


def write_collage(
    folder: Path,
    checkpoint: str,
    heads: Sequence[str],
    axes: Axes,
    document: int | None = None,
    out: Path | None = None,
) -> Path:
    """Draw the heads of a checkpoint that kept vectors; returns where everything is."""
    from qkscope.collage.figure import draw_collage, save_collage  # matplotlib: only here

    of = CheckpointVectors(folder, checkpoint)
    points = [of.points(layer, head, axes) for layer, head in of.chosen(parse_heads(heads))]
    there = sorted(set(points[0].table["document"]))
    if document is not None and document not in there:
        raise InputError(f"--document {document}: none of its tokens was kept; there are {there[:8]} … {there[-1]}")
    place = out or collage_folder(folder, plain_name(f"{checkpoint}-{'-'.join(axes.names)}"))
    write_csv(pd.concat([each.table for each in points], ignore_index=True), place / POINTS_CSV)
    save_collage(draw_collage(points, axes, checkpoint, document), place)
    write_text(place / CARD, to_markdown(_card(checkpoint, points, axes, document)))
    return place


def _card(checkpoint: str, heads: Sequence[HeadPoints], axes: Axes, document: int | None) -> list[AnyBlock]:
    tokens = len(heads[0].table) // 2
    return [
        heading(1, f"{shortened(checkpoint)}: heads along {shortened(' and '.join(axes.names))}"),
        paragraph(
            f"{tokens:,} kept tokens of {heads[0].table['document'].nunique()} documents per head: queries blue, keys "
            "red, darker with position. Axes are those of all tokens of the head, from its moments; nothing is "
            "centred.\n",
            f"Document {document} is in colour, the others are grey." if document is not None else "",
        ),
        heading(2, "Tokens farthest from their line in position"),
        paragraph(
            "Distances are in standard deviations of what a line in position leaves (Mahalanobis); of a sample of "
            "tokens, so others may lie farther."
        ),
        TableBlock(
            ("head", "kind", "token", "document", "position", "distance"),
            [row for head in heads for kind in ("q", "k") for row in _outlier_rows(head, kind, document)],
        ),
    ]


def _outlier_rows(head: HeadPoints, kind: str, document: int | None) -> list[tuple[str, ...]]:
    return [
        (
            head.name,
            "query" if kind == "q" else "key",
            shortened(repr(row["token"])) if row["token"] else "(not kept)",
            str(row["document"]),
            str(row["position"]),
            f"{row['distance']:.1f}",
        )
        for row in head.outliers(kind, document).to_dict("records")
    ]
