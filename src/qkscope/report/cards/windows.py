"""Card of figure 9: what the window does to the same weights."""

from dataclasses import dataclass

from qkscope.analysis import schema
from qkscope.analysis.results import Checkpoint
from qkscope.analysis.taxonomy import POSITION_DOMINATED
from qkscope.report.cards.frame import Card, CardInput, rows, script_step
from qkscope.report.noise import Change, HeadPanel
from qkscope.report.phrases import Format, count, label, number, percent, tokens, went

QUANTITIES: tuple[tuple[str, str, Format], ...] = (
    ("r_q", "mean r\\_q", number),
    ("r_k", "mean r\\_k", number),
    (POSITION_DOMINATED, "the share of position-dominated heads", percent),
)


@dataclass(frozen=True)
class WindowEffect:
    """One checkpoint from its shortest to its longest window, the same heads."""

    checkpoint: Checkpoint
    shortest: int
    longest: int
    changes: dict[str, Change]


def window_effects(given: CardInput) -> list[WindowEffect]:
    """The effect of the window on each checkpoint that was measured at more than one."""
    windows = given.results.windows
    if windows is None:
        return []
    effects = []
    for checkpoint in given.study.checkpoints:
        rows_here = windows[windows["model"] == checkpoint.name]
        sizes = sorted({int(w) for w in rows_here["window"]})
        if len(sizes) < 2:
            continue
        ends = rows_here[rows_here["window"].isin([sizes[0], sizes[-1]])]
        panel = HeadPanel(ends.assign(model=ends["window"].astype(int).astype(str)), same_heads=True)
        changes = {q: panel.change(q, str(sizes[0]), str(sizes[-1])) for q, _, _ in QUANTITIES}
        effects.append(WindowEffect(checkpoint, sizes[0], sizes[-1], changes))
    return effects


def window_dependence(given: CardInput) -> Card:
    """Figure 9: measures against the length of the prefix window."""
    effects = window_effects(given)
    shows = [
        "Mean r\\_q, mean r\\_k, the share of position-dominated heads and the share of discordant heads on PC0 "
        "against the window, that is how many leading tokens of each document are analysed (log axis). One line for "
        f"each of {rows(given)}; along a line the weights do not change. A filled marker is the checkpoint's own "
        "context.",
        *_last_effect(effects),
        *_counted(given, effects),
    ]
    steps = [
        (
            "Aggregation",
            "the same per-head analysis over prefix windows of one capture; means and shares over the heads of each "
            "(checkpoint, window).",
        ),
        script_step(None),
    ]
    return Card("Dependence on the Window", shows, schema.QK_WINDOWS_CSV, steps, _takeaway(given, effects))


def _last_effect(effects: list[WindowEffect]) -> list[str]:
    if not effects:
        return ["Each checkpoint was measured at one window only, so nothing can be said about the window."]
    last = effects[-1]
    said = [f"{name} {went(last.changes[q], fmt)}" for q, name, fmt in QUANTITIES]
    return [
        f"With the weights of {label(last.checkpoint)}, from {last.shortest:,} to {tokens(last.longest)}: "
        f"{'; '.join(said)}."
    ]


def _counted(given: CardInput, effects: list[WindowEffect]) -> list[str]:
    if len(effects) < 2:
        return []
    ways = {e.changes[quantity].direction for e in effects for quantity, _, _ in QUANTITIES}
    if len(ways) == 1 and 0 not in ways:
        verb = "higher" if ways == {1} else "lower"
        return [f"All three are {verb} at the longest window than at the shortest, at every {given.noun}."]
    said = []
    for quantity, name, _ in QUANTITIES:
        up = sum(e.changes[quantity].direction > 0 for e in effects)
        down = sum(e.changes[quantity].direction < 0 for e in effects)
        said.append(f"{name} is higher there at {up} and lower at {down} of {count(len(effects), given.noun)}")
    text = "; ".join(said)
    return [f"The longest window against the shortest: {text}."]


def _takeaway(given: CardInput, effects: list[WindowEffect]) -> list[str]:
    if not effects:
        return ["There is one window per checkpoint, so its effect cannot be read from this figure."]
    last = effects[-1]
    change = last.changes[POSITION_DOMINATED]
    if change.direction == 0:
        said = [
            f"The share of position-dominated heads of {label(last.checkpoint)} does not depend on the window beyond "
            f"noise, between {last.shortest:,} and {tokens(last.longest)}."
        ]
    else:
        said = [
            f"The same weights of {label(last.checkpoint)} have {percent(change.before)} position-dominated heads at "
            f"{tokens(last.shortest)} and {percent(change.after)} at {tokens(last.longest)}, so shares can only be "
            "compared at one window."
        ]
    panel = given.matched_panel or given.own_panel
    names = [c.name for c in given.study.checkpoints]
    held = given.matched_panel is not None or len(set(given.windows.values())) == 1
    if held and len(names) > 1 and not given.study.different_models:
        training = panel.change(POSITION_DOMINATED, names[0], names[-1])
        larger = change.direction and abs(change.difference) > abs(training.difference)
        if larger or training.direction:
            ends = f"from {label(given.study.checkpoints[0])} to {label(given.study.checkpoints[-1])}"
            said.append(
                f"At one window, the change {ends} is {'smaller' if larger else 'larger'} than that: "
                f"{percent(training.before)} to {percent(training.after)}."
            )
    return said
