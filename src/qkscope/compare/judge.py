"""Verdicts on numbers: the long table that every comparison gives, and what it amounts to."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

REPRODUCED, DIFFERS, MISSING = "reproduced", "differs", "missing"
COLUMNS = ("what", "model", "cell", "value", "reference", "difference", "tolerance", "verdict")
# The standard error over documents: of the difference between two runs of a head, or of the run's own number where it
# is compared with a publication, which gives none. Of a head, also whether its sign is not known and the reference was
# flipped, and whether its component is unstable.
OPTIONAL = ("error", "sign_unknown", "unstable")
_ROUNDING = 1e-12  # of the subtraction itself: a difference of exactly the tolerance is inside


@dataclass(frozen=True, kw_only=True)
class JudgedNumbers:
    """A run judged against a reference: `cells` has a row per number.

    Heads of another category are in `changed`, where the reference has heads.
    """

    cells: pd.DataFrame
    only_results: tuple[str, ...]
    only_reference: tuple[str, ...]
    noun: str  # what is counted in the verdict
    tolerance_note: str
    notes: tuple[str, ...] = ()  # what readers have to know about the numbers
    changed: pd.DataFrame | None = None
    uncounted: tuple[str, ...] = ()  # checkpoints that have no part in the verdict

    @property
    def counted(self) -> pd.DataFrame:
        """The rows that decide the verdict."""
        return self.cells[~self.cells["model"].isin(self.uncounted)]

    @property
    def reproduced(self) -> bool:
        """Every number is there on both sides and within tolerance."""
        return bool((self.counted["verdict"] == REPRODUCED).all())


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


def summarize(cells: pd.DataFrame, group: Callable[[str, str], str]) -> pd.DataFrame:
    """A row per `group` of numbers: verdicts, differences, their correlation and the span of tolerances."""
    rows = []
    groups = [group(what, cell) for what, cell in zip(cells["what"], cells["cell"], strict=True)]
    for name, part in cells.groupby(np.array(groups, dtype=object), sort=False):
        difference, verdicts = part["difference"].dropna(), part["verdict"].value_counts()
        known = part[["value", "reference"]].dropna().to_numpy(dtype=float).T
        spreads = known.shape[1] > 1 and bool((np.ptp(known, axis=1) > 0).all())
        rows.append(
            {
                "group": name, "numbers": len(part),
                **{verdict: int(verdicts.get(verdict, 0)) for verdict in (REPRODUCED, DIFFERS, MISSING)},
                "mean": difference.mean(), "median": difference.abs().median(), "p95": difference.abs().quantile(0.95),
                "largest": difference.abs().max(), "correlation": np.corrcoef(known)[0, 1] if spreads else np.nan,
                "tolerance_low": part["tolerance"].min(), "tolerance_high": part["tolerance"].max(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def largest_differences(cells: pd.DataFrame, most: int) -> pd.DataFrame:
    """The rows farthest from their tolerance, differing ones first; a number against none comes first of all."""
    rows = cells[(cells["verdict"] != MISSING) & (cells["difference"] != 0)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(rows["difference"].to_numpy()) / rows["tolerance"].to_numpy()
    undefined = (rows["value"].isna() ^ rows["reference"].isna()).to_numpy()
    ratio = np.where(undefined, np.inf, np.nan_to_num(ratio, nan=0.0, posinf=np.inf))
    order = np.lexsort((-ratio, rows["verdict"] != DIFFERS))
    return rows.iloc[order].head(most)
