"""Sentences about the means of a lens's own table, which several cards share."""

from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.card import Subject
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.noise import EVERY_HEAD, HeadPanel, Part
from qkscope.words.phrases import Format, curve_course, jumps, listed, plus_minus, ranking, share_plus_minus


def tell(subject: Subject, panel: HeadPanel, quantity: str, name: str, fmt: Format, *, steps: bool = False) -> str:
    """How a mean goes over one run, with its largest steps if asked for; or who is lowest and highest."""
    if not (subject.study.one_run or len(subject.checkpoints) == 1):
        return ranking(largest_contrast(panel, subject.checkpoints, quantity), name, fmt, subject.noun)
    curve = describe_curve(panel, subject.checkpoints, quantity)
    said = [curve_course(curve, name, fmt)]
    if steps:
        said += jumps(curve, name[0].lower() + name[1:], fmt, subject.windows)
    return " ".join(said)


def mean_of(panel: HeadPanel, quantity: str, entry: Entry, part: Part = EVERY_HEAD) -> str:
    """A mean over heads with its error over documents."""
    return plus_minus(panel.mean(quantity, entry.name, part), panel.error(quantity, entry.name, part))


def share_of(panel: HeadPanel, quantity: str, entry: Entry) -> str:
    """A mean of shares, or a share of heads, in per cent with its error over documents."""
    return share_plus_minus(panel.mean(quantity, entry.name), panel.error(quantity, entry.name))


def beyond_zero(panel: HeadPanel, quantity: str, entry: Entry, part: Part = EVERY_HEAD) -> int:
    """1 or −1 where a mean is more than two errors above or below 0, else 0 (also where the error is not known)."""
    mean, error = panel.mean(quantity, entry.name, part), panel.error(quantity, entry.name, part)
    return 0 if not abs(mean) > 2 * error else 1 if mean > 0 else -1


def errors_said(table: pd.DataFrame, exact: str) -> str:
    """What a table's errors are about: `exact` says what is found anew without each group of documents."""
    kinds = [str(kind) for kind in table["errors"].dropna().unique()] if "errors" in table.columns else []
    why = [kind.removeprefix("none: ") for kind in kinds if kind.startswith("none")]
    said = []
    if any(not kind.startswith("none") for kind in kinds):
        said.append(f"Errors (±) are over documents, by leaving out one group of them at a time; {exact}.")
    if any("covariances fixed" in kind for kind in kinds):
        said.append("Where groups have no squares of their own, covariances are held fixed.")
    if why or not kinds:
        said.append(f"There are no errors over documents: {listed(why) or 'these results have none'}.")
    return " ".join(said)


def joined(said: Sequence[str]) -> str:
    """Sentences one after the other, empty ones left out."""
    return " ".join(text for text in said if text)
