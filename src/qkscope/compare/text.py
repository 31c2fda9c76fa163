"""What a comparison reports: lines for a terminal and a card, the same for every reference.

Names of checkpoints and folders come from data: they are one printable line, shortened.
"""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd

from qkscope.compare.judge import DIFFERS, MISSING, REPRODUCED, JudgedNumbers, largest_differences, summarize
from qkscope.compare.numbers import group_title, number_title
from qkscope.results.folder import CHANGED_HEADS_CSV, COMPARISON_CSV
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Block, Code, Strong, TableBlock, bullet, heading, paragraph
from qkscope.words.phrases import listed, shortened, significant

_LARGEST, _PRINTED = 8, 3  # rows of the largest differences in a card, and on a terminal
_CHANGED = 24  # heads of another category in a card; all are in the table
_LISTED = 6  # names in a sentence
_ROUNDING = 1e-12  # printed as 0


def comparison_lines(judged: JudgedNumbers, header: str) -> list[str]:
    """What the command line prints; the last line is the verdict."""
    lines = [header, *judged.notes]
    for row in _records(summarize(judged.counted, group_title)):
        sizes = [_digits(row[name]) for name in ("median", "p95", "largest")]
        lines.append(
            f"{row['group']}: {row[REPRODUCED]:,} of {row['numbers']:,} within tolerance; "
            f"|difference|: median {sizes[0]}, 95% below {sizes[1]}, largest {sizes[2]}"
        )
    differing = judged.counted[judged.counted["verdict"] == DIFFERS]
    lines += [
        f"differs: {model}, {number}: {value} against {reference}, difference {difference} (tolerance {allowed})"
        for model, number, value, reference, difference, allowed, _ in _rows(largest_differences(differing, _PRINTED))
    ]
    return [*lines, *_one_side(judged), _verdict(judged)]


def comparison_card(judged: JudgedNumbers, title: str, about: Block) -> list[AnyBlock]:
    """The README of a comparison; `about` names the reference."""
    return [
        heading(1, f"{title}: comparison"),
        paragraph(Strong(_verdict(judged))),
        about,
        _summary_table(summarize(judged.counted, group_title)),
        *(bullet(shortened(note, 500)) for note in [*judged.notes, *_one_side(judged)]),
        heading(2, "Largest differences"),
        *_largest_table(judged),
        *(_changed_table(judged.changed) if judged.changed is not None else []),
        heading(2, "Tolerances"),
        paragraph(judged.tolerance_note, " ", Code(COMPARISON_CSV), " has every number."),
    ]


def _verdict(judged: JudgedNumbers) -> str:
    verdicts = judged.counted["verdict"].value_counts()
    total = len(judged.counted)
    if judged.reproduced:
        which = f"all {total:,} {judged.noun}s are" if total > 1 else f"the one {judged.noun} is"
        return f"Reproduced: {which} within tolerance."
    words = {REPRODUCED: "within tolerance", DIFFERS: "different", MISSING: "missing"}
    parts = [f"{verdicts.get(v, 0):,} {word}" for v, word in words.items() if v == REPRODUCED or verdicts.get(v, 0)]
    return f"Not reproduced: of {counted(total, judged.noun)}, {listed(parts)}."


def _one_side(judged: JudgedNumbers) -> list[str]:
    """Checkpoints and numbers that one side lacks."""
    absent = judged.counted["model"].isin([*judged.only_results, *judged.only_reference])
    lacking = judged.counted[(judged.counted["verdict"] == MISSING) & ~absent]
    lost = f"{counted(len(lacking), 'number')} at {listed_names(list(dict.fromkeys(lacking['model'])))} are missing."
    return [
        *([lost] if len(lacking) else []),
        *([f"Only in the reference: {listed_names(judged.only_reference)}."] if judged.only_reference else []),
        *([f"Only in this run: {listed_names(judged.only_results)}."] if judged.only_results else []),
    ]


# --- tables -----------------------------------------------------------------------------------------


def _summary_table(summary: pd.DataFrame) -> TableBlock:
    titles = (
        "what", "numbers", "within tolerance", "differ", "missing", "mean difference",
        "median / 95% / largest |difference|", "correlation", "tolerance",
    )  # fmt: skip
    rows = []
    for row in _records(summary):
        counts = (f"{row[name]:,}" for name in ("numbers", REPRODUCED, DIFFERS, MISSING))
        sizes = " / ".join(_digits(row[name]) for name in ("median", "p95", "largest"))
        low, high = _digits(row["tolerance_low"]), _digits(row["tolerance_high"])
        mean, correlation = _digits(row["mean"]), _digits(row["correlation"])
        span_of_tolerance = low if low == high else f"{low} to {high}"
        rows.append((row["group"], *counts, mean, sizes, correlation, span_of_tolerance))
    return TableBlock(titles, rows)


def _largest_table(judged: JudgedNumbers) -> list[AnyBlock]:
    largest = largest_differences(judged.counted, _LARGEST)
    if largest.empty:
        return [paragraph("All differences are zero.")]
    titles = ("checkpoint", "number", "this run", "reference", "difference", "tolerance", "verdict")
    return [paragraph("Farthest from their tolerance:"), TableBlock(titles, _rows(largest))]


def _rows(cells: pd.DataFrame) -> list[tuple[str, ...]]:
    """Checkpoint, number, the four numbers and the verdict of judged rows."""
    return [
        (
            shortened(row["model"]),
            number_title(row["what"], row["cell"]),
            *(_digits(row[name]) for name in ("value", "reference", "difference", "tolerance")),
            row["verdict"],
        )
        for row in _records(cells)
    ]


def _changed_table(changed: pd.DataFrame) -> list[AnyBlock]:
    title = heading(2, "Heads that changed category")
    if changed.empty:
        return [title, paragraph("None.")]
    rows = [
        (
            shortened(row["model"]), str(row["layer"]), str(row["head"]), row["reference_category"], row["category"],
            *(f"{_digits(row[f'reference_{name}'])} → {_digits(row[name])}" for name in ("r_q", "r_k")),
        )
        for row in _records(changed.head(_CHANGED))
    ]  # fmt: skip
    table = TableBlock(("checkpoint", "layer", "head", "reference", "this run", "r_q", "r_k"), rows)
    more = len(changed) - _CHANGED
    return [title, table, *([paragraph(f"{more:,} more are in ", Code(CHANGED_HEADS_CSV), ".")] if more > 0 else [])]


def _digits(value: float) -> str:
    return significant(0.0 if abs(value) < _ROUNDING else value)


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", table.to_dict("records"))


# --- names ------------------------------------------------------------------------------------------


def listed_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return _first([shortened(name) for name in names])


def quoted_names(names: Sequence[str]) -> str:
    """The first few names, quoted."""
    shown = ", ".join(repr(name[:60]) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _first(items: Sequence[str]) -> str:
    more = len(items) - _LISTED
    return listed([*items[:_LISTED], f"{more} more"] if more > 0 else items)


def span(values: "pd.Series[int]") -> str:
    """148, or 140 to 149."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def window_note(windows: "pd.Series[float]", others: "pd.Series[float]") -> list[str]:
    """Where the two sides were measured over different windows, which are given by checkpoint."""
    both = pd.DataFrame({"window": windows, "other": others}).reindex(windows.index).dropna()
    apart = [
        f"{shortened(str(name))} ({int(window):,} tokens, reference {int(other):,})"
        for name, window, other in both[both["window"] != both["other"]].itertuples()
    ]
    return [f"Measured over different windows: {_first(apart)}; r depends on the window."] if apart else []
