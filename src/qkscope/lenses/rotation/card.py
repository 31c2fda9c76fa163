"""Cards of the figures with bars: how queries and keys drift along a, and what that adds to a score."""

from qkscope.lenses.card import Card, Subject, opening, rows
from qkscope.lenses.claims.words import held
from qkscope.lenses.named_entries import of_each, opening_place, place
from qkscope.lenses.rotation.chosen import STABLE
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.tell import beyond_zero, errors_said, joined, mean_of, share_of, tell
from qkscope.results.read import Entry
from qkscope.stats.changes import Change
from qkscope.stats.findings import context_changes
from qkscope.stats.means import HeadPanel
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, number, percent, significant, tokens, went

AXES = "both axes are found anew each time"
BARS = (
    "Bars are means over heads, thick grey lines the middle half of heads, thin lines ± 1 standard error over "
    "documents, small marks the means of each kind of layer where there are several."
)


def drift_card(subject: Subject) -> Card:
    """How closely queries and keys follow position along a, and what the plane of a and b holds."""
    panel = subject.at.panel_of(FILE)
    missed = of_each(subject.study, lambda entry: joined(_missed(subject, panel, entry)))
    keys_more = joined(of_each(subject.study, lambda entry: _keys_more(subject, panel, entry)))
    shows: list[Block | str] = [
        opening(
            subject,
            "Axis a is the direction in which queries and keys together drift most with position; axis b, at a right "
            "angle to it, the one in which a query and a key differ most. Above, for "
            f"{rows(subject)}: mean |r| with position along a, of queries (blue) and keys (red), with a dash at the "
            "correlation that each has along its own drift, and the share of the mean squared difference between a "
            "query and a key that lies along b. Below: what share of the variance of queries and keys together lies "
            "along a, along b and elsewhere (the grey line there is of a and b together), and the slope of keys over "
            f"that of queries along a (bars are geometric means, diamonds medians; medians have no error). {BARS}",
        ),
        paragraph(Strong("Drift."), " ", joined(_drift(subject, panel, steps=True))),
        paragraph(Strong("Separation."), " ", tell(subject, panel, "separation_strength", "Mean separation", percent)),
        paragraph(Strong("Variance."), " ", joined(_variance(subject, panel))),
        paragraph(
            Strong("Slopes."),
            " ",
            tell(subject, panel, "slope_ratio_log2", "The slope of keys over that of queries", ratio),
        ),
        paragraph(Strong("What the axes miss."), " ", joined(missed)),
        paragraph(Strong("Does it hold here?"), " ", keys_more),
        errors_said(subject.table(FILE), AXES),
    ]
    steps = [
        ("Axes", "a from the covariance of queries and keys with position; b the leading eigenvector beside it."),
        ("Aggregation", f"means over the heads of each {subject.noun}, |r| and slopes without sign."),
    ]
    headline = f"Drift along a, Separation along b {subject.study.span.title()}"
    takeaway = [*_drift(subject, panel), keys_more]
    return Card(headline, shows, FILE, steps, takeaway)


def ratio(value: float, extra: int = 0) -> str:
    """A ratio, given as its logarithm to base 2."""
    return significant(2.0**value, extra)


def _drift(subject: Subject, panel: HeadPanel, *, steps: bool = False) -> list[str]:
    return [
        tell(subject, panel, f"r_{kind}_a_abs", f"Mean |r| of {name} along a", number, steps=steps)
        for kind, name in (("q", "queries"), ("k", "keys"))
    ]


def _variance(subject: Subject, panel: HeadPanel) -> list[str]:
    return [
        tell(subject, panel, "var_frac_a", "The share of variance along a", percent),
        tell(subject, panel, "var_frac_b", "The share along b", percent),
    ]


def _missed(subject: Subject, panel: HeadPanel, last: Entry) -> list[str]:
    """How much of each drift is elsewhere, whether drifts agree, and in how many heads a is no one direction."""
    table = subject.at.table(FILE)
    said = [
        f"{opening_place(subject.study, last)} axis a misses {share_of(panel, 'off_axis_q', last)} of the queries' "
        f"drift and {share_of(panel, 'off_axis_k', last)} of the keys', and {share_of(panel, 'offset_on_a', last)} of "
        "the squared distance between mean query and mean key lies along it. The cosine between both drifts is "
        f"{mean_of(panel, 'drift_cos', last)}, the mean over heads."
    ]
    if "a_stability" in table.columns:
        known = table.loc[table["model"] == last.name, "a_stability"].dropna()
        turned = int((known < STABLE).sum())
        if len(known):
            said.append(
                f"In {turned} of {counted(len(known), 'head')} axis a turns by a cosine below {STABLE} when one group "
                "of documents is left out: these heads hardly drift, and their axis means little."
            )
    return said


def _keys_more(subject: Subject, panel: HeadPanel, last: Entry) -> str:
    """The published sentence, on axis a and on each kind's own direction."""
    on_axis, own = beyond_zero(panel, "r_a_gap", last), beyond_zero(panel, "r_own_gap", last)
    words = {1: "holds", -1: "is the other way round", 0: "is not decided: the difference is not significant"}
    (keys, queries), (own_keys, own_queries) = (
        [number(panel.mean(name, last.name)) for name in names]
        for names in (("r_k_a_abs", "r_q_a_abs"), ("r_k_own", "r_q_own"))
    )
    return (
        f"Keys follow position more closely than queries: along a this {words[on_axis]} {place(subject.study, last)} "
        f"({keys} against {queries}, difference {mean_of(panel, 'r_a_gap', last)}); each along its own drift it "
        f"{words[own]} ({own_keys} against {own_queries}, difference {mean_of(panel, 'r_own_gap', last)})."
    )


# --- bias ---------------------------------------------------------------------------------------------

PARTS: tuple[tuple[str, str], ...] = (
    ("mu_q_a", "The mean query along a"),
    ("alpha_k_per_1000", "The slope of keys per 1,000 tokens"),
    ("bias_per_1000", "The bias per 1,000 tokens"),
)
OVER: tuple[tuple[str, str], ...] = (
    ("alpha_k_window_abs", "The drift of keys over the window"),
    ("bias_strength_window", "The bias over the window"),
    ("bias_effect", "The bias over the window in standard deviations of a score"),
)


def bias_card(subject: Subject) -> Card:
    """What position adds to a score, per token and over the window, along a and in all directions."""
    panel = subject.at.panel_of(FILE)
    totals = of_each(subject.study, lambda entry: joined(_totals(subject, panel, entry)))
    signs = of_each(subject.study, lambda entry: _sign(subject, panel, entry))
    hidden = hidden_by_slopes(subject)
    shows: list[Block | str] = [
        opening(
            subject,
            "The bias is what the mean score q·k gains with the position of the key: the mean query times the slope of "
            f"the keys. Above, for {rows(subject)}, its two factors along a and their product, per token; below, the "
            "same times the window, and in standard deviations of the score once lines in position are taken out. "
            f"Dashes give the bias in all directions, not along a alone. {BARS} Above 0, later keys score higher.",
        ),
        paragraph(Strong("Per token."), " ", joined([tell(subject, panel, q, name, significant) for q, name in PARTS])),
        paragraph(Strong("Over the window."), " ", joined([tell(subject, panel, q, n, significant) for q, n in OVER])),
        paragraph(Strong("What a slope per token hides."), " ", joined(hidden)),
        paragraph(Strong("Along a, and in all."), " ", joined(totals)),
        errors_said(subject.table(FILE), AXES),
        *held(subject, "rotation_bias"),
    ]
    steps = [
        (
            "Bias",
            "mean query along a times the keys' slope along a; in all directions, the mean query times the slope.",
        ),
        ("Unit", "raw q·k, before the model's own scale; standard deviations do not depend on it."),
        ("Aggregation", f"means over the heads of each {subject.noun}; slopes without sign, biases with theirs."),
    ]
    headline = f"What Position Adds to a Score {subject.study.span.title()}"
    takeaway = [*hidden[:1], tell(subject, panel, *OVER[2], significant), *signs]
    return Card(headline, shows, FILE, steps, takeaway)


def hidden_by_slopes(subject: Subject) -> list[str]:
    """The same change per token, over the window, and at the common window, wherever the window changes."""
    changes = context_changes(subject.files.study.checkpoints, subject.own.table("trajectory"))
    if not changes:
        return [f"Every {subject.noun} has the same window, so that per token and over the window say the same."]
    if not subject.study.one_run:
        panel = subject.own.panel_of(FILE)
        return [
            "Windows differ, and a projection that keeps its spread and its r has a slope in proportion to 1 / window.",
            tell(subject, panel, "bias_per_1000", "The bias per 1,000 tokens", significant),
            tell(subject, panel, "bias_strength_window", "The bias over the window", significant),
        ]
    return [_one_hidden(subject, before, after, windows) for before, after, *windows in changes[:3]]


def _one_hidden(subject: Subject, before: Entry, after: Entry, windows: list[int]) -> str:
    """What bias and slope do at one step."""
    verb = "grows" if windows[1] > windows[0] else "shrinks"
    place = f"From {label(before)} to {label(after)} the window {verb} from {windows[0]:,} to {tokens(windows[1])}"
    bias = _three_ways(subject, before, after, "bias_per_1000", "bias_strength_window")
    slope = _three_ways(subject, before, after, "alpha_k_per_1000", "alpha_k_window_abs")
    return f"{place}. The bias per 1,000 tokens {bias}. The slope of keys per 1,000 tokens {slope}."


def _three_ways(subject: Subject, before: Entry, after: Entry, per_token: str, over: str) -> str:
    """A change per token, over the window, and per token at a window that both share."""
    own = subject.own.panel_of(FILE)
    slope, window = (own.change(name, before.name, after.name) for name in (per_token, over))
    said = f"{went(slope, significant)}{_times(slope)}; over the whole window it {went(window, significant)}"
    if subject.common is None or not {before.name, after.name} <= set(subject.common.names):
        return f"{said}; at one window for both it was not measured"
    shared = subject.common.panel_of(FILE).change(per_token, before.name, after.name)
    common = tokens(subject.common.window_of(before.name))
    return f"{said}; over the first {common} of both, per 1,000 tokens, it {went(shared, significant)}{_times(shared)}"


def _times(change: Change) -> str:
    """`, 3.0 times less`, where both values are above 0 and the change is real."""
    if not change.direction or not (change.before > 0 and change.after > 0):
        return ""
    factor = max(change.before, change.after) / min(change.before, change.after)
    return f", {factor:.2g} times {'more' if change.direction > 0 else 'less'}" if factor >= 1.1 else ""


def _totals(subject: Subject, panel: HeadPanel, last: Entry) -> list[str]:
    """How much of the bias lies along a, and how its sign is spread over heads."""
    along, total = (panel.mean(name, last.name) for name in ("bias_strength_window", "bias_window"))
    said = [
        f"{opening_place(subject.study, last)} the bias over the window is "
        f"{mean_of(panel, 'bias_strength_window', last)} along a and {mean_of(panel, 'bias_window', last)} in all "
        "directions" + (f": axis a has {percent(along / total)} of it." if total and 0 <= along / total <= 1 else ".")
    ]
    said.append(_sign(subject, panel, last))
    table = subject.at.table(FILE)
    opposed = table.loc[table["model"] == last.name, "interaction_total"].dropna()
    if len(opposed):
        said.append(
            f"The slopes of queries and keys point against each other in {percent(float((opposed < 0).mean()))} of "
            "heads (interaction_total below 0): there the bias weakens with the position of the query."
        )
    return said


def _sign(subject: Subject, panel: HeadPanel, last: Entry) -> str:
    way = beyond_zero(panel, "bias_effect", last)
    direction = {1: "later keys score higher", -1: "earlier keys score higher", 0: "neither late nor early keys win"}
    return (
        f"On average over heads {direction[way]}: from the first to the last key the score gains "
        f"{mean_of(panel, 'bias_effect', last)} standard deviations {place(subject.study, last)}; "
        f"{share_of(panel, 'bias_total_positive', last)} of heads favour later keys."
    )
