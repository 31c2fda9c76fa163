"""Sections of docs/findings.md about position in heads: r at several windows, and what decides scores."""

from __future__ import annotations

from collections.abc import Callable

from findings_numbers import Number, Part, Place, Tables, cases, table

from qkscope.words.phrases import listed

MIDDLE = 2048  # tokens
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
    ends = _ends(tables)
    return Part(
        short=[_window_effect(tables, ends)],
        text=[
            "Mean r_q and r_k on PC0 and the share of position-dominated heads (both above 0.7), at the shortest "
            "window with 1,000 tokens per head, at 2,048 tokens, and at the longest window."
            f"{_held_fixed(tables)}",
            _windows_table(tables),
            _sizes(tables),
        ],
        compared=len(ends),
    )


End = tuple[Place, tuple[int, Number], tuple[int, Number]]


def _ends(tables: Tables) -> list[End]:
    """r_q of each case at the shortest window that has an error, and at the longest; kinds of layers apart."""
    found = []
    with_kinds = (tables.with_kinds(place, "windows") for place in tables.places())
    for place in (place for first, *kinds in with_kinds for place in kinds or [first]):
        known = [w for w in _windows(tables, place) if tables.number("windows", "r_q", place, w).error > 0]
        if len(known) > 1:
            first, last = ((w, tables.number("windows", "r_q", place, w)) for w in (known[0], known[-1]))
            found.append((place, first, last))
    return found


def _window_effect(tables: Tables, ends: list[End]) -> str:
    """Which way the window alone moves r_q."""
    ways: dict[int, list[End]] = {1: [], -1: [], 0: []}
    for end in ends:
        ways[end[2][1].minus(end[1][1]).sign].append(end)
    moved = [*ways[1], *ways[-1]]
    if not moved:
        return f"**r does not depend on the window**: the change is not significant in any of {cases(len(ends))}."
    words = {1: "rises in", -1: "falls in", 0: "does not change significantly in"}
    said = [f"{words[way]} {tables.grouped([each[0] for each in of])}" for way, of in ways.items() if of]
    place, (short, first), (long, last) = max(moved, key=lambda each: abs(each[2][1].value - each[1][1].value))
    return (
        "**r depends on the window.** With the same weights and documents, from the shortest to the longest window, "
        f"mean r_q {'; '.join(said)}. The largest change is in {place.said}: {first} at {short:,} tokens, {last} at "
        f"{long:,}."
    )


def _windows(tables: Tables, place: Place) -> list[int]:
    rows = tables.rows("windows", place)
    return [] if rows.empty else [int(w) for w in rows.loc[rows["enough"] == 1, "window"]]


def _held_fixed(tables: Tables) -> str:
    """At which windows errors are not of a full jackknife."""
    rows = tables.table("windows")
    if "errors" not in rows or not rows["errors"].astype(str).str.contains("covariances fixed").any():
        return ""
    common = sorted({int(window) for window in tables.entries.get("common_window", ())})
    other = f" and {listed([f'{window:,}' for window in common])} tokens" if common else ""
    return (
        f" Errors at windows other than the longest{other} keep covariances, and so PC0, constant (version 0.2): they "
        "can be several times too small or too large ([errors.md](errors.md#first-order-errors))."
    )


def _windows_table(tables: Tables) -> str:
    rows, names = [], []
    for place in models(tables, "windows"):
        for window in _shown({w for corpus in tables.corpora for w in _windows(tables, tables.other(place, corpus))}):

            def cell(column: str, window: int = window) -> Callable[[Place], str]:
                return lambda where: str(tables.number("windows", column, where, window))

            def share(where: Place, window: int = window) -> str:
                return tables.number("windows", "position_dominated", where, window).percent

            columns = {"r_q": cell("r_q"), "r_k": cell("r_k"), "position-dominated": share}
            names, cells = side_by_side(tables, columns, [place])
            rows.append([place.name, f"{window:,}", *cells[0]])
    return table(["model", "window", *names], rows)


def _shown(windows: set[int]) -> list[int]:
    """The shortest, the longest, and 2,048 tokens; the kept tables have all."""
    return sorted({min(windows), MIDDLE, max(windows)} & windows) if windows else []


def _sizes(tables: Tables) -> str:
    """Where heads have r_k of both signs: its mean size next to the mean."""
    signs = [
        place
        for place in tables.places()
        if _signal(tables, "r_k_abs", place).ahead_of(_signal(tables, "r_k", place).size)
    ]
    if not signs:
        return ""
    sizes = listed([f"{_signal(tables, 'r_k_abs', place)} in {place.said}" for place in signs])
    return f"Heads have r_k of both signs: mean |r_k| exceeds |mean r_k| significantly at the longest window ({sizes})."


def _signal(tables: Tables, column: str, place: Place) -> Number:
    """At the longest window: of all heads, or of one kind of layer."""
    return tables.number("signal" if place.kind == "all" else "kinds", column, place)


# --- scores -----------------------------------------------------------------------------------------


def scores(tables: Tables) -> Part:
    """Which keys win, and what decides scores where the run measured that with RoPE's rotation within buckets."""
    shares = {} if tables.old_components else SHARES
    rows = []
    for first in tables.places():
        for place in tables.with_kinds(first, "scores"):
            cells = [tables.number("scores", name, place).percent for name in shares]
            row = tables.rows("scores", place).iloc[0]
            rows.append([place.corpus, place.name, *cells, str(tables.number("scores", "late_advantage", place)),
                         f"{int(row['late_wins'])} / {int(row['early_wins'])} of {int(row['heads'])}"])  # fmt: skip
    columns = ["corpus", "model", *shares.values(), "late advantage", "later / earlier keys win"]
    text = [
        "Late advantage: by how many standard deviations of a query's scores the last key wins over the first, at the "
        "longest window. Later (earlier) keys win: heads in which it is significantly above (below) 0.",
        table(columns, rows),
    ]
    if not tables.old_components:
        return Part(
            text=[f"Components of the variance of scores ([lenses/score.md](lenses/score.md)). {text[0]}", text[1]]
        )
    missing = (
        "Score components were measured with version 0.2, which counted RoPE's rotation within a bucket mostly as "
        "*query*. They are not shown, and no components are ranked; [lenses/score.md](lenses/score.md) has corrected "
        "ones of two of these models."
    )
    return Part(
        open=["which score component is largest (measured with version 0.2's breakdown)"], text=[*text, missing]
    )


SECTIONS = {"position": position, "scores": scores}
