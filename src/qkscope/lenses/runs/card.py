"""What several runs of one training have in common, in words."""

from __future__ import annotations

import pandas as pd

from qkscope.lenses.card import Card, Subject, window_sentence
from qkscope.lenses.runs.table import ACROSS, NAME
from qkscope.words.phrases import listed, number

SAID = (("r_q", "r_q"), ("r_k", "r_k"))


def runs_card(subject: Subject) -> Card:
    """How far runs are apart at the last step that they share, beside how far each went since the first."""
    table, across = subject.table(NAME), subject.table(ACROSS)
    runs = list(dict.fromkeys(str(run) for run in table["run"]))
    last = across.iloc[-1]
    spread = [_apart(table, last, measure, name) for measure, name in SAID]
    moved = [text for measure, name in SAID if (text := _moved(subject, table, across, measure, name))]
    shows = [
        f"A line for each of {len(runs)} runs ({listed(runs[:6])}{', …' if len(runs) > 6 else ''}): means over its "
        "heads at each step, with bars of ± 1 standard error over documents. The dark line is the mean of the runs at "
        "steps that at least two of them have, the grey band ± 1 standard deviation between runs. Heads of one index "
        "need not be the same heads in another run: distributions are compared, not heads. "
        f"{window_sentence(subject)}",
        " ".join([*spread, *moved]),
    ]
    how = [
        ("Runs", "checkpoints with the same `run` in the study; steps as the study, or their names, say."),
        ("Spread", "standard deviation of the runs' means, with one less than the number of runs below it."),
    ]
    return Card("Runs Side by Side", shows, f"tables/{NAME}.csv", how, [*spread[:1], *moved[:1]])


def _apart(table: pd.DataFrame, last: pd.Series[float], measure: str, name: str) -> str:
    rows = table[table["step"] == last["step"]]
    low, high = rows[measure].min(), rows[measure].max()
    return (
        f"At step {int(last['step']):,}, the mean of {name} is {number(last[measure])} over {int(last['runs'])} runs, "
        f"from {number(low)} to {number(high)} (standard deviation {number(last[f'{measure}_between'])} between runs)."
    )


def _moved(subject: Subject, table: pd.DataFrame, across: pd.DataFrame, measure: str, name: str) -> str:
    """In how many runs the mean rose or fell by more than its noise, from the first shared step to the last."""
    if len(across) < 2:
        return ""
    first, last = across["step"].iloc[0], across["step"].iloc[-1]
    directions = []
    for _, rows in table.groupby("run", sort=False):
        ends = [rows[rows["step"] == step]["model"].tolist() for step in (first, last)]
        if all(ends):
            directions.append(subject.panel.change(measure, ends[0][0], ends[1][0]).direction)
    rose, fell = directions.count(1), directions.count(-1)
    return (
        f"From step {int(first):,} to {int(last):,} mean {name} rose by more than its noise in {rose} of "
        f"{len(directions)} runs, and fell in {fell}."
    )
