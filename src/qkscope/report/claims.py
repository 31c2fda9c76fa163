"""`claims.md`: which statements of the published account hold in this study, at both windows."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.lenses.claims import CLAIMS
from qkscope.lenses.claims.base import Claim, Ruling
from qkscope.lenses.views import Results, WindowView
from qkscope.words.blocks import AnyBlock, Code, Strong, TableBlock, Text, heading, paragraph
from qkscope.words.phrases import plus_minus, shortened

NAME = "claims"


def claims_page(tables: Results) -> list[AnyBlock]:
    """A row per claim: statistic with its errors and verdict, at native context length and at the common window.

    Empty where the results carry no claims.
    """
    if not tables.own.has(NAME):
        return []
    one_run = tables.own.study.one_run
    claims = [claim for claim in CLAIMS if claim.about == "entry" or one_run]
    titles = ["Claim", "Statistic (above 0 if the claim holds)", "Checkpoint" if one_run else "Model", "Population"]
    titles += ["Native context length", *(["Common window"] if tables.common is not None else []), "Figures"]
    return [
        heading(1, f"{shortened(tables.own.study.title)}: claims"),
        paragraph(
            "Each statement of the published account has a statistic that is above 0 if the statement holds. ",
            Strong("Supported"), " or ", Strong("contradicted"), " means that the statistic differs significantly from "
            "0 under both standard errors: over documents (first) and over KV heads (second). The numbers are in ",
            Code("claims.csv"), ".",
        ),
        TableBlock(titles, [row for claim in claims for row in _rows(claim, tables)]),
    ]  # fmt: skip


def _rows(claim: Claim, tables: Results) -> list[list[Text]]:
    """One row for a run, about the checkpoint that the claim cites; one per model otherwise."""
    study, here = tables.own.study, _of(claim, tables.own).set_index("model")
    names = [str(name) for name in here.index]
    if study.one_run:
        names = names[:1] if claim.cited == "first" else names[-1:]
    figures = ", ".join(figure.replace("_", " ") for figure in claim.figures)
    return [
        [
            claim.sentence(one_run=study.one_run),
            claim.statistic,
            f"{'' if claim.about == 'entry' else 'to '}{shortened(study.labels[name])}",
            str(here.loc[name, "population"]),
            *(_verdict(claim, at, name) for at in tables.views()),
            figures,
        ]
        for name in names
    ]


def _of(claim: Claim, at: WindowView) -> pd.DataFrame:
    table = at.table(NAME)
    return table[table["claim"] == claim.name]


def _verdict(claim: Claim, at: WindowView, model: str) -> str:
    """`supported (0.52 ± 0.01, ± 0.08)`, or why it is undecided."""
    rows = _of(claim, at) if at.has(NAME) else None
    if rows is None or not (rows["model"] == model).any():
        return "–"
    row = rows[rows["model"] == model].iloc[0]
    if row["verdict"] == Ruling.UNDECIDED:
        return f"undecided: {row['why']}"
    value, documents, heads = (float(row[name]) for name in ("value", "value_se", "value_se_heads"))
    second = f", ± {plus_minus(heads, math.nan)}" if math.isfinite(heads) else ""
    return f"{row['verdict']} ({plus_minus(value, documents)}{second})"
