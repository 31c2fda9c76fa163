"""Compare a run with a published study, number by number.

A published study left aggregates, so the run is reduced to the same ones over the same heads: the published sample,
also where the run measured every head. A number counts as measured only if all heads behind it were.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.compare import tolerance
from qkscope.compare.judge import JudgedNumbers, judge, listed_names, quoted_names, window_note
from qkscope.compare.numbers import (
    SAMPLED,
    SAMPLED_COLUMNS,
    TABLES,
    WITH_QUERIES,
    Number,
    NumberTable,
    PublishedReference,
)
from qkscope.compare.tolerance import Noise
from qkscope.errors import InputError
from qkscope.layers import LayerFacts
from qkscope.lenses.base import error_name
from qkscope.lenses.categories import UNDEFINED, with_category
from qkscope.lenses.depth_axis import depth_bins
from qkscope.lenses.draws import KEY, drawn_heads
from qkscope.lenses.views import build_tables
from qkscope.results.folder import PLASTICITY_SAMPLED_CSV
from qkscope.results.read import ResultsFolder, read_named_table
from qkscope.results.schema import depth_of_layers
from qkscope.study.rows import HeadSample, choose_heads
from qkscope.validation.plasticity import BUCKETS, MISSING, PUBLISHED

_SPREAD = ("alpha_q", "r_q_a")  # the queries' spread along the axis follows from these
_PLACES = f"{SAMPLED}.places"  # query buckets that the sampled vectors fill
MeanError = Callable[[str, str], float]  # of the mean of a measure over the heads of a checkpoint


def compare_folder_with_published(
    results: ResultsFolder, reference: PublishedReference, wanted: float | None
) -> JudgedNumbers:
    """Compare a results folder, each checkpoint at its native context; `wanted` replaces every tolerance."""
    at = build_tables(results).own
    heads = at.heads
    sampled = _read_sampled_plasticity(results)
    if sampled is not None:
        heads = heads.merge(sampled, on=KEY, how="left", validate="one_to_one")
    sample = published_sample(reference)
    measured, in_sample = (each.groupby("model").size() for each in (heads, _in_sample(heads, sample, reference)))

    def mean_error(name: str, model: str) -> float:
        """From the layers' means without each group of documents, which are over all heads that were measured."""
        complete = measured.get(model) == in_sample.get(model) == len(sample)
        return at.panel.error(name, model) if complete and at.panel.has(name) else math.nan

    draws = list(drawn_heads(at.heads, at.replicates))
    return compare_with_published(heads, results.study.names, reference, wanted, draws, mean_error)


def _read_sampled_plasticity(results: ResultsFolder) -> pd.DataFrame | None:
    """The heads' rows by the published protocol at native contexts; None where no pairs were drawn.

    The closed form in `heads.csv` is another estimator, and is not comparable with published numbers.
    """
    key = ("model", "layer", "head", "window", "estimator")
    texts = ("model", "estimator", "rotary", "attention", "errors")
    table = read_named_table(results, PLASTICITY_SAMPLED_CSV, [*SAMPLED_COLUMNS, "places"], key, texts)
    if table is None:
        return None
    windows = results.heads.groupby("model")["window"].max()
    own = table[(table["window"] == table["model"].map(windows)) & (table["estimator"] == PUBLISHED)]
    return own[[*KEY, *SAMPLED_COLUMNS, "places"]].rename(
        columns=lambda name: name if name in KEY else f"{SAMPLED}.{name}"
    )


def compare_with_published(
    heads: pd.DataFrame,
    names: Sequence[str],
    reference: PublishedReference,
    wanted: float | None = None,
    draws: Sequence[pd.DataFrame] = (),
    mean_error: MeanError = lambda name, model: math.nan,
) -> JudgedNumbers:
    """Compare heads with a published study; `names` are their checkpoints.

    `heads` are those of component 0 with a column per measure, `draws` the same heads as other documents would
    have given them. Tables of which the heads have no numbers are left out, and a note says so. `wanted` replaces every
    tolerance: an absolute difference of correlations and shares, a share of the heads for numbers of heads, a share of
    the number itself for slopes and means. Raises InputError when no published number can be compared.
    """
    run = _PublishedRun(heads, names, reference, wanted, draws, mean_error)
    cells = pd.concat([run.cells(table) for table in run.tables], ignore_index=True)
    if not cells["on_both"].any():
        raise InputError(_nothing_in_common(names, run.kept, reference))
    absent = [
        f"{len(reference.tables[table.name]) * len(table.numbers)} published {table.title} are not compared: "
        f"{table.absent}."
        for table in run.left_out
    ]
    unpublished = tuple(name for name in names if name not in set(reference.names))
    return JudgedNumbers(
        cells=judge(cells),
        only_results=unpublished,
        only_reference=tuple(name for name in reference.names if name not in set(names)),
        noun="published number",
        tolerance_note=run.tolerance_note,
        notes=(*_notes(heads, run.kept, reference), *absent),
        uncounted=unpublished,
    )


class _PublishedRun:
    """The run's heads in the published sample, and the numbers, errors and tolerances that follow from them."""

    def __init__(
        self,
        heads: pd.DataFrame,
        names: Sequence[str],
        reference: PublishedReference,
        wanted: float | None,
        draws: Sequence[pd.DataFrame],
        mean_error: MeanError,
    ) -> None:
        self.sample = published_sample(reference)
        self.kept = with_category(_in_sample(heads, self.sample, reference))
        self.drawn = [with_category(_in_sample(draw, self.sample, reference)) for draw in draws]
        self.models = [*reference.names, *(name for name in names if name not in set(reference.names))]
        self.reference, self.wanted, self.mean_error = reference, wanted, mean_error
        published = [table for table in TABLES if table.name in reference.tables]
        self.tables = [table for table in published if not table.absent or _has_numbers(table, self.kept)]
        self.left_out = [table for table in published if table not in self.tables]
        self.numbers = len(reference.contexts) * sum(len(table.numbers) for table in self.tables)
        self.multiple = tolerance.critical_value(self.numbers)
        self.by_model = {str(model): rows for model, rows in self.kept.groupby("model")}
        self.counts = {model: tolerance.count_noise(rows, reference.tokens) for model, rows in self.by_model.items()}
        self.spreads = _query_spreads(self.kept)

    def cells(self, table: NumberTable) -> pd.DataFrame:
        """A row per checkpoint and number, checkpoint by checkpoint."""
        is_lens = table.errors != "draws"
        measured = self.kept[self.kept[table.columns].notna().any(axis=1)] if is_lens else self.kept
        published = self.reference.tables[table.name].set_index("model").astype(float)
        if table.name == "taxonomy":  # the published categories add up to all heads, so none was undefined
            named = published.drop(columns=UNDEFINED, errors="ignore")
            published = named.assign(**{UNDEFINED: self.reference.heads - named.sum(axis=1)})
        published = published.reindex(self.models)
        parts = []
        for number in table.numbers:
            counts = number.heads(measured).groupby("model").size().reindex(self.models)
            complete = counts == len(number.heads(self.sample))
            value, reference = number.over(self.kept).reindex(self.models).where(complete), published[number.cell]
            error = pd.Series(self._error(table, number), index=self.models).where(value.notna())
            allowed = [self._tolerance(table, number, row, error[str(model)]) for model, row in published.iterrows()]
            # A correlation may be undefined; a number of a lens without a value was not measured.
            known = (value.notna() if is_lens else complete) & reference.notna() & ~np.isnan(allowed)
            columns = {"value": value, "reference": reference, "error": error, "tolerance": allowed, "on_both": known}
            parts.append(pd.DataFrame({"what": table.name, "model": self.models, "cell": number.cell, **columns}))
        by_checkpoint = {model: place for place, model in enumerate(self.models)}
        return pd.concat(parts).sort_values("model", key=lambda names: names.map(by_checkpoint), kind="stable")

    def _error(self, table: NumberTable, number: Number) -> npt.NDArray[np.float64]:
        """How far the run's own number would move with other documents, by checkpoint; NaN where not known."""
        if table.errors == "draws" and self.drawn:
            return np.asarray(np.stack([number.over(draw).reindex(self.models) for draw in self.drawn]).std(axis=0))
        if table.errors == "panel" and number.statistic == "mean":
            return np.array([self.mean_error(number.cell, model) for model in self.models])
        if table.errors == "heads":
            column, none = error_name(number.column), pd.DataFrame()
            return np.array([_error_of_mean(self.by_model.get(model, none), column) for model in self.models])
        return np.full(len(self.models), math.nan)

    def _tolerance(self, table: NumberTable, number: Number, row: "pd.Series[float]", error: float) -> float:
        """As the module `tolerance` derives it; NaN where there is no published number, or its noise is not known.

        `row` has the checkpoint's published numbers.
        """
        value, model, tokens = float(row[number.cell]), str(row.name), self.reference.tokens
        if math.isnan(value):
            return math.nan
        if self.wanted is not None:
            return self.wanted * number.noise.unit(value, self.reference.heads)
        if number.noise is Noise.COUNT:
            noise = self.counts.get(model, {}).get(number.cell, math.nan)
        elif number.noise is Noise.MEASURED:  # as if the published number were as noisy as the run's
            noise = math.sqrt(2.0) * error
        else:
            r, mean = (float(row.get(name, math.nan)) for name in ("r_k_a_abs", "mu_q_a"))
            spread = self.spreads.get(model, math.nan)
            noise = tolerance.head_noise(number.noise, value, tokens, r=r, mean=mean, spread=spread)
            if number.statistic == "mean":
                noise *= tolerance.mean_factor(number.heads(self.sample)["layer"].to_numpy())
        errors = self.reference.reading_error
        return errors.get(f"{table.name} {number.cell}", errors.get(table.name, 0.0)) + self.multiple * noise

    @property
    def tolerance_note(self) -> str:
        """The rule in words."""
        if self.wanted is not None:
            return (
                f"The tolerance was given: {self.wanted:g} for correlations and shares of variance, that share of the "
                f"{self.reference.heads} heads for numbers of heads, and of the number itself for slopes and means."
            )
        return (
            f"Tolerance: the reading error of the published number plus {self.multiple:.1f} standard errors of the "
            f"difference between two runs of its protocol ({self.reference.tokens:,} sampled tokens per head); a true "
            f"repetition fails anywhere with a chance of at most {100 * tolerance.CHANCE:g}%. Other documents, "
            "precision, or windows are not covered."
        )


def _error_of_mean(heads: pd.DataFrame, column: str) -> float:
    """Of a mean over heads from the heads' own errors: heads of one layer err together, layers independently."""
    if heads.empty:
        return math.nan
    by_layer = heads.groupby("layer")[column].sum(skipna=False).to_numpy(dtype=float)
    return WITH_QUERIES * math.sqrt(float(np.sum(by_layer**2))) / len(heads)


def published_sample(reference: PublishedReference) -> pd.DataFrame:
    """Layer, head, depth and depth bin of the query heads in the published sample."""
    layers = [LayerFacts(i, reference.q_heads, 1, 1) for i in range(reference.n_layers)]
    chosen = choose_heads(layers, HeadSample(reference.heads, reference.seed))
    sample = pd.DataFrame([(i, head) for i, heads in chosen.items() for head in heads], columns=["layer", "head"])
    depth = depth_of_layers(sample["layer"].to_numpy(), reference.n_layers - 1)
    return sample.assign(depth=depth, bin=depth_bins(depth))


def _in_sample(heads: pd.DataFrame, sample: pd.DataFrame, reference: PublishedReference) -> pd.DataFrame:
    """The rows of sampled heads; a checkpoint with a layer or head that the published model lacks is another model."""
    strange = (heads["layer"] >= reference.n_layers) | (heads["head"] >= reference.q_heads)
    fitting = heads[~heads["model"].isin(set(heads.loc[strange, "model"]))]
    return fitting.drop(columns="depth").merge(sample, on=["layer", "head"])


def _has_numbers(table: NumberTable, kept: pd.DataFrame) -> bool:
    return set(table.columns) <= set(kept) and bool(kept[table.columns].notna().to_numpy().any())


def _query_spreads(kept: pd.DataFrame) -> dict[str, float]:
    """Root mean square over heads of the queries' standard deviation along the axis, by checkpoint.

    It follows from their slope, their correlation with position and the window.
    """
    if not set(_SPREAD) <= set(kept):
        return {}
    slope, r = (kept[name] for name in _SPREAD)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = slope / r * kept["window"] / math.sqrt(12.0)
    squares = (spread[np.isfinite(spread)] ** 2).groupby(kept["model"]).mean()
    return {str(model): math.sqrt(value) for model, value in squares.items()}


def _notes(heads: pd.DataFrame, kept: pd.DataFrame, reference: PublishedReference) -> list[str]:
    """Which heads and windows the numbers are over, and by which protocol."""
    shared = heads[heads["model"].isin(reference.names)].groupby("model", sort=False)
    measured, windows = shared.size(), shared["window"].max()
    in_sample = kept.groupby("model").size().reindex(measured.index, fill_value=0)
    contexts = pd.Series(reference.contexts, dtype=float)
    notes = [
        f"Compared over the published sample of {reference.heads} heads (seed {reference.seed} over "
        f"{reference.n_layers} layers of {reference.q_heads}); {_span(measured)} were measured."
    ]
    partial = in_sample[in_sample < reference.heads]
    if len(partial):
        notes.append(
            f"The sample is incomplete at {listed_names(list(partial.index))} (down to {partial.min()} of "
            f"{reference.heads} heads); numbers over heads that were not measured are missing."
        )
    notes += window_note(windows, contexts)
    if _PLACES in kept and kept[_PLACES].notna().any():
        notes.append(
            f"The published plasticity has about {BUCKETS - MISSING} query buckets; the vectors of this run fill "
            f"{_span(kept[_PLACES].dropna())}."
        )
    return notes


def _span(values: "pd.Series[int]") -> str:
    """148, or 140 to 149."""
    return " to ".join(dict.fromkeys(f"{int(end):,}" for end in (values.min(), values.max())))


def _nothing_in_common(names: Sequence[str], kept: pd.DataFrame, reference: PublishedReference) -> str:
    nothing = f"nothing in common with published:{reference.name}: "
    if not set(names) & set(reference.names):
        return (
            f"{nothing}checkpoints are matched by name; the results have {quoted_names(names)}, the publication has "
            f"{quoted_names(reference.names)}"
        )
    there = kept[kept["model"].isin(reference.names)].groupby("model").size()
    return (
        f"{nothing}of its sample of {reference.heads} heads ({reference.n_layers} layers of {reference.q_heads} heads, "
        f"seed {reference.seed}) the results have {int(there.max()) if len(there) else 0} at most, and no depth bin in "
        f"full; measure all heads, or `heads: {{sample: {reference.heads}, seed: {reference.seed}}}`"
    )
