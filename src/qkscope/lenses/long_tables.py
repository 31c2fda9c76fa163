"""`means.csv` and `changes.csv`: every measure of every lens over the heads of each checkpoint, a number to a row.

One computation for all measures. A row is about a checkpoint over a window (or two checkpoints), and about all its
heads or those of one layer type. Codes and constants are not averaged; an indicator's mean is a share of heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd

from qkscope.lenses.draws import KEY
from qkscope.lenses.kind_of_layer import part_of, rows_by_kind
from qkscope.lenses.paired import paired_changes
from qkscope.lenses.views import Results, WindowView
from qkscope.results.mapped import drop_page_cache
from qkscope.stats.means import HeadPanel, over_heads
from qkscope.stats.significance import Significance

MEANS_COLUMNS = (
    "model", "window", "windows", "layer_type", "measure", "heads", "mean", "sd", "se", "se_heads", "p25", "median",
    "p75",
)  # fmt: skip
CHANGES_COLUMNS = (
    "from_model", "to_model", "windows", "from_window", "to_window", "layer_type", "measure", "heads", "before",
    "after", "change", "se", "se_heads", "p", "significant",
)  # fmt: skip
# Of a change, where a lens knows them: the part that window and RoPE base explain, and the weights; what is left.
ATTRIBUTION = ("window_and_base", "window_and_base_se", "weights", "weights_se", "unexplained", "unexplained_se")
SIGNIFICANT = {Significance.CHANGED: 1.0, Significance.UNCHANGED: 0.0, Significance.UNKNOWN: math.nan}


def means_table(results: Results, measures: Sequence[str] | None = None) -> pd.DataFrame:
    """Means over heads at every window, of these measures or of all."""
    pieces = [piece() for piece in means_pieces(results, measures)]
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame(columns=list(MEANS_COLUMNS))


def means_pieces(results: Results, measures: Sequence[str] | None = None) -> list[Callable[[], pd.DataFrame]]:
    """What makes the rows of each checkpoint, in order."""
    return [partial(_checkpoint_means, results, name, measures) for name in results.own.names]


def _checkpoint_means(results: Results, name: str, measures: Sequence[str] | None) -> pd.DataFrame:
    drop_page_cache()  # of the checkpoint before
    rows: list[tuple[object, ...]] = []
    for view, role in _roles(results, name):
        known = measures if measures is not None else view.mean_measures
        rows += _view_means(view.panel, name, view, view.window_of(name), role, known)
    own, seen = results.own, {row[1] for row in rows}
    if own.windows is not None:
        panel, places = own.window_panel(name), own.windows_of_entry(name)
        known = [each for each in own.redrawn_measures if measures is None or each in measures]
        for window in (window for window in places if window not in seen):
            rows += _view_means(panel, str(int(window)), own, window, "doubling", known, name)
    return pd.DataFrame(rows, columns=list(MEANS_COLUMNS))


def _roles(results: Results, name: str) -> list[tuple[WindowView, str]]:
    """The choices of windows at which a checkpoint has numbers of its own, and what each is."""
    own, common = results.own, results.common
    if common is None or (name in common.names and common.window_of(name) == own.window_of(name)):
        return [(own, "own+common")]
    return [(own, "own"), *([(common, "common")] if name in common.names else [])]


def _view_means(
    panel: HeadPanel,
    place: str,
    view: WindowView,
    window: float,
    role: str,
    measures: Sequence[str],
    name: str | None = None,
) -> list[tuple[object, ...]]:
    """A checkpoint's rows at one window; `place` is what the panel calls it."""
    model, rows = name or place, []
    for kind in rows_by_kind(view.of_entry(model)["layer_kind"]):
        part = part_of(kind)
        numbers = over_heads([panel.values(measure, place, part) for measure in measures])
        for measure, (heads, mean, spread, *quartiles) in zip(measures, numbers.tolist(), strict=True):
            if heads:
                errors = panel.error(measure, place, part), panel.head_error(measure, place, part).size
                rows.append((model, window, role, kind, measure, int(heads), mean, spread, *errors, *quartiles))
    return rows


def changes_table(results: Results, measures: Sequence[str] | None = None) -> pd.DataFrame | None:
    """Changes of means from each checkpoint of a run to the next, and from the first to the last; else None."""
    pieces = [piece() for piece in changes_pieces(results, measures)]
    return pd.concat(pieces, ignore_index=True) if pieces else None


def changes_pieces(results: Results, measures: Sequence[str] | None = None) -> list[Callable[[], pd.DataFrame]]:
    """What makes the rows of each step at each choice of windows."""
    if not results.own.study.one_run:
        return []
    return [
        partial(_step_changes, view, before, after, measures)
        for view in results.views()
        for before, after in steps(view)
    ]


def steps(view: WindowView) -> list[tuple[str, str]]:
    """Each checkpoint and the next; the first and the last, where others lie between."""
    names = list(view.names)
    return [*itertools.pairwise(names), *([(names[0], names[-1])] if len(names) > 2 else [])]


def _step_changes(view: WindowView, before: str, after: str, measures: Sequence[str] | None) -> pd.DataFrame:
    drop_page_cache()  # of the step before
    ends = [list(rows_by_kind(view.of_entry(name)["layer_kind"])) for name in (before, after)]
    where = before, after, "common" if view.common else "own", view.window_of(before), view.window_of(after)
    known, parts = view.mean_measures if measures is None else measures, view.attribution(before, after)
    rows = []
    for kind in (kind for kind in ends[0] if kind in ends[1]):
        part = part_of(kind)
        for measure in known:
            change = view.panel.change(measure, before, after, part)
            if not math.isfinite(change.difference):
                continue
            heads = int(np.isfinite(view.panel.values(measure, after, part)).sum())
            errors = change.over_documents.size, change.over_heads.size, change.p_value
            numbers = change.before, change.after, change.difference, *errors, SIGNIFICANT[change.outcome]
            attributed = parts.get((measure, kind), {})
            rows.append(
                (*where, kind, measure, heads, *numbers, *(attributed.get(each, math.nan) for each in ATTRIBUTION))
            )
    return pd.DataFrame(rows, columns=[*CHANGES_COLUMNS, *ATTRIBUTION])


def head_changes(results: Results) -> Iterator[pd.DataFrame]:
    """Which heads changed from each checkpoint to the next, paired by document group, at each choice of windows."""
    for view in results.views():
        rows = view.replicates
        if rows is None or not (view.study.one_run and view.study.same_documents) or len(view.names) < 2:
            continue
        changes = paired_changes(view.heads, rows, list(itertools.pairwise(view.names)))
        if changes is not None:
            yield changes.assign(windows="common" if view.common else "own")


HEAD_CHANGES_KEY = ("from_model", "to_model", "windows", *KEY[1:])
