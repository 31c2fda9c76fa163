"""Cards of the ablation: what goes with the loss, whether chosen heads matter more than random ones, and since when."""

import math

import pandas as pd

from qkscope.lenses.ablation.strength import NAME, STRENGTHS, rank_correlation
from qkscope.lenses.ablation.summary import BEGINS
from qkscope.lenses.ablation.table import (
    COURSE_FILE,
    EDITS,
    FILE,
    GROUPS_FILE,
    documents_of,
    freedom_of_losses,
    grouped_entries,
    last_measured,
    shown_edit,
)
from qkscope.lenses.card import Card, Subject
from qkscope.results.read import Entry
from qkscope.stats.significance import LEVEL, Error, Significance, combined, decide, is_significant
from qkscope.text import counted
from qkscope.words.phrases import decimals_of, label, listed, plus_minus, signed, span

WHOLE = "zero"  # the edit that removes a whole head, whatever it contains
DECIMALS = 4  # of a loss whose error is not known
PASSES = ("Passes", "qkscope ablate: the same documents with and without the edit, loss of every token, paired.")


def ablation_card(subject: Subject) -> Card:
    """What survives: heads whose edit costs something, and what told it beforehand."""
    at = subject.at
    edit, model = shown_edit(at), last_measured(at)
    table = at.table(FILE)
    here = table[(table["model"] == model) & table[f"loss_{edit}"].notna()]
    ranks = at.table(NAME)
    ranks = ranks[(ranks["edit"] == edit) & (ranks["model"] == model)]
    matter = _matter(here, edit, documents_of(at, model, edit), freedom_of_losses(at, model, edit))
    shows = [
        f"Each dot is a head of {label(_entry(subject, model))}: how much the mean loss of the documents' tokens rises "
        f"when an edit takes away {EDITS[edit]}, with its standard error over documents, against measures of how "
        "strongly the head encodes position. The edit of a document comes from other documents. Above each panel: "
        "Spearman's rank correlation over heads with a 95 % interval (bootstrap over layers; in models of few layers, "
        "heads count as independent).",
        matter,
        f"Rank correlations with the loss: {'; '.join(_named_correlation(row) for _, row in ranks.iterrows())}.",
        "A head is edited alone, so what several heads do together, or in each other's place, is not in these numbers.",
    ]
    steps = [PASSES, ("Aggregation", f"one row per head; rank correlations in tables/{NAME}.csv.")]
    return Card("Does It Matter?", [text for text in shows if text], FILE, steps, [matter, best_sentence(ranks)])


def _entry(subject: Subject, name: str) -> Entry:
    return next(each for each in subject.checkpoints if each.name == name)


def _matter(heads: pd.DataFrame, edit: str, documents: int | None, freedom: float) -> str:
    loss, error = heads[f"loss_{edit}"], heads[f"loss_{edit}_se"]
    if error.isna().all():
        return f"{counted(len(heads), 'head')} were edited; too few documents for errors, so nothing is claimed."
    beyond = is_significant(loss, error, freedom) == 1
    worse, better = int((beyond & (loss > 0)).sum()), int((beyond & (loss < 0)).sum())
    largest = heads.iloc[int(loss.argmax())]
    chance = ""
    if documents is not None:
        chance = f"; over {documents} documents, about {len(heads) * LEVEL / 2:.0f} would do each by chance"
    return (
        f"Of {counted(len(heads), 'head')}, {worse} cost loss significantly when edited, and {better} "
        f"gain{chance}. The largest rise is {plus_minus(largest[f'loss_{edit}'], largest[f'loss_{edit}_se'])} nats "
        f"per token, of L{int(largest['layer'])}H{int(largest['head'])}."
    )


def _named_correlation(row: "pd.Series[float]") -> str:
    return f"{STRENGTHS[str(row['strength'])]}: {rank_correlation(row)}"


def best_sentence(ranks: pd.DataFrame) -> str:
    """The measure that goes with the loss most, if any does beyond its interval, and which others it exceeds."""
    if ranks.empty:
        return ""
    best = ranks.iloc[int(ranks["rho"].abs().argmax())]
    name = STRENGTHS[str(best["strength"])]
    if ((ranks["low"] <= 0.0) & (ranks["high"] >= 0.0)).all():
        return "No measure of strength here goes with the loss: every interval holds 0."
    if best["low"] <= 0.0 <= best["high"]:
        return f"The largest rank correlation, of {name}, has an interval that holds 0: which goes best is not decided."
    others = ranks[ranks["strength"] != best["strength"]]
    beaten = [STRENGTHS[str(each)] for each in others[others["behind_low"] > 0.0]["strength"]]
    open_ = [STRENGTHS[str(each)] for each in others[~(others["behind_low"] > 0.0)]["strength"]]
    said = f"What goes with the loss most is {name}: rank correlation {signed(best['rho'])}."
    if beaten:
        said += f" It goes with it more than {listed(beaten)}, beyond the interval of the difference."
    if open_:
        said += f" Whether it goes with it more than {listed(open_)} is not decided."
    return said


def groups_card(subject: Subject) -> Card:
    """Whether the chosen heads matter more than others."""
    at = subject.at
    models, table = grouped_entries(at), at.table(GROUPS_FILE)
    parts = [(_entry(subject, model), table[table["model"] == model]) for model in models]
    draws = sorted({int(count) for _, part in parts for count in part["draws"]})
    shows = [
        "Heads that were chosen are edited together, and beside them other heads, "
        f"{' or '.join(map(str, draws))} draws at random with as many heads in each layer. Left: how much the mean "
        "loss "
        "rises. Right: the difference between both with its 95 % interval over documents and draws.",
        *(sentence for entry, part in parts for sentence in _of_entry(label(entry), part)),
        "Where a layer has too few other heads, controls hold some of the chosen ones: differences become smaller.",
    ]
    steps = [PASSES, ("Comparison", "chosen minus the mean of the controls, document by document; Welch's interval.")]
    takeaways = [
        f"{label(entry)}: {verdict(part[part['outcome'] == 'all'])}" if len(parts) > 1
        else verdict(part[part["outcome"] == "all"])
        for entry, part in parts
    ]  # fmt: skip
    return Card("Chosen Heads against Random Heads", shows, GROUPS_FILE, steps, takeaways)


def _of_entry(name: str, here: pd.DataFrame) -> list[str]:
    """What is said of one entry's groups: every edit, and of the first edit the other outcomes, too."""
    every = here[here["outcome"] == "all"]
    other = here[(here["outcome"] != "all") & ~here["outcome"].str.startswith(("positions", "attention"))]
    chosen = listed(list(dict.fromkeys(every["group"])))
    return [
        f"{name}: chosen are {chosen}.",
        *(_compared(row) for _, row in every.iterrows()),
        *(_compared(row) for _, row in other[other["edit"] == every["edit"].iloc[0]].iterrows()),
    ]


def _compared(row: "pd.Series[float]") -> str:
    what = f"{row['edit']} of {row['group']} ({counted(int(row['heads']), 'head')})"
    if str(row["outcome"]) != "all":
        what += f", {row['outcome']}"
    error, low, high = (float(row[name]) for name in ("excess_se", "low", "high"))
    decimals = decimals_of(error) if error > 0 else DECIMALS
    chosen, controls = (signed(row[name], decimals) for name in ("chosen", "controls"))
    numbers = f"{chosen} against {controls} for random heads"
    if math.isnan(low):
        return f"{what}: {numbers}; too few documents or draws for an interval, so nothing is claimed."
    side = "more" if low > 0 else "less" if high < 0 else "not told apart"
    apart = f"difference {plus_minus(row['excess'], error, signed=True)} ({span(low, high, decimals)})"
    return f"{what}: {numbers}; {apart}: {side}."


def verdict(every: pd.DataFrame) -> str:
    """For each group, whether it matters more than random heads: under `zero`, which removes the whole head.

    Other edits remove more from some heads than from others, so they do not compare heads at one dose.
    """
    said = []
    for group, rows in every.groupby("group", sort=False):
        whole = rows[rows["edit"] == WHOLE]
        others = list(rows.loc[~rows["edit"].isin((WHOLE, "nothing")), "edit"])
        if len(whole):
            said.append(f"Heads chosen as {group}: {_under_zero(whole.iloc[0])}.")
        if others:
            said.append(
                f"Differences of {group} heads under {listed(others)} are not matched for how much these edits remove "
                "from a head."
            )
    return " ".join(said)


def _under_zero(row: "pd.Series[float]") -> str:
    low, high = float(row["low"]), float(row["high"])
    if math.isnan(low):
        return "too few documents or draws for an interval, so nothing is claimed"
    matter = "matter more than" if low > 0 else "matter less than" if high < 0 else "do not differ significantly from"
    return f"under {WHOLE} they {matter} random heads ({plus_minus(row['excess'], row['excess_se'], signed=True)})"


def course_card(subject: Subject) -> Card:
    """Since when heads' position matters."""
    at = subject.at
    course, begins = at.table(COURSE_FILE), at.table(BEGINS)
    edits = [edit for edit in EDITS if edit in set(begins["edit"])]
    said = [_course(subject, course[course["edit"] == edit], begins[begins["edit"] == edit], edit) for edit in edits]
    shows = [
        "The same ablation at several checkpoints. Left: the mean over heads, each edited alone, of how much the loss "
        "rises, with its standard error over documents. Right: how many heads cost significantly "
        "(solid), and of these how many do so at every later checkpoint, too (dashed): they have begun to matter. "
        f"By chance, {100 * LEVEL / 2:.1f} % of heads cost that much at a checkpoint.",
        *said,
    ]
    steps = [PASSES, ("Aggregation", f"{COURSE_FILE}, and tables/{BEGINS}.csv.")]
    return Card("When Does It Begin to Matter?", shows, COURSE_FILE, steps, said)


def _course(subject: Subject, course: pd.DataFrame, begins: pd.DataFrame, edit: str) -> str:
    entries = {entry.name: label(entry) for entry in subject.checkpoints}
    first, last = course.iloc[0], course.iloc[-1]
    mean = (
        f"{edit}: the mean over heads goes from {plus_minus(first['mean'], first['mean_se'])} at "
        f"{entries[str(first['model'])]} to {plus_minus(last['mean'], last['mean_se'])} nats per token at "
        f"{entries[str(last['model'])]}"
    )
    error = combined(*(Error(float(end["mean_se"]), float(end["documents"]) - 1) for end in (first, last)))
    outcome = decide(float(last["mean"] - first["mean"]), error, smallest=0.0)
    if outcome is not Significance.CHANGED:
        mean += ", which is not significant" if outcome is Significance.UNCHANGED else " (error of the change unknown)"
    heads, end = int(begins["heads"].iloc[0]), begins.iloc[-1]
    matter = int(end["so_far"])
    said = f"{mean}. Of {counted(heads, 'head')}, {matter} matter at the end"
    if not matter:
        return f"{said}."
    when = begins[begins["begin"] > 0]
    places = [f"{entries[str(name)]} ({count})" for name, count in zip(when["model"], when["begin"], strict=True)]
    return f"{said}; they begin at {listed(places)}."
