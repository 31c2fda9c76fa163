"""Card of the ablation: which measure of position goes with what the model loses, and which heads matter at all."""

import pandas as pd

from qkscope.lenses.ablation.table import EDITS, FILE, NAME, STRENGTHS, last_measured, shown_edit
from qkscope.lenses.card import Card, CardInput
from qkscope.text import counted
from qkscope.words.phrases import label

ERRORS = 2.0  # a head's loss counts beyond so many standard errors


def ablation_card(given: CardInput) -> Card:
    """What survives: heads whose edit costs something, and what told it beforehand."""
    at = given.at
    edit, model = shown_edit(at), last_measured(at)
    entry = next(each for each in given.checkpoints if each.name == model)
    table = at.table(FILE)
    here = table[(table["model"] == model) & table[f"loss_{edit}"].notna()]
    ranks = at.table(NAME)
    ranks = ranks[(ranks["edit"] == edit) & (ranks["model"] == model)]
    matter = _matter(here, edit)
    shows = [
        f"Each dot is a head of {label(entry)}: how much the mean loss of the documents' tokens rises when an edit "
        f"takes away {EDITS[edit]}, with its standard error over documents, against measures of how strongly the head "
        "encodes position. The edit of a document comes from other documents. Above each panel: Spearman's rank "
        "correlation over heads with a 95 % interval, which takes heads as independent.",
        matter,
        f"Rank correlations with the loss: {'; '.join(_told(row) for _, row in ranks.iterrows())}.",
        "A head is edited alone, so what several heads do together, or in each other's place, is not in these numbers.",
    ]
    steps = [
        ("Passes", "qkscope ablate: the same documents with and without the edit, loss of every token, paired."),
        ("Aggregation", f"one row per head; rank correlations in tables/{NAME}.csv."),
    ]
    return Card("Does It Matter?", [text for text in shows if text], FILE, steps, [matter, _best(ranks)])


def _matter(heads: pd.DataFrame, edit: str) -> str:
    loss, error = heads[f"loss_{edit}"], heads[f"loss_{edit}_se"]
    if error.isna().all():
        return f"{counted(len(heads), 'head')} were edited; too few documents for errors, so nothing is claimed."
    worse, better = int((loss > ERRORS * error).sum()), int((loss < -ERRORS * error).sum())
    largest = heads.iloc[int(loss.argmax())]
    return (
        f"Of {counted(len(heads), 'head')}, {worse} cost loss beyond two errors when edited, and {better} gain; one in "
        f"twenty would do either by chance. The largest rise is {largest[f'loss_{edit}']:.4f} ± "
        f"{largest[f'loss_{edit}_se']:.4f} nats per token, of L{int(largest['layer'])}H{int(largest['head'])}."
    )


def _told(row: "pd.Series[float]") -> str:
    return f"{STRENGTHS[str(row['strength'])]}: {row['rho']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


def _best(ranks: pd.DataFrame) -> str:
    """The measure that goes with the loss most, if any does beyond its interval."""
    if ranks.empty:
        return ""
    best = ranks.iloc[int(ranks["rho"].abs().argmax())]
    name = STRENGTHS[str(best["strength"])]
    if best["low"] <= 0.0 <= best["high"]:
        return "No measure of strength here goes with the loss: every interval holds 0."
    others = ranks[ranks["strength"] != best["strength"]]
    apart = others[(others["high"] < best["low"]) | (others["low"] > best["high"])]
    rest = "" if len(others) == len(apart) else " Other intervals overlap with its own: which is best is not decided."
    return f"What goes with the loss most is {name}: rank correlation {best['rho']:+.2f}.{rest}"
