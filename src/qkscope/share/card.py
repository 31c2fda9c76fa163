"""The card of a dataset of results: what it holds, how it was made, how to read it; and that of the page's Space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qkscope._version import __version__
from qkscope.results.entries import Entry
from qkscope.results.folder import FIGURES, PROVENANCE_JSON, REPORT_HTML
from qkscope.results.provenance import one_line
from qkscope.results.read import ResultsFolder
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Code, Listing, TableBlock, bullet, heading, paragraph, table_of, to_markdown

FIRST = "qk"  # the table that a viewer shows first
TAGS = ["interpretability", "attention", "rope", "qkscope"]


@dataclass(frozen=True)
class SharedTable:
    """A table of an export."""

    file: str  # `qk.csv`, or `tables/heads.csv`
    parquet: str | None = None  # the same as Parquet

    @property
    def config(self) -> str:
        """What a viewer, and `load_dataset`, call it."""
        return f"{'summary_' if '/' in self.file else ''}{Path(self.file).stem}"


def dataset_card(results: ResultsFolder, tables: Sequence[SharedTable], files: Sequence[str]) -> str:
    """README.md of an export; where tables are there as Parquet, with the configs by which the Hub shows them."""
    study, made = results.study, results.provenance.command
    parquet = [each for each in tables if each.parquet]
    front: dict[str, Any] = {"pretty_name": f"{one_line(study.title)}: attention heads and position", "tags": TAGS}
    if parquet:
        front["configs"] = [
            {
                "config_name": each.config,
                "data_files": each.parquet,
                **({"default": True} if each.config == FIRST else {}),
            }
            for each in parquet
        ]
    lines = ["import qkscope", "", 'results = qkscope.load("FOLDER or ARCHIVE.zip")', "heads = results.heads()"]
    if parquet:
        lines += ["", "from datasets import load_dataset", "", 'heads = load_dataset("REPO", "qk")']
    columns = {"table": lambda each: [Code(each.config)], "file": lambda each: [Code(each.file)]}
    if parquet:
        columns["Parquet"] = lambda each: [Code(each.parquet or "")]
    blocks: list[AnyBlock] = [
        heading(1, one_line(study.title)),
        paragraph(
            f"How the attention heads of {counted(len(study.checkpoints), study.noun)} encode the position of tokens, "
            f"measured by qkscope {results.provenance.qkscope or __version__}. Each row of ",
            Code("qk"),
            " is a component of a head: ",
            Code("r_q"),
            " and ",
            Code("r_k"),
            " say how closely its queries and keys follow position.",
        ),
        TableBlock(
            (study.noun, "model", "revision", "context", "documents", "tokens"),
            [_entry_row(entry) for entry in study.checkpoints],
        ),
        heading(2, "Tables"),
        table_of(tables, columns),
        Listing("python", tuple(lines)),
        heading(2, "What else is here"),
    ]
    if REPORT_HTML in files:
        blocks.append(bullet(Code(REPORT_HTML), ": the interactive page, one file that needs no network"))
    if any(name.startswith(f"{FIGURES}/") for name in files):
        drawn = ": each figure as SVG, with a card that states in words what it shows; "
        blocks.append(bullet(Code(f"{FIGURES}/"), drawn, Code("qkscope report FOLDER"), " also draws PNGs"))
    what = ": weights, documents, tokens, precision, kernel and versions behind every number"
    blocks.append(bullet(Code(PROVENANCE_JSON), what))
    blocks += [paragraph("Made by ", Code(made), ".")] if made else []
    return f"{_front_matter(front)}\n\n{to_markdown(blocks)}"


def space_card(results: ResultsFolder) -> str:
    """README.md of a static Space that shows the page."""
    title = one_line(results.study.title)[:60]
    return _front_matter({"title": title, "sdk": "static", "app_file": "index.html", "tags": TAGS}) + "\n"


def _front_matter(values: dict[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"


def _entry_row(entry: Entry) -> list[str]:
    record = entry.record
    weights = (record.model, record.commit or record.revision)
    cells = (entry.name, *weights, entry.context, record.documents, record.tokens)
    return ["" if cell is None else one_line(str(cell)) for cell in cells]
