"""Compare a results table with a published study, number by number.

A published study left aggregates, so the run is reduced to the same ones over the same heads: the published sample,
also where the run measured every head. A cell counts as measured only if all heads behind the published number were.
The outcome is one long table, a row per number: value, reference, difference, tolerance, verdict (two results tables,
`two_runs`, give the same). Tables in, tables out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.compare import tolerance
from qkscope.compare.lens_means import Noise
from qkscope.compare.lenses import LENS_MEANS
from qkscope.compare.references import PublishedReference
from qkscope.errors import InputError
from qkscope.layers import LayerFacts
from qkscope.lenses import depth_axis as depth
from qkscope.lenses import taxonomy
from qkscope.lenses.concordance import concordance
from qkscope.lenses.position import trajectory
from qkscope.results.schema import depth_of_layers
from qkscope.study.heads import HeadSample, choose_heads

REPRODUCED, DIFFERS, MISSING = "reproduced", "differs", "missing"
COLUMNS = ("what", "model", "cell", "value", "reference", "difference", "tolerance", "verdict")
# The standard error over documents: of the difference between two runs of a head, or of the run's own number where it
# is compared with a publication, which gives none. Of a head, also whether its sign is not known and the reference was
# turned round, and whether its component is unstable.
ABOUT_HEADS = ("error", "sign_unknown", "unstable")

MEASURES = ("r_q", "r_k", "explained_variance")
_ROUNDING = 1e-12  # of the subtraction itself: a difference of exactly the tolerance is inside


@dataclass(frozen=True)
class PublishedComparison:
    """Aggregates of a run against published ones.

    `coverage` has a row per checkpoint of the run: heads measured, how many of them are in the published sample,
    the size of that sample, the run's window, the published context (NaN for a checkpoint that was not published),
    and the share of the compared heads with r_k < -0.3, which no published number gives and a mean of r_k hides.
    """

    cells: pd.DataFrame
    coverage: pd.DataFrame
    only_results: tuple[str, ...]
    only_reference: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what a reader has to know about numbers of lenses

    @property
    def reproduced(self) -> bool:
        """Every published number is there and within tolerance; what the run has beyond them does not matter."""
        published = self.cells[~self.cells["model"].isin(self.only_results)]
        return bool((published["verdict"] == REPRODUCED).all())


def judge(cells: pd.DataFrame) -> pd.DataFrame:
    """Add difference and verdict. `cells` has value, reference, tolerance and `on_both`: both sides measured it.

    Undefined (NaN) on both sides agrees; a number on one side and none on the other differs.
    """
    difference = cells["value"] - cells["reference"]
    within = difference.abs() <= cells["tolerance"] + _ROUNDING
    within |= cells["value"].isna() & cells["reference"].isna()
    columns = [*COLUMNS, *(name for name in ABOUT_HEADS if name in cells.columns)]
    verdict = np.where(~cells["on_both"], MISSING, np.where(within, REPRODUCED, DIFFERS))
    return cells.assign(difference=difference, verdict=verdict)[columns].reset_index(drop=True)


# --- a published study --------------------------------------------------------------------------------


def published_sample(reference: PublishedReference) -> pd.DataFrame:
    """Layer, head and depth of the query heads in the published sample."""
    layers = [LayerFacts(i, reference.q_heads, 1, 1) for i in range(reference.n_layers)]
    chosen = choose_heads(layers, HeadSample(reference.heads, reference.seed))
    sample = pd.DataFrame([(i, head) for i, heads in chosen.items() for head in heads], columns=["layer", "head"])
    return sample.assign(depth=depth_of_layers(sample["layer"].to_numpy(), reference.n_layers - 1))


def compare_with_published(
    heads: pd.DataFrame,
    names: Sequence[str],
    reference: PublishedReference,
    wanted_tolerance: float | None = None,
    of_lenses: Mapping[str, pd.DataFrame] | None = None,
    draws: Sequence[pd.DataFrame] = (),
    means: pd.DataFrame | None = None,
) -> PublishedComparison:
    """Compare a PC0 table (its checkpoints are `names`) with a published study; `of_lenses` are the same heads' rows of
    lenses' tables by the name in LENS_MEANS, where there are any, `draws` the same heads as other documents would
    have given them, and `means` the layers' means of lenses without each group of documents.

    `wanted_tolerance` replaces every tolerance: an absolute difference of correlations and shares of variance, a share
    of the heads for numbers of heads, a share of the number itself for slopes and means. Raises InputError when no
    published number can be compared at all.
    """
    sample = published_sample(reference)
    kept = _in_sample(heads, sample, reference)
    coverage = _coverage(heads, kept, names, reference)
    models = [*reference.names, *(name for name in names if name not in set(reference.names))]
    lenses = {
        name: LENS_MEANS[name].heads(table, kept)
        for name, table in (of_lenses or {}).items()
        if name in reference.tables
    }
    cells = _aggregates(kept, models, reference, sample, lenses)
    if not cells["on_both"].any():
        raise InputError(_nothing_published(names, reference, coverage))
    cells["tolerance"] = _tolerances(cells, kept, sample, reference, wanted_tolerance, lenses)
    drawn = [_aggregates(_in_sample(draw, sample, reference), models, reference, sample, {}) for draw in draws]
    cells["error"] = _errors(cells, drawn, lenses, means)
    return PublishedComparison(
        cells=judge(cells),
        coverage=coverage,
        only_results=tuple(name for name in names if name not in set(reference.names)),
        only_reference=tuple(name for name in reference.names if name not in set(names)),
        notes=tuple(said for name, rows in lenses.items() if (said := LENS_MEANS[name].note(rows))),
    )


def _in_sample(heads: pd.DataFrame, sample: pd.DataFrame, reference: PublishedReference) -> pd.DataFrame:
    """The rows of sampled heads; a checkpoint with a layer or head that the published model lacks is another model."""
    strange = (heads["layer"] >= reference.n_layers) | (heads["head"] >= reference.q_heads)
    fitting = heads[~heads["model"].isin(set(heads.loc[strange, "model"]))]
    return fitting.drop(columns="depth").merge(sample, on=["layer", "head"])


def _coverage(
    heads: pd.DataFrame, kept: pd.DataFrame, names: Sequence[str], reference: PublishedReference
) -> pd.DataFrame:
    contexts = {checkpoint.name: float(checkpoint.context) for checkpoint in reference.checkpoints}
    table = pd.DataFrame({"model": list(names)})
    groups = heads.groupby("model")
    discordant = concordance(kept, names).set_index("model")["discordant"]
    return table.assign(
        measured=table["model"].map(groups.size()),
        in_sample=table["model"].map(kept.groupby("model").size()).fillna(0).astype(int),
        sample=reference.heads,
        window=table["model"].map(groups["window"].max()),
        published_context=table["model"].map(contexts).astype(float),
        discordant=table["model"].map(discordant).astype(float),
    )


def _aggregates(
    kept: pd.DataFrame,
    models: Sequence[str],
    reference: PublishedReference,
    sample: pd.DataFrame,
    lenses: Mapping[str, pd.DataFrame],
) -> pd.DataFrame:
    """Value, reference and on_both of every published number, and of the same numbers of further checkpoints."""
    counts = taxonomy.category_counts(taxonomy.with_category(kept), models)
    values: dict[str, tuple[pd.DataFrame, Sequence[str]]] = {
        "trajectory": (trajectory(kept, models), MEASURES),
        "heatmap_rq": (depth.depth_means(kept, "r_q", models), depth.DEPTH_COLUMNS),
        "heatmap_rk": (depth.depth_means(kept, "r_k", models), depth.DEPTH_COLUMNS),
        "taxonomy": (counts, taxonomy.CATEGORIES),
    }
    for name, rows in lenses.items():
        values[name] = (LENS_MEANS[name].values(rows, models), LENS_MEANS[name].cells)
    complete = _complete_bins(kept, models, sample)
    parts = []
    for what, (table, columns) in values.items():
        published = reference.tables[what]
        if what == "taxonomy":  # the published categories add up to all heads, so none was undefined
            named = published[[c for c in taxonomy.CATEGORIES if c != taxonomy.UNDEFINED]]
            published = published.assign(**{taxonomy.UNDEFINED: reference.heads - named.sum(axis=1)})
        cells = _long(table, columns, "value").merge(_long(published, columns, "reference"), how="left")
        by_bin = what.startswith("heatmap")
        measured = [complete[model].get(cell, False) if by_bin else all(complete[model].values())
                    for model, cell in zip(cells["model"], cells["cell"], strict=True)]  # fmt: skip
        if what in lenses:  # a checkpoint without this lens's numbers lacks them; others are undefined or not
            measured = [there and not np.isnan(value) for there, value in zip(measured, cells["value"], strict=True)]
        cells["on_both"] = np.array(measured, dtype=bool) & cells["reference"].notna()
        cells["value"] = cells["value"].where(np.array(measured, dtype=bool))
        parts.append(cells.assign(what=what))
    return pd.concat(parts, ignore_index=True)


def _errors(
    cells: pd.DataFrame,
    drawn: Sequence[pd.DataFrame],
    lenses: Mapping[str, pd.DataFrame],
    means: pd.DataFrame | None,
) -> npt.NDArray[np.float64]:
    """How far the run's own numbers would move with other documents: the spread of draws, and for numbers of lenses
    what these say; NaN where neither is known."""
    key = ["what", "model", "cell"]
    errors = np.full(len(cells), np.nan)
    if drawn:
        values = [cells[key].merge(part, on=key, how="left", validate="one_to_one")["value"] for part in drawn]
        errors = np.stack([part.to_numpy(dtype=float) for part in values]).std(axis=0)
    of_lenses = {name: LENS_MEANS[name].errors(rows, means) for name, rows in lenses.items()}
    for place, (what, model, cell) in enumerate(cells[key].itertuples(index=False)):
        if what in of_lenses:
            errors[place] = of_lenses[what].get((model, cell), np.nan)
    return np.where(cells["value"].notna(), errors, np.nan)


def _long(table: pd.DataFrame, columns: Sequence[str], name: str) -> pd.DataFrame:
    """One row per checkpoint and column, checkpoint by checkpoint."""
    return pd.DataFrame(
        {
            "model": np.repeat(table["model"].to_numpy(), len(columns)),
            "cell": np.tile(np.array(columns, dtype=object), len(table)),
            name: table[list(columns)].to_numpy(dtype=float).ravel(),
        }
    )


def _complete_bins(kept: pd.DataFrame, models: Sequence[str], sample: pd.DataFrame) -> dict[str, dict[str, bool]]:
    """Per checkpoint and depth bin: whether all sampled heads of the bin were measured (bins without any are none)."""
    needed = np.bincount(depth.depth_bins(sample["depth"].to_numpy()), minlength=depth.N_BINS)
    complete = {}
    for model in models:
        own = kept.loc[kept["model"] == model, "depth"].to_numpy()
        measured = np.bincount(depth.depth_bins(own), minlength=depth.N_BINS)
        flags = zip(depth.DEPTH_COLUMNS, measured == needed, needed > 0, strict=True)
        complete[model] = {column: bool(same) for column, same, some in flags if some}
    return complete


def _as_wanted(cells: pd.DataFrame, reference: PublishedReference, wanted: float) -> list[float]:
    """A tolerance that was asked for, in the unit of each row; NaN where there is no published number."""
    tolerances = []
    for what, cell, value in cells[["what", "cell", "reference"]].itertuples(index=False):
        of_table = wanted * reference.heads if what == "taxonomy" else wanted
        lens = LENS_MEANS.get(what)
        allowed = of_table if lens is None else lens.wanted_tolerance(cell, value, wanted)
        tolerances.append(np.nan if np.isnan(value) else allowed)
    return tolerances


def _tolerances(
    cells: pd.DataFrame,
    kept: pd.DataFrame,
    sample: pd.DataFrame,
    reference: PublishedReference,
    wanted: float | None,
    lenses: Mapping[str, pd.DataFrame],
) -> list[float]:
    """One tolerance per row, as the module `tolerance` derives it; NaN where there is no published number."""
    if wanted is not None:
        return _as_wanted(cells, reference, wanted)
    multiple = tolerance.critical_value(int(cells["reference"].notna().sum()))
    tokens = reference.tokens
    layers, bins = sample["layer"].to_numpy(), depth.depth_bins(sample["depth"].to_numpy())
    factors = {column: tolerance.mean_factor(layers[bins == i]) for i, column in enumerate(depth.DEPTH_COLUMNS)}
    overall = tolerance.mean_factor(layers)
    in_heads = {str(model): tolerance.count_noise(rows, tokens) for model, rows in kept.groupby("model")}
    of_lens: dict[str, Noise] = {
        name: LENS_MEANS[name].noise(rows, reference.tables[name], tokens, overall) for name, rows in lenses.items()
    }
    tolerances = []
    for what, model, cell, value in cells[["what", "model", "cell", "reference"]].itertuples(index=False):
        if what in of_lens:
            noise = of_lens[what].get((model, cell), np.nan)
        elif what == "taxonomy":
            noise = in_heads.get(model, {}).get(cell, np.nan)
        elif cell == "explained_variance":
            noise = float(tolerance.variance_share_noise(value, tokens)) * overall
        else:
            noise = float(tolerance.correlation_noise(value, tokens)) * factors.get(cell, overall)
        lens = LENS_MEANS.get(what)
        reading = reference.reading_error[what] if lens is None else lens.reading_error(reference, cell)
        tolerances.append(np.nan if np.isnan(value) else reading + multiple * noise)
    return tolerances


def _nothing_published(names: Sequence[str], reference: PublishedReference, coverage: pd.DataFrame) -> str:
    shared = coverage[coverage["published_context"].notna()]
    if shared.empty:
        return (
            f"nothing in common with published:{reference.name}: checkpoints are matched by name; the results have "
            f"{some(names)}, the publication has {some(reference.names)}"
        )
    return (
        f"nothing in common with published:{reference.name}: of its sample of {reference.heads} heads "
        f"({reference.n_layers} layers of {reference.q_heads} heads, seed {reference.seed}) the results have "
        f"{int(shared['in_sample'].max())} at most, and no depth bin in full; measure all heads, or "
        f"`heads: {{sample: {reference.heads}, seed: {reference.seed}}}`"
    )


def some(names: Sequence[str]) -> str:
    """The first few names, quoted."""
    shown = ", ".join(repr(name[:60]) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
