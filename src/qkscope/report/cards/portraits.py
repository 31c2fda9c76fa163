"""Card of figure 6: the cloud of heads at selected checkpoints."""

from qkscope.analysis.results import Checkpoint
from qkscope.analysis.taxonomy import CONTENT_FOCUSED, POSITION_DOMINATED
from qkscope.report.cards.frame import (
    Card,
    CardInput,
    context_takeaway,
    opening,
    readings,
    script_step,
    table_file,
    undefined_sentence,
)
from qkscope.report.noise import Change
from qkscope.report.phrases import count, label, listed, number, percent, sentence

SPREADS = (("r_q_spread", "r\\_q"), ("r_k_spread", "r\\_k"))


def rq_rk_scatter_grid(given: CardInput) -> Card:
    """Figure 6: phase portraits."""
    models = list(dict.fromkeys(given.reading.portraits["model"]))
    chosen = [c for c in given.checkpoints if c.name in set(models)]
    shows = [
        opening(
            given,
            f"Each point is one head with its r\\_q (across) and r\\_k (up) on PC0, at "
            f"{count(len(chosen), given.noun)} of {len(given.checkpoints)}. Dashed lines are the thresholds of the "
            "taxonomy at 0.3 and 0.7, above and below zero for r\\_k; the solid line is r\\_k = 0. All panels share "
            "their axes. Where a model has both, heads of layers without rotary position are triangles.",
        ),
        "\n".join(f"- {_panel(given, chosen, i)}" for i in range(len(chosen))),
        undefined_sentence(given),
        *readings(
            given,
            [("r_q_spread", "the scatter of r\\_q about its median", number),
             ("r_k_spread", "the scatter of r\\_k about its median", number)],
        ),
    ]  # fmt: skip
    wanted = given.results.provenance.get("study")
    by_study = isinstance(wanted, dict) and bool(wanted.get("figure_checkpoints"))
    how = "chosen by the study" if by_study else "first, last and the ends of phases, the rest spread evenly"
    steps = [
        ("Selection", f"{listed([label(c) for c in chosen])} ({how})."),
        ("Drawing", "matplotlib scatter; r\\_q from −0.05 to 1.05, r\\_k from −1.05 to 1.05 in every panel."),
        script_step("smollm_fig07_rq_rk_scatter_grid"),
    ]
    headline = "r\\_q vs r\\_k Phase Portraits at Selected Checkpoints"
    if given.study.different_models:
        headline = "r\\_q vs r\\_k Phase Portraits of Selected Models"
    headline += " at a Common Window" if given.matched else ""
    return Card(headline, shows, table_file(given), steps, _takeaway(given, chosen))


def _panel(given: CardInput, chosen: list[Checkpoint], index: int) -> str:
    here = chosen[index]
    corner = given.panel.mean(POSITION_DOMINATED, here.name)
    against = given.panel.mean("discordant", here.name)
    if index == 0 or given.study.different_models:
        box = given.panel.mean(CONTENT_FOCUSED, here.name)
        return (
            f"**{label(here)}**: {percent(corner)} of heads are in the position-dominated corners, {percent(box)} in "
            f"the content-focused box, and {percent(against)} are discordant (r\\_k below −0.3)."
        )
    before = chosen[index - 1]
    said = [
        f"position-dominated {_moved(given, POSITION_DOMINATED, before, here, percent(corner))}",
        f"discordant {_moved(given, 'discordant', before, here, percent(against))}",
    ]
    shape = [
        f"{name} {'scatters wider' if change.direction > 0 else 'tightens'}"
        for quantity, name in SPREADS
        if (change := given.panel.change(quantity, before.name, here.name)).direction
    ]
    tail = f"; {listed(shape)}" if shape else "; the scatter of the cloud does not change by more than its noise"
    return f"**{label(here)}**: {', '.join(said)}{tail}."


def _moved(given: CardInput, quantity: str, before: Checkpoint, here: Checkpoint, value: str) -> str:
    direction = given.panel.change(quantity, before.name, here.name).direction
    return {1: f"up to {value}", -1: f"down to {value}", 0: f"unchanged within noise at {value}"}[direction]


def _takeaway(given: CardInput, chosen: list[Checkpoint]) -> list[str]:
    first, last = chosen[0], chosen[-1]
    if first is last:
        return [_panel(given, chosen, 0)]
    if given.study.different_models:
        corners = [(given.panel.mean(POSITION_DOMINATED, c.name), c) for c in chosen]
        low, high = min(corners, key=lambda c: c[0]), max(corners, key=lambda c: c[0])
        return [
            f"The position-dominated corners hold between {percent(low[0])} ({label(low[1])}) and {percent(high[0])} "
            f"({label(high[1])}) of heads."
        ]
    span = f"from {label(first)} to {label(last)}"
    return [
        _shape_sentence(given, first, last, span),
        _corner_sentence(given.panel.change(POSITION_DOMINATED, first.name, last.name), span),
        _discordant_sentence(given.panel.change("discordant", first.name, last.name)),
        context_takeaway(given, [quantity for quantity, _ in SPREADS]),
    ]


def _shape_sentence(given: CardInput, first: Checkpoint, last: Checkpoint, span: str) -> str:
    table = given.reading.trajectory.set_index("model")
    texts = []
    for quantity, name in SPREADS:
        column = f"{quantity.removesuffix('_spread')}_std"
        old, new = float(table[column][first.name]), float(table[column][last.name])
        direction = given.panel.change(quantity, first.name, last.name).direction
        if direction == 0:
            texts.append(f"the scatter of {name} does not change by more than its noise")
        else:
            verb = "widens" if direction > 0 else "tightens"
            texts.append(f"{name} {verb} (standard deviation over heads {number(old)} to {number(new)})")
    return sentence(f"{span}, {listed(texts)}")


def _corner_sentence(change: Change, span: str) -> str:
    if change.direction == 0:
        return "The position-dominated corners hold the same share of heads, within noise."
    verb = "fill" if change.direction > 0 else "empty"
    return f"The position-dominated corners {verb}, from {percent(change.before)} to {percent(change.after)} of heads."


def _discordant_sentence(change: Change) -> str:
    if change.direction == 0:
        values = f"{percent(change.before)} and {percent(change.after)}"
        return f"The share of discordant heads does not change by more than its noise ({values})."
    verb = "grow" if change.direction > 0 else "shrink"
    return f"Discordant heads {verb} from {percent(change.before)} to {percent(change.after)}."
