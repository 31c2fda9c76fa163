"""Verdicts on numbers: the long table that every comparison gives, and phrases about its checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.compare.numbers import group_title
from qkscope.words.phrases import listed, shortened

REPRODUCED, DIFFERS, MISSING = "reproduced", "differs", "missing"
COLUMNS = ("what", "model", "cell", "value", "reference", "difference", "tolerance", "verdict")
# The standard error over documents: of the difference between two runs of a head, or of the run's own number where it
# is compared with a publication, which gives none. Of a head, also whether its sign is not known and the reference was
# flipped, and whether its component is unstable.
OPTIONAL = ("error", "sign_unknown", "unstable")
_ROUNDING = 1e-12  # of the subtraction itself: a difference of exactly the tolerance is inside
_LISTED = 6  # names in a sentence


@dataclass(frozen=True, kw_only=True)
class JudgedNumbers:
    """A run judged against a reference: `cells` has a row per number."""

    cells: pd.DataFrame
    only_results: tuple[str, ...]  # checkpoints that the reference lacks
    only_reference: tuple[str, ...]
    noun: str  # what is counted in the verdict
    tolerance_note: str
    notes: tuple[str, ...] = ()  # what readers have to know about the numbers
    changed: pd.DataFrame | None = None  # heads of another category, where the reference has heads
    uncounted: tuple[str, ...] = ()  # checkpoints that have no part in the verdict

    @property
    def counted(self) -> pd.DataFrame:
        """The rows that decide the verdict."""
        return self.cells[~self.cells["model"].isin(self.uncounted)]

    @property
    def reproduced(self) -> bool:
        """Every number is there on both sides and within tolerance."""
        return bool((self.counted["verdict"] == REPRODUCED).all())

    def summary(self) -> pd.DataFrame:
        """A row per group of counted numbers: verdicts, differences, their correlation, and the span of tolerances."""
        rows = []
        for name, part in self.counted.groupby(titles_of(self.counted), sort=False):
            size, verdicts = part["difference"].abs(), part["verdict"].value_counts()
            known = part[["value", "reference"]].dropna().to_numpy(dtype=float).T
            spreads = known.shape[1] > 1 and bool((np.ptp(known, axis=1) > 0).all())
            rows.append(
                {
                    "group": name, "numbers": len(part),
                    **{verdict: int(verdicts.get(verdict, 0)) for verdict in (REPRODUCED, DIFFERS, MISSING)},
                    "mean": part["difference"].mean(), "median": size.median(), "p95": size.quantile(0.95),
                    "largest": size.max(), "correlation": np.corrcoef(known)[0, 1] if spreads else np.nan,
                    "tolerance_low": part["tolerance"].min(), "tolerance_high": part["tolerance"].max(),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)


def judge(cells: pd.DataFrame) -> pd.DataFrame:
    """Add difference and verdict. `cells` has value, reference, tolerance and `on_both`: both sides measured it.

    Undefined (NaN) on both sides agrees; a number on one side and none on the other differs.
    """
    difference = cells["value"] - cells["reference"]
    within = difference.abs() <= cells["tolerance"] + _ROUNDING
    within |= cells["value"].isna() & cells["reference"].isna()
    columns = [*COLUMNS, *(name for name in OPTIONAL if name in cells.columns)]
    verdict = np.where(~cells["on_both"], MISSING, np.where(within, REPRODUCED, DIFFERS))
    return cells.assign(difference=difference, verdict=verdict)[columns].reset_index(drop=True)


def titles_of(cells: pd.DataFrame) -> "pd.Series[str]":
    """The group of each row: numbers that are summarized and drawn together."""
    return pd.Series(list(map(group_title, cells["what"], cells["cell"])), index=cells.index, dtype=object)


def largest_differences(cells: pd.DataFrame, most: int) -> pd.DataFrame:
    """The rows farthest from their tolerance, differing ones first; a number against none comes first of all."""
    rows = cells[(cells["verdict"] != MISSING) & (cells["difference"] != 0)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(rows["difference"].to_numpy()) / rows["tolerance"].to_numpy()
    undefined = (rows["value"].isna() ^ rows["reference"].isna()).to_numpy()
    ratio = np.where(undefined, np.inf, np.nan_to_num(ratio, nan=0.0, posinf=np.inf))
    return rows.iloc[np.lexsort((-ratio, rows["verdict"] != DIFFERS))].head(most)


def listed_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return _first_few([shortened(name) for name in names])


def _first_few(items: Sequence[str]) -> str:
    more = len(items) - _LISTED
    return listed([*items[:_LISTED], f"{more} more"] if more > 0 else items)


def quoted_names(names: Sequence[str]) -> str:
    """The first few names, quoted."""
    shown = ", ".join(repr(name[:60]) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def window_note(windows: "pd.Series[float]", others: "pd.Series[float]") -> list[str]:
    """Where the two sides were measured over different windows, which are given by checkpoint."""
    both = pd.DataFrame({"window": windows, "other": others}).reindex(windows.index).dropna()
    apart = [
        f"{shortened(str(name))} ({int(window):,} tokens, reference {int(other):,})"
        for name, window, other in both[both["window"] != both["other"]].itertuples()
    ]
    return [f"Measured over different windows: {_first_few(apart)}; r depends on the window."] if apart else []
