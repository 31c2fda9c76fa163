"""Card of figure 6: the cloud of heads at selected checkpoints."""

from qkscope.lenses.card import (
    Card,
    Subject,
    context_takeaway,
    error_bars,
    opening,
    table_file,
    tell_short,
    undefined_sentence,
    window_agreement,
)
from qkscope.lenses.claims.words import held
from qkscope.lenses.taxonomy.table import CONTENT_FOCUSED, POSITION_DOMINATED
from qkscope.results.read import Entry
from qkscope.stats.significance import Significance
from qkscope.text import counted
from qkscope.words.blocks import Block, Run, Strong, bullet, plain
from qkscope.words.phrases import label, listed, number, percent, shown

SPREADS = (("r_q_spread", "r_q"), ("r_k_spread", "r_k"))


def rq_rk_scatter_grid(subject: Subject) -> Card:
    """Figure 6: phase portraits."""
    models = list(dict.fromkeys(subject.table("portraits")["model"]))
    chosen = [c for c in subject.checkpoints if c.name in set(models)]
    shows: list[Block | str] = [
        opening(
            subject,
            f"Each point is one head with its r_q (across) and r_k (up) on PC0, for "
            f"{counted(len(chosen), subject.noun)} of {len(subject.checkpoints)}. Dashed lines are the thresholds of "
            "the taxonomy at 0.3 and 0.7, above and below zero for r_k; the solid line is r_k = 0. All panels share "
            f"their axes.{_marks(subject)}"
            + error_bars(subject, "portraits", ("r_q", "r_k"), "Faint crosses"),
        ),
        *(bullet(*_panel(subject, chosen, i)) for i in range(len(chosen))),
        undefined_sentence(subject),
        *window_agreement(
            subject,
            [("r_q_spread", "the mean distance of r_q from its median", number),
             ("r_k_spread", "the mean distance of r_k from its median", number)],
        ),
        *held(subject, "rq_rk_scatter_grid"),
    ]  # fmt: skip
    wanted = subject.files.provenance.study
    by_study = wanted is not None and bool(wanted.figure_checkpoints)
    how = "chosen by the study" if by_study else _choice(subject, chosen)
    steps = [
        ("Selection", f"{listed([label(c) for c in chosen])} ({how})."),
    ]
    which = "at Selected Checkpoints" if subject.study.one_run else f"of Selected {subject.noun.title()}s"
    headline = f"r_q vs r_k Phase Portraits {which}"
    drawing = "matplotlib scatter; r_q from −0.05 to 1.05, r_k from −1.05 to 1.05 in every panel"
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject, chosen), drawing)


def _panel(subject: Subject, chosen: list[Entry], index: int) -> tuple[Run, ...]:
    here = chosen[index]
    corner = subject.panel.mean(POSITION_DOMINATED, here.name)
    against = subject.panel.mean("discordant", here.name)
    if index == 0 or not subject.study.one_run:
        box = subject.panel.mean(CONTENT_FOCUSED, here.name)
        return Strong(label(here)), (
            f": {percent(corner)} of heads are in the position-dominated corners, {percent(box)} in "
            f"the content-focused box, and {percent(against)} are discordant (r_k below −0.3)."
        )
    before = chosen[index - 1]
    said = [_moved(subject, q, before, here) for q in (POSITION_DOMINATED, "discordant")]
    shape = [
        f"{name} {'scatters wider' if change.direction > 0 else 'tightens'}"
        for quantity, name in SPREADS
        if (change := subject.panel.change(quantity, before.name, here.name)).direction
    ]
    return Strong(label(here)), f": {', '.join(said)}{f'; {listed(shape)}' if shape else ''}."


def _moved(subject: Subject, quantity: str, before: Entry, here: Entry) -> str:
    """How a share differs from the panel before."""
    change = subject.panel.change(quantity, before.name, here.name)
    if change.direction == 0:
        unknown = change.outcome is Significance.UNKNOWN
        return f"{quantity} {percent(change.after)} ({'error unknown' if unknown else 'no different within noise'})"
    old, new = shown(percent, change.before, change.after)
    return f"{quantity} {'up' if change.direction > 0 else 'down'} from {old} to {new}"


def _choice(subject: Subject, chosen: list[Entry]) -> str:
    if len(chosen) == len(subject.checkpoints):
        return "all there are"
    return "first, last and the ends of phases, the rest spread evenly"


def _marks(subject: Subject) -> str:
    kinds = [kind for kind in dict.fromkeys(subject.table("portraits")["layer_kind"]) if kind]
    return f" Marks tell layers apart: {'; '.join(kinds)}." if len(kinds) > 1 else ""


def _takeaway(subject: Subject, chosen: list[Entry]) -> list[str]:
    if len(chosen) == 1:
        return [plain(_panel(subject, chosen, 0))]
    if not subject.study.one_run:
        return [
            tell_short(subject, POSITION_DOMINATED, "The share of heads in the position-dominated corners", percent),
            tell_short(subject, "discordant", "The share of discordant heads", percent),
        ]
    return [
        *(_scatter_sentence(subject, quantity, name) for quantity, name in SPREADS),
        tell_short(subject, POSITION_DOMINATED, "The share of heads in the position-dominated corners", percent),
        tell_short(subject, "discordant", "The share of discordant heads", percent),
        context_takeaway(subject, [quantity for quantity, _ in SPREADS]),
    ]


def _scatter_sentence(subject: Subject, quantity: str, name: str) -> str:
    return tell_short(subject, quantity, f"The mean distance of {name} from its median", number)
