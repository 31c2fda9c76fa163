"""The section of docs/findings.md about the rotated-mean prediction."""

from __future__ import annotations

from collections.abc import Callable

from findings_numbers import Number, Part, Place, Tables, cases, spoken, table
from findings_position import models, side_by_side

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
            "The prediction rotates the mean and covariance of a head's queries and keys before RoPE, which are "
            "learned, as if they did not depend on position ([lenses/rope.md](lenses/rope.md)). Excess = measured − "
            "predicted. Positive: hidden states carry additional positional information. Negative: they counteract "
            "it. Correlations: of measured and predicted r_q, r_k over heads. Rows: the shortest window with a "
            "prediction, and the longest. The predicted r is the measured one minus the excess.",
            _rope_table(tables),
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
    """How much of r_q is predicted at both ends, where the prediction fails for keys, and how well it orders heads."""
    mostly = [[each for each in found if _gives_half(tables, each)] for found in (long, short)]
    everywhere = [len(some) == len(found) for some, found in zip(mostly, (long, short), strict=True)]
    title = (
        "The rotated-mean prediction explains part of r_q." if not everywhere[0]
        else "The rotated-mean prediction explains most of r_q." if everywhere[1]
        else "The rotated-mean prediction explains most of r_q at the longest window."
    )  # fmt: skip
    said = (
        f"**{title}** It gives more than half of mean r_q in {len(mostly[0])} of {cases(len(long))} at the longest "
        f"window{_shares(tables, long)}, and in {len(mostly[1])} at the shortest."
    )
    return f"{said}{_failures(tables, short, long)}{_over_heads(tables, long)}"


def _failures(tables: Tables, short: list[Found], long: list[Found]) -> str:
    """Where the prediction is of no use for keys."""
    ends = (("longest", long), ("shortest", short))
    fails = {end: [each[0] for each in _by_kind(tables, found) if _fails(tables, each)] for end, found in ends}
    named = [f"at the {end} window in {tables.grouped(places)}" for end, places in fails.items() if places]
    if not named:
        return " For keys it is never off by more than half of the prediction."
    return f" For keys it fails (off by more than half of the prediction) {' and '.join(named)}."


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
    """` (77% in A to 104% in B)`: predicted over measured r_q, where that is above 0."""
    shares = []
    for each in found:
        measured = _number(tables, "r_q", each)
        if measured.sign > 0:
            shares.append((_number(tables, "r_q_rope", each).value / measured.value, each[0].said))
    if not shares:
        return ""
    (low, least), (high, most) = min(shares), max(shares)
    return f" ({100 * low:.0f}% in {least} to {100 * high:.0f}% in {most})"


def _over_heads(tables: Tables, found: list[Found]) -> str:
    """How well the prediction orders heads; means can agree where heads do not."""
    said = []
    for name in ("r_q", "r_k"):
        known = [(_number(tables, f"{name}_corr", each).value, each[0]) for each in _by_kind(tables, found)]
        known = [(value, place) for value, place in known if value == value]
        if known:
            values, weak = [value for value, _ in known], [place for value, place in known if value < WEAK]
            below = f", below {WEAK} in {tables.grouped(weak)}" if weak else ""
            said.append(f"{' to '.join(_plain(end) for end in (min(values), max(values)))} ({name}){below}")
    if not said:
        return ""
    return f" Over heads, measured and predicted r correlate at {' and '.join(said)}."


def _plain(value: float) -> str:
    """A number without an error."""
    return "–" if value != value else f"{value:.2f}".replace("-", "−")


def _rope_table(tables: Tables) -> str:
    """A row for each model, layer type and end, with the corpora side by side."""
    rows, names = [], []
    for place in models(tables, "rope"):
        windows = {w for corpus in tables.corpora for w in _known_windows(tables, tables.other(place, corpus))}
        for window in _ends(sorted(windows)):

            def excess(name: str, window: int = window) -> Callable[[Place], str]:
                return lambda where: str(tables.number("rope", f"{name}_excess", where, window))

            def correlation(where: Place, window: int = window) -> str:
                both = (_number(tables, f"{name}_corr", (where, window)).value for name in ("r_q", "r_k"))
                return ", ".join(_plain(each) for each in both)

            columns = {"excess of r_q": excess("r_q"), "excess of r_k": excess("r_k"), "correlations": correlation}
            names, cells = side_by_side(tables, columns, [place])
            heads = max(_number(tables, "heads", (tables.other(place, c), window)).value for c in tables.corpora)
            rows.append([f"{place.name}, {heads:.0f} heads", f"{window:,}", *cells[0]])
    return table(["model", "window", *names], rows)


def _ends(windows: list[int]) -> list[int]:
    """The shortest and the longest; the kept tables have all."""
    return sorted({windows[0], windows[-1]}) if windows else []


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
        f"Size of the excess from the shortest to the longest window, on {order} (in this order): + grows, − shrinks, "
        "0 not significant, · unknown.\n\n" + table(["model", "of r_q", "of r_k"], rows)
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
