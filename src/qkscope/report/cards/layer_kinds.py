"""Card of figure 8: rotary and NoPE layers apart."""

from qkscope.analysis.results import Checkpoint
from qkscope.analysis.schema import NOPE, ROTARY
from qkscope.report.cards.frame import Card, CardInput, opening, script_step, table_file
from qkscope.report.noise import Change, Part
from qkscope.report.phrases import Format, count, label, listed, number, percent, sentence

KINDS = ((Part(rotary=ROTARY), "rotary layers"), (Part(rotary=NOPE), "NoPE layers"))
QUANTITIES: tuple[tuple[str, str, Format], ...] = (
    ("r_q", "mean r\\_q", number),
    ("r_k", "mean r\\_k", number),
    ("discordant", "the share of discordant heads", percent),
)


def rope_vs_nope(given: CardInput) -> Card:
    """Figure 8: the two kinds of layers over the checkpoints that have both."""
    assert given.tables.rope_vs_nope is not None
    models = set(given.tables.rope_vs_nope["model"])
    both = [c for c in given.checkpoints if c.name in models]
    shows = [
        opening(
            given,
            "Mean r\\_q, mean r\\_k and the share of discordant heads (r\\_k below −0.3) on PC0, apart for layers with "
            "rotary position (circles) and without (NoPE, triangles and dashed), for "
            f"{count(len(both), given.noun)} with both kinds. Bands are ± 1 standard deviation over heads.",
        ),
        *[f"**{sentence(name)[:-1]}.** {_compare(given, both, q, fmt)}" for q, name, fmt in QUANTITIES],
    ]
    heads = given.tables.rope_vs_nope.groupby("rotary")["heads"].max()
    steps = [
        (
            "Aggregation",
            f"means over the heads of rotary layers ({int(heads[ROTARY])} heads) and of NoPE layers "
            f"({int(heads[NOPE])}) apart.",
        ),
        script_step(None),
    ]
    headline = f"Rotary and NoPE Layers {given.study.span.title()}"
    return Card(headline, shows, table_file(given), steps, _takeaway(given, both))


def _gap(given: CardInput, quantity: str, checkpoint: Checkpoint) -> Change:
    return given.panel.contrast(quantity, checkpoint.name, KINDS[0][0], KINDS[1][0])


def _gap_words(gap: Change, fmt: Format) -> str:
    values = f"{fmt(gap.after)} in NoPE layers against {fmt(gap.before)} in rotary layers"
    return f"{values}, no difference beyond noise" if gap.direction == 0 else values


def _compare(given: CardInput, both: list[Checkpoint], quantity: str, fmt: Format) -> str:
    first, last = both[0], both[-1]
    text = f"At {label(first)}: {_gap_words(_gap(given, quantity, first), fmt)}."
    if first is last or given.study.different_models:
        return text
    text += f" At {label(last)}: {_gap_words(_gap(given, quantity, last), fmt)}."
    words = {1: "rises", -1: "falls", 0: "does not change by more than its noise"}
    directions = [given.panel.change(quantity, first.name, last.name, part).direction for part, _ in KINDS]
    if directions[0] == directions[1]:
        return f"{text} From the one to the other it {words[directions[0]]} in both."
    moved = [f"{words[way]} in {name}" for way, (_, name) in zip(directions, KINDS, strict=True)]
    return f"{text} From the one to the other it {listed(moved)}."


def _takeaway(given: CardInput, both: list[Checkpoint]) -> list[str]:
    said = []
    for quantity, name, fmt in QUANTITIES[:2]:
        ahead = [c for c in both if _gap(given, quantity, c).direction < 0]
        behind = [c for c in both if _gap(given, quantity, c).direction > 0]
        of = f"of {count(len(both), given.noun)}"
        if len(ahead) == len(both):
            text = f"{name} is higher in rotary than in NoPE layers at every {given.noun}"
        elif len(behind) == len(both):
            text = f"{name} is higher in NoPE than in rotary layers at every {given.noun}"
        elif not ahead and not behind:
            text = f"{name} does not differ between rotary and NoPE layers beyond noise"
        elif not behind:
            text = f"{name} is higher in rotary layers at {len(ahead)} {of} and no different beyond noise at the others"
        elif not ahead:
            text = f"{name} is higher in NoPE layers at {len(behind)} {of} and no different beyond noise at the others"
        else:
            text = f"{name} is higher in rotary layers at {len(ahead)} and in NoPE layers at {len(behind)} {of}"
        gap = _gap(given, quantity, both[-1])
        said.append(sentence(f"{text} ({fmt(gap.before)} and {fmt(gap.after)} at {label(both[-1])})"))
    return said
