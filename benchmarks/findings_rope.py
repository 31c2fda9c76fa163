"""The section of docs/findings.md about how much of r RoPE alone predicts."""

from __future__ import annotations

from findings_numbers import Number, Part, Place, Tables, cases, spoken, table

from qkscope.words.phrases import listed

WEAK = 0.5  # below such a correlation over heads, a prediction tells heads hardly apart
MARKS = {1: "+", -1: "−", 0: "0"}
Found = tuple[Place, int]  # a case at one of its windows


def rope(tables: Tables) -> Part:
    """The prediction beside the measurement, window by window."""
    known = {place: _known_windows(tables, place) for place in tables.places()}
    short = [(place, windows[0]) for place, windows in known.items() if windows]
    long = [(place, windows[-1]) for place, windows in known.items() if windows]
    return Part(
        short=[_rope_short(tables, short, long)] if long else [],
        text=[
            "RoPE alone: the mean and covariance of a head's queries and keys before rotation, taken as if they did "
            "not depend on position, and turned ([lenses/rope.md](lenses/rope.md)). Excess is measured minus "
            "predicted: above 0, hidden states add position; below 0, position before rotation, or a spread that "
            "depends on it, takes from it. Correlation: of measured with predicted r over heads. Only heads with a "
            "prediction count.",
            *(f"**{corpus.capitalize()}**\n\n{_rope_table(tables, corpus)}" for corpus in tables.corpora),
            _rope_trend(tables, known),
            _unpredicted(tables),
        ],
        compared=4 * len(long) + 4 * len(short),  # r_q and r_k: apart, and by more than half
    )


def _known_windows(tables: Tables, place: Place) -> list[int]:
    """Those at which there is a prediction."""
    rows = tables.rows("rope", place)
    return [] if rows.empty else sorted(int(w) for w in rows.loc[rows["heads"] > 0, "window"])


def _rope_short(tables: Tables, short: list[Found], long: list[Found]) -> str:
    """How much of r_q RoPE alone gives at both ends, where it fails for keys, and whether it tells heads apart."""
    mostly = [[each for each in found if _gives_half(tables, each)] for found in (long, short)]
    everywhere = [len(some) == len(found) for some, found in zip(mostly, (long, short), strict=True)]
    title = (
        "What RoPE alone gives." if not everywhere[0] else "RoPE alone gives most of r_q."
        if everywhere[1] else "At the longest window RoPE alone gives most of r_q."
    )  # fmt: skip
    said = (
        f"**{title}** It gives more than half of mean r_q in {len(mostly[0])} of {cases(len(long))} at the longest "
        f"window{_shares(tables, long)}, and in {len(mostly[1])} at the shortest that has a prediction"
        f"{_shares(tables, short)}."
    )
    apart = [sum(bool(_number(tables, f"{name}_excess", each).sign) for each in long) for name in ("r_q", "r_k")]
    return (
        f"{said} Measured and predicted r differ significantly at the longest window in {apart[0]} (r_q) and "
        f"{apart[1]} (r_k).{_failures(tables, short, long)}{_over_heads(tables, long)}"
    )


def _failures(tables: Tables, short: list[Found], long: list[Found]) -> str:
    """Where the prediction is of no use for keys."""
    ends = (("longest", long), ("shortest", short))
    fails = {end: [each[0] for each in _by_kind(tables, found) if _fails(tables, each)] for end, found in ends}
    named = [f"at the {end} window in {tables.grouped(places)}" for end, places in fails.items() if places]
    if not named:
        return " For keys it is off by more than half of what it predicts in no case."
    return f" **For keys it fails**, off by more than half of what it predicts, {' and '.join(named)}."


def _by_kind(tables: Tables, found: list[Found]) -> list[Found]:
    """The same cases, each kind of layer by itself where there are several."""
    kinds = [(tables.with_kinds(place, "rope"), window) for place, window in found]
    return [(place, window) for places, window in kinds for place in places[1:] or places]


def _number(tables: Tables, column: str, found: Found) -> Number:
    return tables.number("rope", column, *found)


def _gives_half(tables: Tables, found: Found) -> bool:
    return _number(tables, "r_q_rope", found).minus(_number(tables, "r_q", found).half).sign > 0


def _fails(tables: Tables, found: Found) -> bool:
    """Whether r_k lies farther from its prediction than half of that, significantly."""
    return _number(tables, "r_k_excess", found).size.minus(_number(tables, "r_k_rope", found).half.size).sign > 0


def _shares(tables: Tables, found: list[Found]) -> str:
    """` (from 77 % in A to 104 % in B)`: predicted over measured r_q, where that is above 0."""
    shares = []
    for each in found:
        measured = _number(tables, "r_q", each)
        if measured.sign > 0:
            shares.append((_number(tables, "r_q_rope", each).value / measured.value, each[0].said))
    if not shares:
        return ""
    (low, least), (high, most) = min(shares), max(shares)
    return f" ({100 * low:.0f} % of it in {least} to {100 * high:.0f} % in {most})"


def _over_heads(tables: Tables, found: list[Found]) -> str:
    """Whether the prediction tells heads apart; means can agree where heads do not."""
    said = []
    for name in ("r_q", "r_k"):
        known = [(_number(tables, f"{name}_corr", each).value, each[0]) for each in _by_kind(tables, found)]
        known = [(value, place) for value, place in known if value == value]
        if known:
            values, weak = [value for value, _ in known], [place for value, place in known if value < WEAK]
            below = f", below {WEAK} in {tables.grouped(weak)}" if weak else ""
            said.append(f"for {name} {' to '.join(_plain(end) for end in (min(values), max(values)))}{below}")
    if not said:
        return ""
    return f" Means can agree where heads do not: their correlation with the prediction is {'; '.join(said)}."


def _plain(value: float) -> str:
    """A number without an error."""
    return "–" if value != value else f"{value:.2f}".replace("-", "−")


def _rope_table(tables: Tables, corpus: str) -> str:
    rows = []
    for first in tables.places(corpus):
        for place in tables.with_kinds(first, "rope"):
            for window in _known_windows(tables, place):
                row = tables.rows("rope", place)
                row = row[row["window"] == window].iloc[0]
                cells = []
                for name in ("r_q", "r_k"):
                    cells += [str(tables.number("rope", c, place, window)) for c in
                              (name, f"{name}_rope", f"{name}_excess")]  # fmt: skip
                    cells.append(_plain(row[f"{name}_corr"]))
                dominated = " / ".join(f"{100 * row[name]:.0f} %" for name in ("dominated", "dominated_rope"))
                rows.append([place.name, f"{window:,}", f"{int(row['heads'])}", *cells, dominated])
    columns = ["model", "window", "heads", *(cell for name in ("r_q", "r_k") for cell in
               (name, "RoPE alone", "excess", "correlation")), "position-dominated, measured / RoPE alone"]  # fmt: skip
    return table(columns, rows)


def _rope_trend(tables: Tables, known: dict[Place, list[int]]) -> str:
    """Whether the excess is smaller at the longest window than at the shortest, model by model."""
    rows = []
    for model, label in tables.models.items():
        cells = []
        for name in ("r_q", "r_k"):
            marks = []
            for corpus in tables.corpora:
                place = Place(corpus, model, label)
                windows = known.get(place, [])
                ends = [tables.number("rope", f"{name}_excess", place, w).size for w in windows]
                marks.append(MARKS[ends[-1].minus(ends[0]).sign] if len(windows) > 1 else "·")
            cells.append(" ".join(marks))
        rows.append([label, *cells])
    order = listed([spoken(corpus) for corpus in tables.corpora])
    return (
        "The size of the excess from the shortest window to the longest, on "
        f"{order} in this order: + larger, − smaller, 0 not significant, · not known.\n\n"
        + table(["model", "of r_q", "of r_k"], rows)
    )


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


SECTIONS = {"rope": rope}
