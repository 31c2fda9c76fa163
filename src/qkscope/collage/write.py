"""`qkscope collage`: points, picture and card of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qkscope.collage.points import Axes, CheckpointVectors, HeadPoints, parse_heads
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, collage_folder, plain_name
from qkscope.words.markdown import escape


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
    found = [of.points(layer, head, axes) for layer, head in of.chosen(parse_heads(heads))]
    there = sorted(set(found[0].table["document"]))
    if document is not None and document not in there:
        raise InputError(f"--document {document}: no token of it was kept; there are {there[:8]} … {there[-1]}")
    place = out or collage_folder(folder, plain_name(f"{checkpoint}-{'-'.join(axes.names)}"))
    write_csv(pd.concat([each.table for each in found], ignore_index=True), place / "points.csv")
    save_collage(draw_collage(found, axes, checkpoint, document), place)
    write_text(place / CARD, _card(checkpoint, found, axes, document))
    return place


def _card(checkpoint: str, heads: Sequence[HeadPoints], axes: Axes, document: int | None) -> str:
    tokens = len(heads[0].table) // 2
    lines = [
        f"# {escape(checkpoint)}: heads along {escape(' and '.join(axes.names))}", "",
        f"{tokens:,} kept tokens of {heads[0].table['document'].nunique()} documents per head: queries blue, keys red, "
        "darker with position. Axes are those of all tokens of the head, from its moments; nothing is centred.",
        f"Document {document} is in colour, the others are grey." if document is not None else "", "",
        "## Tokens farthest from their line in position", "",
        "Distances are in standard deviations of what a line in position leaves (Mahalanobis); of a sample of tokens, "
        "so others may lie farther.", "",
        "| head | kind | token | document | position | distance |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for head in heads:
        for kind in ("q", "k"):
            for row in head.outliers(kind).to_dict("records"):
                token = escape(repr(row["token"])) if row["token"] else "(not kept)"
                where = f"{row['document']} | {row['position']} | {row['distance']:.1f}"
                lines.append(f"| {head.name} | {'query' if kind == 'q' else 'key'} | {token} | {where} |")
    return "\n".join([*lines, ""])
