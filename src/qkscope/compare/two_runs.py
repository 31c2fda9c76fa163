"""Compare two results tables head by head, number by number.

Runs over the same documents differ by rounding only, so any difference beyond it counts. Runs over other documents
differ by chance too: there a number differs only beyond so many standard errors of both sides that at most one in
twenty of those called different is expected to be so by chance. Where the sign of a head is not known on either side, a
flip is no difference: the reference is turned round, and such heads are counted. Tables in, tables out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.compare.judge import DIFFERS, MEASURES, REPRODUCED, judge, some
from qkscope.compare.tolerance import discovery_multiple
from qkscope.errors import InputError
from qkscope.lenses import taxonomy
from qkscope.lenses.base import error_name
from qkscope.lenses.signs import is_turned, sign_unsure
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.stats.significance import is_significant

CHANGED_COLUMNS = (
    "model", "layer", "head", "category", "reference_category",
    "r_q", "reference_r_q", "r_k", "reference_r_k", "explained_variance", "reference_explained_variance",
    "sign_unknown", "unstable",
)  # fmt: skip
AGREEMENT_COLUMNS = ("model", "measure", "heads", "median", "p95", "max", "correlation")
# Two runs over the same tokens differ by rounding only; correlations of one table are exact to about 1e-7.
STRICT = 1e-6

_HEAD = ["model", "layer", "head"]
_SIGNED = ("r_q", "r_k")


@dataclass(frozen=True)
class HeadComparison:
    """Two runs head by head.

    `pairs` has a row per head that both have, as the tables have it: `turned` says that the sign is not known and the
    reference has to be turned round, `unstable` that the component is unstable on either side. `changed` are those of
    another category; `agreement` has a row per checkpoint and measure: quantiles of the absolute difference, and the
    correlation over heads. `other_documents` are the checkpoints that are known to have read other documents, where a
    number differs beyond `multiple` standard errors.
    """

    cells: pd.DataFrame
    pairs: pd.DataFrame
    changed: pd.DataFrame
    agreement: pd.DataFrame
    only_results: tuple[str, ...]
    only_reference: tuple[str, ...]
    tolerance: float
    other_documents: tuple[str, ...] = ()
    multiple: float | None = None
    groups: int = FEWEST_GROUPS  # of documents behind the errors, on the side that has fewer

    @property
    def reproduced(self) -> bool:
        """Both have the same heads, and all their numbers are within tolerance."""
        return bool((self.cells["verdict"] == REPRODUCED).all())

    @property
    def beyond_errors(self) -> tuple[int, int] | None:
        """Of the numbers that differ: how many significantly, of how many that have errors on both sides."""
        known = self.cells[(self.cells["verdict"] == DIFFERS) & self.cells["error"].notna()]
        if not self.cells["error"].notna().any():
            return None
        return int((is_significant(known["difference"], known["error"], self.groups - 1) == 1).sum()), len(known)


def compare_heads(
    heads: pd.DataFrame,
    names: Sequence[str],
    other: pd.DataFrame,
    other_names: Sequence[str],
    wanted_tolerance: float | None = None,
    *,
    other_documents: Collection[str] = (),
    groups: int = FEWEST_GROUPS,
) -> HeadComparison:
    """Compare two PC0 tables head by head; `other` is the reference. Raises InputError when they share no head.

    `wanted_tolerance` replaces every tolerance. `other_documents` are checkpoints that are known to have read other
    documents, dealt into `groups`.
    """
    both = _joined(heads, other, list(dict.fromkeys([*names, *other_names])))
    pairs = both[both["side"] == "both"].drop(columns="side").reset_index(drop=True)
    if pairs.empty:
        raise InputError(
            "nothing in common: heads are matched by checkpoint name, layer and head; the results have the "
            f"checkpoints {some(names)}, the reference has {some(other_names)}"
        )
    allowed = STRICT if wanted_tolerance is None else wanted_tolerance
    cells = pd.concat([_head_cells(both, measure, allowed) for measure in MEASURES], ignore_index=True)
    by_errors = (
        cells["model"].isin(list(other_documents)) & cells["error"].notna() & (wanted_tolerance is None)
    ).to_numpy()
    multiple = _discovery_multiple(cells, by_errors, groups)
    if multiple is not None:
        cells["tolerance"] = np.where(by_errors, np.fmax(multiple * cells["error"], allowed), allowed)
    changed = pairs[pairs["category"] != pairs["reference_category"]].rename(columns={"turned": "sign_unknown"})
    return HeadComparison(
        cells=judge(cells),
        pairs=pairs,
        changed=changed[list(CHANGED_COLUMNS)].reset_index(drop=True),
        agreement=_agreement(pairs),
        only_results=tuple(name for name in names if name not in set(other_names)),
        only_reference=tuple(name for name in other_names if name not in set(names)),
        tolerance=allowed,
        other_documents=tuple(name for name in names if name in set(cells.loc[by_errors, "model"])),
        multiple=multiple,
        groups=groups,
    )


def _discovery_multiple(cells: pd.DataFrame, by_errors: npt.NDArray[np.bool_], groups: int) -> float | None:
    """Beyond how many errors numbers of other documents count as different; None where none is judged so."""
    if not by_errors.any():
        return None
    apart = (cells["value"] - cells["reference"]).abs() / cells["error"]
    return discovery_multiple(apart.to_numpy()[by_errors], groups)


def _joined(heads: pd.DataFrame, other: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """The heads of both tables side by side, `side` saying where each is, in the order of the checkpoints."""
    one, two = (_columns(table) for table in (heads, other))
    renamed = {name: f"reference_{name}" for name in one.columns if name not in _HEAD}
    both = one.merge(two.rename(columns=renamed), on=_HEAD, how="outer", indicator="side")
    places = {name: i for i, name in enumerate(order)}
    both = both.sort_values(_HEAD, key=lambda column: column.map(places) if column.name == "model" else column)
    unsure = both["unsure"].eq(True) | both["reference_unsure"].eq(True)
    unstable = both["unstable"].eq(1) | both["reference_unstable"].eq(1)
    turned = is_turned(both["r_k"], both["reference_r_k"], unsure)
    gone = ["unsure", "reference_unsure", "reference_unstable"]
    return both.assign(turned=turned, unstable=unstable).drop(columns=gone)


def _columns(heads: pd.DataFrame) -> pd.DataFrame:
    """What a comparison needs of a table, empty where it lacks it."""
    errors = [error_name(measure) for measure in MEASURES]
    named = taxonomy.with_category(heads)
    wanted = [*_HEAD, *MEASURES, *errors, "category", "window", "unstable"]
    return named.reindex(columns=wanted).assign(unsure=sign_unsure(heads))


def reference_values(pairs: pd.DataFrame, measure: str) -> npt.NDArray[np.float64]:
    """The reference's values, turned round where the sign is not known and the other way round."""
    values = pairs[f"reference_{measure}"].to_numpy(dtype=float)
    return np.where(pairs["turned"], -values, values) if measure in _SIGNED else values


def category_moves(pairs: pd.DataFrame) -> pd.DataFrame:
    """Heads by category in the reference (rows) and in the run (columns), over all checkpoints."""
    moves = pd.crosstab(pairs["reference_category"], pairs["category"])
    return moves.reindex(index=list(taxonomy.CATEGORIES), columns=list(taxonomy.CATEGORIES), fill_value=0)


def _head_cells(both: pd.DataFrame, measure: str, allowed: float) -> pd.DataFrame:
    cell = "layer " + both["layer"].astype(str) + " head " + both["head"].astype(str)
    errors = [both[f"{side}{error_name(measure)}"].to_numpy(dtype=float) for side in ("", "reference_")]
    return pd.DataFrame(
        {
            "what": measure,
            "model": both["model"],
            "cell": cell,
            "value": both[measure],
            "reference": reference_values(both, measure),
            "error": np.hypot(*errors),
            "tolerance": allowed,
            "on_both": both["side"] == "both",
            "sign_unknown": both["turned"] & (measure in _SIGNED),
            "unstable": both["unstable"],
        }
    )


def _agreement(pairs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for model, group in pairs.groupby("model", sort=False):
        for measure in MEASURES:
            one, other = group[measure].to_numpy(dtype=float), reference_values(group, measure)
            known = np.isfinite(one) & np.isfinite(other)
            one, other = one[known], other[known]
            apart = np.abs(one - other)
            spreads = len(one) > 1 and np.ptp(one) > 0 and np.ptp(other) > 0
            rows.append(
                (
                    str(model), measure, len(one),
                    *(np.quantile(apart, [0.5, 0.95, 1.0]) if len(apart) else (np.nan,) * 3),
                    np.corrcoef(one, other)[0, 1] if spreads else np.nan,
                )
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(AGREEMENT_COLUMNS))
