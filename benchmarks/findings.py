"""docs/findings.md, written from the tables of the study of real models (`benchmarks/study.py`).

Every number is a mean over heads with its standard error over documents, read from the results folders. A sentence is
written only where what it claims exceeds two errors; what does not is said not to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from qkscope.lenses.at_window import AtWindow, StudyTables, build_tables
from qkscope.results.read import Entry, load_results
from qkscope.words.phrases import listed, plus_minus

ROTATED, PLASTICITY, ROPE, SCORE = "rotated.csv", "plasticity.csv", "rope.csv", "score.csv"
PARTS = {"position_share": "position", "query_position_share": "query-position", "preference_share": "preference",
         "query_share": "query"}  # fmt: skip
Number = tuple[float, float]  # a mean and its error; NaN where it is not known


class Study:
    """One corpus: the tables at each entry's own context and at the common window."""

    def __init__(self, corpus: str, folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.tables: StudyTables = build_tables(load_results(folder))

    def at(self, common: bool) -> AtWindow:
        """The choice of windows; the own contexts where there is no other."""
        return self.tables.common if common and self.tables.common is not None else self.tables.own

    def number(self, file: str, column: str, model: str, *, common: bool = False) -> Number:
        """A mean over heads and its error over documents."""
        at = self.at(common)
        if file and not at.has(file):
            return math.nan, math.nan
        panel = at.panel_of(file) if file else at.panel
        try:
            return panel.mean(column, model), panel.error(column, model)
        except KeyError:
            return math.nan, math.nan

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The models."""
        return self.tables.own.study.checkpoints

    def window(self, model: str, *, common: bool = False) -> int:
        """Tokens of the window."""
        return int(self.at(common).window_of(model))


def page(folders: Mapping[str, Path], *, quick: bool) -> str:
    """The whole page."""
    studies = [Study(corpus, folder) for corpus, folder in folders.items()]
    sections = [
        head(studies, quick),
        section("Position in queries and keys", position(studies)),
        section("How much of r RoPE alone predicts", rope(studies)),
        section("What scores are made of", scores(studies)),
        section("Bias, plasticity, and what they are made of", mechanism(studies)),
        section("What ablation says", ablation(studies)),
        section("What depends on the text", texts(studies)),
        section("The published claims in this light", claims(studies)),
        section("Limits", LIMITS),
    ]
    return "\n".join(sections)


LIMITS = """\
- Four small models, three of them quantised to four bits: what happens here can happen; how large it is elsewhere,
  this does not say.
- stories15M was trained on short stories; speeches and code are foreign to it.
- Errors are over documents, for these documents' kind; heads are all heads of a model, so they are no sample. Errors of
  scores and of plasticity hold covariances within position buckets fixed (`docs/errors.md`).
- Means over heads say little about single heads: the tables have every head.
- Models are four. Nothing here correlates anything over models (`docs/join.md` says why).
"""


def head(studies: Sequence[Study], quick: bool) -> str:
    """What was run."""
    first = studies[0]
    rows = []
    for entry in first.entries:
        record = entry.record
        layers = len(record.layers or [])
        seen = [str(_documents(study, entry.name)) for study in studies]
        size = f"{(record.parameters or 0) / 1e6:.0f} M"
        rows.append([entry.label, record.family or "", size, str(layers), f"{first.window(entry.name):,}", *seen])
    columns = ["model", "family", "parameters", "layers", "own context"]
    columns += [f"documents ({study.corpus})" for study in studies]
    common = first.window(first.entries[0].name, common=True)
    warning = (
        "> **A quick run**: short windows and few documents, to see that everything works. Its numbers are not "
        "findings.\n\n"
        if quick
        else ""
    )
    return (
        "# Findings in four real models\n\n"
        "<!-- Written by `make study` from its tables: do not edit. -->\n\n" + warning +
        "What position is in the heads of four pretrained models that anybody can fetch, over two corpora. `make "
        "study` "
        "makes everything on this page, tables, figures and the page itself. Numbers are means over all heads of "
        "a model, "
        "± one standard error over documents; a claim is made only where it exceeds two errors. Words: "
        "[glossary.md](glossary.md).\n\n"
        + table(columns, rows)
        + f"\nThe common window is the first {common:,} tokens of each document (tokens of each model's own "
        "tokenizer: not "
        "the same text).\n"
    )  # fmt: skip


def _documents(study: Study, model: str) -> int:
    record = study.tables.results.provenance.by_name().get(model)
    return record.documents or 0 if record else 0


def position(studies: Sequence[Study]) -> str:
    """r_q, r_k and the share of position-dominated heads, at both windows."""
    text = "Means of r_q and r_k on PC0. A longer window gives other numbers for the same weights.\n\n"
    for study in studies:
        rows = []
        for entry in study.entries:
            for common in (False, True):
                if common and study.window(entry.name) == study.window(entry.name, common=True):
                    continue
                numbers = [study.number("", column, entry.name, common=common) for column in ("r_q", "r_k")]
                shares = study.at(common).heads
                mine = shares[shares["model"] == entry.name]
                dominated = float((mine["category"] == "position-dominated").mean())
                rows.append([entry.label, f"{study.window(entry.name, common=common):,}", *map(said, numbers),
                             f"{100 * dominated:.0f} %"])  # fmt: skip
        text += f"**{study.corpus.capitalize()}**\n\n"
        text += table(["model", "window", "r_q", "r_k", "position-dominated heads"], rows) + "\n"
    return text + _window_effect(studies)


def _window_effect(studies: Sequence[Study]) -> str:
    """Whether the window alone moves r, by more than two errors."""
    moved = []
    for study, entry in _each(studies):
        if study.window(entry.name) == study.window(entry.name, common=True):
            continue
        own, common = (study.number("", "r_q", entry.name, common=choice) for choice in (False, True))
        if apart(own, common):
            moved.append(f"{entry.label} on {study.corpus} ({said(common)} to {said(own)})")
    if not moved:
        return "No mean r_q differs by more than two errors between the common window and the own context.\n"
    return (
        f"From the common window to the own context, with the same weights, mean r_q changes in {listed(moved)}: by "
        "more than "
        "two errors in each.\n"
    )


def rope(studies: Sequence[Study]) -> str:
    """The prediction beside the measurement."""
    rows = []
    for study, entry in _each(studies):
        for common in (False, True):
            if common and study.window(entry.name) == study.window(entry.name, common=True):
                continue
            cells = [study.number("" if c in ("r_q", "r_k") else ROPE, c, entry.name, common=common)
                     for c in ("r_q", "r_q_rope", "r_q_excess", "r_k", "r_k_rope", "r_k_excess")]  # fmt: skip
            rows.append([study.corpus, entry.label, f"{study.window(entry.name, common=common):,}", *map(said, cells)])
    columns = ["corpus", "model", "window", "r_q", "RoPE alone", "excess", "r_k", "RoPE alone", "excess"]
    intro = (
        "RoPE alone: what the mean query and key before rotation give once they are rotated, with no position in "
        "the hidden "
        "states. Excess is measured minus predicted, over the heads that have a prediction: where some have "
        "none, it is not the difference of the columns.\n\n"
    )
    beyond = [f"{entry.label} on {study.corpus}" for study, entry in _each(studies)
              if sure(study.number(ROPE, "r_q_excess", entry.name))]  # fmt: skip
    end = (
        "\nAt the own context, mean r_q differs from what RoPE alone predicts by more than two errors in "
        f"{listed(beyond)}.\n"
        if beyond
        else "\nAt the own context, no mean r_q differs from what RoPE alone predicts by more than two errors.\n"
    )
    return intro + table(columns, rows) + end


def scores(studies: Sequence[Study]) -> str:
    """The parts of the variance of scores."""
    rows = []
    for study, entry in _each(studies):
        cells = [study.number(SCORE, name, entry.name) for name in PARTS]
        rows.append([study.corpus, entry.label, *(percent(cell) for cell in cells),
                     said(study.number(SCORE, "late_advantage", entry.name))])  # fmt: skip
    return (
        "Of the variance of a query's scores over the keys that it sees, at the own context: mean shares over "
        "heads; and by "
        "how many standard deviations the last key wins over the first.\n\n"
        + table(["corpus", "model", *PARTS.values(), "late advantage"], rows)
    )


def mechanism(studies: Sequence[Study]) -> str:
    """Bias and plasticity."""
    rows = []
    for study, entry in _each(studies):
        rotated = [study.number(ROTATED, c, entry.name) for c in ("bias_effect", "separation_strength", "drift_cos")]
        plastic = [study.number(PLASTICITY, c, entry.name) for c in ("ap", "ap_drop", "ap_drop_matched")]
        rows.append([study.corpus, entry.label, *map(said, rotated), *map(said, plastic),
                     percent(study.number(PLASTICITY, "loss_not_position", entry.name))])  # fmt: skip
    columns = ["corpus", "model", "bias effect", "separation", "cosine of drifts", "plasticity", "drop",
               "drop at equal key distance", "loss that is not position"]  # fmt: skip
    return (
        "Bias effect: standard deviations of score from the first to the last position. Plasticity: twice the "
        "chance that "
        "two queries disagree about which of two keys wins; empty where the window has too few position buckets.\n\n"
        + table(columns, rows)
    )


def ablation(studies: Sequence[Study]) -> str:
    """What the model loses without position in some heads."""
    found = []
    for study in studies:
        path = study.folder / "ablation.csv"
        if path.exists():
            found.append(pd.read_csv(path).assign(corpus=study.corpus))
    if not found:
        return "No ablation was run here: `make study` without `--quick` runs one.\n"
    rows = pd.concat(found, ignore_index=True)
    shown = [
        c for c in ("corpus", "model", "edit", "group", "heads", "loss", "loss_se", "change", "change_se") if c in rows
    ]
    body = [
        [str(cell) if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows[shown].to_numpy()[:60]
    ]
    return (
        "Change of the loss (nats per token) without position in heads, beside groups of other heads that match them. "
        "[ablation.md](ablation.md) says what each edit takes away.\n\n" + table(shown, body)
    )


def texts(studies: Sequence[Study]) -> str:
    """What differs between corpora by more than two errors."""
    if len(studies) < 2:
        return "Only one corpus was run.\n"
    one, other = studies[:2]
    names = {"r_q": ("", "r_q"), "r_k": ("", "r_k"), "position share": (SCORE, "position_share"),
             "plasticity": (PLASTICITY, "ap"), "bias effect": (ROTATED, "bias_effect")}  # fmt: skip
    rows, differ = [], []
    for entry in one.entries:
        for name, (file, column) in names.items():
            pair = [study.number(file, column, entry.name) for study in (one, other)]
            if math.isnan(pair[0][0]) or math.isnan(pair[1][0]):
                continue
            beyond = apart(*pair)
            rows.append([entry.label, name, *map(said, pair), "yes" if beyond else "no"])
            differ += [f"{name} of {entry.label}"] if beyond else []
    told = (
        f"{len(differ)} of {len(rows)} numbers differ between {one.corpus} and {other.corpus} by more than two errors"
    )
    return f"{told}{f': {listed(differ)}' if differ else ''}. By chance about one in twenty would.\n\n" + table(
        ["model", "number", one.corpus, other.corpus, "differ"], rows
    )


def claims(studies: Sequence[Study]) -> str:
    """Claims of the published study, each held against these models."""
    checks: list[tuple[str, Callable[[Study, Entry], Number], str]] = [
        ("Keys encode position more than queries (|r_k| − |r_q| along axis a above 0)",
         lambda s, e: s.number(ROTATED, "r_a_gap", e.name), "r along a also depends on whose drift makes a"),
        ("The same, each along its own drift", lambda s, e: s.number(ROTATED, "r_own_gap", e.name), ""),
        ("Later keys score higher along axis a (bias above 0)",
         lambda s, e: s.number(ROTATED, "bias_per_1000", e.name), "per 1,000 tokens"),
        ("Later keys score higher in full (total bias above 0)",
         lambda s, e: s.number(ROTATED, "bias_total_per_1000", e.name), "per 1,000 tokens, no axis chosen"),
        ("Plasticity drops with position", lambda s, e: s.number(PLASTICITY, "ap_drop", e.name), ""),
        ("It drops at equal distances between keys",
         lambda s, e: s.number(PLASTICITY, "ap_drop_matched", e.name), ""),
    ]  # fmt: skip
    lines = []
    for claim, find, note in checks:
        known = [(f"{entry.label} on {study.corpus}", find(study, entry)) for study, entry in _each(studies)]
        known = [(name, number) for name, number in known if math.isfinite(number[0])]
        if not known:
            lines.append(f"- **{claim}**: cannot be looked at here (windows too short).")
            continue
        above = [name for name, number in known if sure(number) and number[0] > 0]
        below = [name for name, number in known if sure(number) and number[0] < 0]
        lines.append(
            f"- **{claim}**{f' ({note})' if note else ''}: so in {len(above)} of {len(known)}, the contrary in "
            f"{len(below)}"
            f"{f' ({listed(below)})' if below else ''}, within two errors of 0 in "
            f"{len(known) - len(above) - len(below)}."
        )
    return "Counted over models and corpora, each by more than two errors over documents.\n\n" + "\n".join(lines) + "\n"


# --- numbers ----------------------------------------------------------------------------------------


def _each(studies: Sequence[Study]) -> Iterable[tuple[Study, Entry]]:
    return ((study, entry) for study in studies for entry in study.entries)


def said(number: Number) -> str:
    """A mean with its error; a dash where there is none."""
    return "–" if math.isnan(number[0]) else plus_minus(*number)


def percent(number: Number) -> str:
    """A share with its error."""
    return "–" if math.isnan(number[0]) else f"{plus_minus(100 * number[0], 100 * number[1])} %"


def sure(number: Number) -> bool:
    """Whether a mean is more than two known errors from 0."""
    return bool(abs(number[0]) > 2 * number[1])


def apart(one: Number, other: Number) -> bool:
    """Whether two means differ by more than two errors of their difference, taken as independent."""
    return bool(abs(one[0] - other[0]) > 2 * math.hypot(one[1], other[1]))


def section(title: str, text: str) -> str:
    """A heading and what is below it."""
    return f"\n## {title}\n\n{text}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
