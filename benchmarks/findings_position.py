"""Sections of docs/findings.md about what position is in heads: r at each window, what RoPE alone gives, scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from findings_numbers import Number, Place, Tables, table

from qkscope.text import counted
from qkscope.words.phrases import listed


@dataclass
class Part:
    """A section: what goes into the summary at the top, and its paragraphs."""

    short: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


SHARES = {
    "position_share": "position",
    "query_position_share": "query-position",
    "preference_share": "preference",
    "query_share": "query",
}


def side_by_side(
    tables: Tables, columns: dict[str, Callable[[Place], str]], places: list[Place]
) -> tuple[list[str], list[list[str]]]:
    """Columns for each corpus beside each other, and the cells of each place (of the first corpus that has it)."""
    names = [f"{name}, {corpus}" for name in columns for corpus in tables.corpora]
    cells = [
        [find(tables.other(place, corpus)) for find in columns.values() for corpus in tables.corpora]
        for place in places
    ]
    return names, cells


def models(tables: Tables, source: str) -> list[Place]:
    """Each model once, with its kinds of layers where it has several."""
    found: dict[tuple[str, str], Place] = {}
    for place in tables.places():
        for each in tables.with_kinds(place, source):
            found.setdefault((each.model, each.kind), each)
    order = list(tables.models)
    return sorted(found.values(), key=lambda place: order.index(place.model))


# --- r ----------------------------------------------------------------------------------------------


def position(tables: Tables) -> Part:
    """r_q, r_k and position-dominated heads at each window."""
    return Part(
        short=[_window_effect(tables)],
        text=[
            "Mean r_q and r_k on PC0, and the share of heads that are position-dominated (both above 0.7), over the "
            "first tokens of each document. Windows with fewer than 1,000 tokens of a head are left out.",
            _windows_table(tables),
            _by_kind(tables),
        ],
    )


def _window_effect(tables: Tables) -> str:
    """Whether the window alone moves r_q, from the shortest window that has an error to the longest."""
    ends = []
    for place in tables.places():
        known = [w for w in _windows(tables, place) if tables.number("windows", "r_q", place, w).error > 0]
        if len(known) > 1:
            first, last = (tables.number("windows", "r_q", place, w) for w in (known[0], known[-1]))
            ends.append((last.minus(first), f"{first} at {known[0]:,} tokens, {last} at {known[-1]:,}", place))
    moved = [each for each in ends if each[0].sign]
    if not moved:
        return f"Mean r_q differs between the shortest and the longest window in none of {cases(len(ends))}."
    _, said, place = max(moved, key=lambda each: abs(each[0].value))
    return (
        "**r depends on the window.** With the same weights and documents, mean r_q differs between the shortest and "
        f"the longest window in {len(moved)} of {cases(len(ends))}, most in {place.said}: {said}."
    )


def cases(count: int) -> str:
    """A model on a corpus is a case."""
    return counted(count, "case")


def _windows(tables: Tables, place: Place) -> list[int]:
    rows = tables.rows("windows", place)
    return [] if rows.empty else [int(w) for w in rows.loc[rows["enough"] == 1, "window"]]


def _windows_table(tables: Tables) -> str:
    rows, names = [], []
    for place in models(tables, "windows"):
        for window in sorted({w for corpus in tables.corpora for w in _windows(tables, tables.other(place, corpus))}):

            def cell(column: str, window: int = window) -> Callable[[Place], str]:
                return lambda where: str(tables.number("windows", column, where, window))

            def share(where: Place, window: int = window) -> str:
                return tables.number("windows", "position_dominated", where, window).percent

            columns = {"r_q": cell("r_q"), "r_k": cell("r_k"), "position-dominated": share}
            names, cells = side_by_side(tables, columns, [place])
            rows.append([place.name, f"{window:,}", *cells[0]])
    return table(["model", "window", *names], rows)


def _by_kind(tables: Tables) -> str:
    """Models whose layers are of several kinds, each kind by itself."""
    places = [place for place in models(tables, "kinds") if place.kind != "all"]
    if not places:
        return ""
    columns: dict[str, Callable[[Place], str]] = {
        "heads": lambda place: _heads(tables, "kinds", place),
        "r_q": lambda place: str(tables.number("kinds", "r_q", place)),
        "r_k": lambda place: str(tables.number("kinds", "r_k", place)),
        "\\|r_k\\|": lambda place: str(tables.number("kinds", "r_k_abs", place)),
    }
    names, cells = side_by_side(tables, columns, places)
    rows = [[place.name, *cell] for place, cell in zip(places, cells, strict=True)]
    return "At the own context, by kind of layer:\n\n" + table(["layers", *names], rows)


def _heads(tables: Tables, source: str, place: Place) -> str:
    rows = tables.rows(source, place)
    return "–" if rows.empty else f"{int(rows.iloc[0]['heads'])}"


# --- what RoPE alone gives --------------------------------------------------------------------------


def rope(tables: Tables) -> Part:
    """The prediction beside the measurement, window by window."""
    part = Part(short=[_rope_short(tables)])
    part.text = [
        "RoPE alone: the mean and covariance of a head's queries and keys before rotation, taken as if they did not "
        "depend on position, and turned ([lenses/rope.md](lenses/rope.md)). Excess is measured minus predicted: "
        "position that the hidden states carry. Only heads with a prediction count.",
        *(f"**{corpus.capitalize()}**\n\n{_rope_table(tables, corpus)}" for corpus in tables.corpora),
        _rope_trend(tables),
        _unpredicted(tables),
    ]
    return part


def _rope_windows(tables: Tables, place: Place) -> list[int]:
    rows = tables.rows("rope", place)
    return [] if rows.empty else sorted(int(w) for w in rows["window"])


def _known_windows(tables: Tables, place: Place) -> list[int]:
    """Those at which there is a prediction."""
    return [w for w in _rope_windows(tables, place) if tables.number("rope", "r_q_rope", place, w).known]


def _rope_short(tables: Tables) -> str:
    """How much of r_q RoPE alone gives at the longest window, and how large the rest is."""
    found = []
    for place in tables.places():
        for window in _known_windows(tables, place)[-1:]:
            columns = ("r_q", "r_q_rope", "r_q_excess", "r_k_excess")
            found.append((place, *(tables.number("rope", column, place, window) for column in columns)))
    if not found:
        return ""
    mostly = [each for each in found if each[2].minus(Number(each[1].value / 2, each[1].error / 2)).sign > 0]
    title = "**RoPE alone gives most of r_q.**" if len(mostly) == len(found) else "**What RoPE alone gives.**"
    said = f"{title} At the own context it gives more than half of mean r_q in {len(mostly)} of {cases(len(found))}."
    for name, at in (("r_q", 3), ("r_k", 4)):
        beyond = [each for each in found if each[at].sign]
        largest = max(found, key=lambda each: abs(each[at].value))
        said += (
            f" Measured {name} differs from the prediction by more than two errors in {len(beyond)}; the largest "
            f"difference is {largest[at]}, in {largest[0].said}."
        )
    return said


def _rope_table(tables: Tables, corpus: str) -> str:
    rows = []
    for first in tables.places(corpus):
        for place in tables.with_kinds(first, "rope"):
            for window in _rope_windows(tables, place):
                row = tables.rows("rope", place)
                row = row[row["window"] == window].iloc[0]
                cells = [str(tables.number("rope", c, place, window)) for c in
                         ("r_q", "r_q_rope", "r_q_excess", "r_k", "r_k_rope", "r_k_excess")]  # fmt: skip
                shares = [row["dominated"], row["dominated_rope"]]
                dominated = " / ".join(f"{100 * share:.0f} %" for share in shares) if row["heads"] else "–"
                rows.append([place.name, f"{window:,}", f"{int(row['heads'])}", *cells, dominated])
    columns = ["model", "window", "heads", "r_q", "RoPE alone", "excess", "r_k", "RoPE alone", "excess",
               "position-dominated, measured / RoPE alone"]  # fmt: skip
    return table(columns, rows)


def _rope_trend(tables: Tables) -> str:
    """Whether the excess is smaller at the longest window than at the shortest."""
    smaller, larger, same = [], [], 0
    for place in tables.places():
        windows = _known_windows(tables, place)
        for name in ("r_q", "r_k") if len(windows) > 1 else ():
            first, last = (tables.number("rope", f"{name}_excess", place, w) for w in (windows[0], windows[-1]))
            change = Number(abs(last.value), last.error).minus(Number(abs(first.value), first.error))
            told = f"{name} of {place.said}"
            smaller += [told] if change.sign < 0 else []
            larger += [told] if change.sign > 0 else []
            same += change.sign == 0
    parts = [f"smaller at the longest window than at the shortest for {listed(smaller)}" if smaller else "",
             f"larger for {listed(larger)}" if larger else "",
             f"not told apart in {same} of {same + len(smaller) + len(larger)}" if same else ""]  # fmt: skip
    return f"The size of the excess is {'; '.join(part for part in parts if part)}."


def _unpredicted(tables: Tables) -> str:
    rows = tables.table("rope")
    if rows.empty or not rows["unpredicted"].any():
        return ""
    some = rows[(rows["unpredicted"] > 0) & (rows["layer_kind"] == "all")]
    said = []
    for (model, count, why), of in some.groupby(["model", "unpredicted", "why"], sort=False):
        windows = sorted(set(of["window"]))
        every = len(windows) == rows.loc[rows["model"] == model, "window"].nunique()
        at = "" if every else f" at {listed([f'{int(w):,}' for w in windows])} tokens"
        said.append(f"{int(count)} of {tables.models[str(model)]}{at} ({why})")
    return f"Heads without a prediction: {'; '.join(said)}."


# --- scores -----------------------------------------------------------------------------------------


def scores(tables: Tables) -> Part:
    """The parts of the variance of scores."""
    rows = []
    for first in tables.places():
        for place in tables.with_kinds(first, "scores"):
            cells = [tables.number("scores", name, place).percent for name in SHARES]
            row = tables.rows("scores", place).iloc[0]
            rows.append([place.corpus, place.name, *cells, str(tables.number("scores", "late_advantage", place)),
                         f"{int(row['late_wins'])} / {int(row['early_wins'])} of {int(row['heads'])}"])  # fmt: skip
    columns = ["corpus", "model", *SHARES.values(), "late advantage", "late / early keys win"]
    leading: dict[str, list[str]] = {}
    for place in tables.places():
        leading.setdefault(_leading(tables, place), []).append(place.said)
    said = [f"{part} in {listed(places)}" for part, places in leading.items() if part]
    open_ = f"; no part is ahead by more than two errors in {listed(leading[''])}" if "" in leading else ""
    return Part(
        short=[f"**What decides scores.** The largest part of their variance is {'; '.join(said)}{open_}."]
        if said
        else [],
        text=[
            "Of the variance of a query's scores over the keys that it sees, at the own context: *position* is the "
            "mean query and where keys are, *query-position* queries that use position differently, *preference* the "
            "mean query and what keys are beyond position, *query* both ([lenses/score.md](lenses/score.md)). Late "
            "advantage: by how many standard deviations the last key wins over the first.",
            table(columns, rows),
        ],
    )


def _leading(tables: Tables, place: Place) -> str:
    """The largest part, if it is ahead of the second by more than two errors."""
    found = sorted(((tables.number("scores", column, place), name) for column, name in SHARES.items()),
                   key=lambda each: -each[0].value)  # fmt: skip
    return found[0][1] if found[0][0].minus(found[1][0]).sign > 0 else ""


SECTIONS = {"position": position, "rope": rope, "scores": scores}
