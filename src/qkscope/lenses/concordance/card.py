"""Card of figure 7: what mean r_k hides."""

from qkscope.lenses.card import (
    Card,
    Subject,
    error_bars,
    opening,
    pooled_kinds,
    rows,
    table_file,
    tell_curve,
    tell_short,
    window_agreement,
)
from qkscope.lenses.claims.words import held
from qkscope.lenses.named_entries import at_or_in
from qkscope.lenses.position.card import sign_sentence
from qkscope.stats.findings import Step
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, number, percent, shortened, shown, went, where


def concordance(subject: Subject) -> Card:
    """Figure 7: concordant and discordant keys, mean |r_k| against mean r_k."""
    shows: list[Block | str] = [
        opening(
            subject,
            f"Above, for {rows(subject)}: the share of heads whose keys clearly drift along PC0 in the direction of "
            "their queries (r_k above 0.3, upwards) and against it (r_k below −0.3, downwards, hatched). Below: "
            f"mean r_k (red squares) and mean |r_k| (diamonds{', dashed' if subject.study.one_run else ''}); what "
            "lies between them is what opposite signs cancel."
            + error_bars(subject, "concordance", ("concordant", "discordant", "r_k", "r_k_abs")),
        ),
        paragraph(Strong("Against."), " ", tell_curve(subject, "discordant", "The share of discordant heads", percent)),
        paragraph(Strong("With."), " ", tell_curve(subject, "concordant", "The share of concordant heads", percent)),
        paragraph(Strong("Strength."), " ", tell_curve(subject, "r_k_abs", "Mean |r_k|", number)),
        *_unsure(subject),
        pooled_kinds(subject),
        *_falls(subject),
        *window_agreement(
            subject, [("discordant", "the share of discordant heads", percent), ("r_k_abs", "mean |r_k|", number)]
        ),
        *held(subject, "concordance"),
    ]
    steps = [
        (
            "Aggregation",
            f"heads with r_k > 0.3 and with r_k < −0.3 over all heads of the {subject.noun}; mean of r_k and of "
            "|r_k| over heads. The sign is that of r_k after PC0 is turned so that r_q is not negative.",
        ),
    ]
    headline = f"Concordant and Discordant Keys {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject))


def _unsure(subject: Subject) -> list[str]:
    """How many heads the shares leave out."""
    table = subject.table("concordance")
    heads = (table["sign_unsure"] * table["heads"]).round()
    if not heads.any():
        return []
    most = table.iloc[int(heads.to_numpy().argmax())]
    name = shortened(subject.study.labels[str(most["model"])])
    return [
        f"Heads whose r_q does not differ significantly from 0 are left out of both shares, because their sign is not "
        f"known: at most {counted(int(heads.max()), 'head')} of {int(most['heads'])}, {at_or_in(subject.study)} {name}."
    ]


def _falls(subject: Subject) -> list[str]:
    """Each clear fall of mean r_k, and what stands behind it."""
    if not subject.study.one_run:
        return []
    said = []
    for step in subject.curve("r_k").jumps:
        if step.change.direction < 0:
            said.append(f"{_fall(subject, step)} {sign_sentence(subject, step)}".strip())
    return said[:3]


def _fall(subject: Subject, step: Step) -> str:
    extra = where(step.before, step.after, subject.windows)
    return f"Mean r_k {went(step.change, number)} between {label(step.before)} and {label(step.after)}{extra}."


def _takeaway(subject: Subject) -> list[str]:
    table = subject.table("concordance")
    gap = table["r_k_abs"] - table["r_k"]
    if gap.isna().all():
        return ["No head has a defined r_k."]
    widest = table.iloc[int(gap.fillna(-1.0).to_numpy().argmax())]
    size, mean = shown(number, float(widest["r_k_abs"]), float(widest["r_k"]))
    name = shortened(subject.study.labels[str(widest["model"])])
    said = [
        f"The sign matters most {at_or_in(subject.study)} {name}: mean |r_k| is {size} and mean r_k only {mean}."
        if float(widest["r_k_abs"]) - float(widest["r_k"]) >= 0.005
        else "Hardly any key runs against its queries, so mean r_k and mean |r_k| tell the same story."
    ]
    if len(subject.checkpoints) > 1:
        said.append(tell_short(subject, "discordant", "The share of discordant heads", percent))
    return said
