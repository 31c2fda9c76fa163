"""Published studies, and which numbers they have: a statistic of a column over the sampled heads each, and its noise.

A number that is added here is compared, listed and drawn like all others. Columns are measures of heads by name;
those of sampled plasticity, which is another estimator of the same measures, have the name of its table in front.

`data/published/<name>/` holds a few small tables of aggregates (the publication left no table of heads) and an
`about.json`: where they were read from, how exactly, and by which protocol they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import pandas as pd

from qkscope.compare.tolerance import Noise
from qkscope.lenses.base import error_name
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.depth_axis import DEPTH_COLUMNS, N_BINS
from qkscope.results.folder import PLASTICITY_SAMPLED_CSV

MEASURES = ("r_q", "r_k", "explained_variance")  # of component 0
SAMPLED = PLASTICITY_SAMPLED_CSV.removesuffix(".csv")
# Errors of sampled plasticity are over the keys' documents, with queries kept constant. With both recomputed, the error
# of a mean over heads of one layer was 0.8 to 1.4 times the mean of theirs in SmolLM2-135M (docs/lenses/plasticity.md).
WITH_QUERIES = 1.3
NumberStatistic = Literal["mean", "sum", "p25", "p75"]
_QUARTILES: dict[NumberStatistic, tuple[float, str]] = {"p25": (0.25, "lower"), "p75": (0.75, "upper")}


@dataclass(frozen=True)
class Number:
    """One published number of a checkpoint."""

    cell: str  # its column in the published table
    column: str  # of heads
    title: str
    noise: Noise
    statistic: NumberStatistic = "mean"
    depth_bin: int | None = None  # over the heads of one tenth of the depth
    magnitude: bool = False  # of absolute values
    group: str = ""  # numbers of one unit that are summarized and drawn together; the title of a number alone

    def heads(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The heads that it is about; `bin` is the depth bin of each."""
        return heads if self.depth_bin is None else heads[heads["bin"] == self.depth_bin]

    def over(self, heads: pd.DataFrame) -> pd.Series[float]:
        """The number by checkpoint."""
        rows = self.heads(heads)
        values = rows[self.column].abs() if self.magnitude else rows[self.column].astype(float)
        # Unsorted groups are summed in another order; means of component 0 agree with means.csv to the last digit.
        groups = values.groupby(rows["model"], sort=self.depth_bin is not None or self.column not in MEASURES)
        if self.statistic in _QUARTILES:
            return groups.quantile(_QUARTILES[self.statistic][0])
        return groups.sum() if self.statistic == "sum" else groups.mean()


@dataclass(frozen=True)
class NumberTable:
    """A published table: one row per checkpoint, a column per number.

    `errors` says where the standard error over documents comes from: the heads as other documents would have given
    them, the panel of the lens's heads (means of exactly the measured heads only), or the heads' own errors.
    """

    name: str
    title: str
    numbers: tuple[Number, ...]
    errors: Literal["draws", "panel", "heads"]
    absent: str = ""  # what to do where the results lack the columns

    @property
    def columns(self) -> list[str]:
        """The columns of heads behind the numbers."""
        return list(dict.fromkeys(number.column for number in self.numbers))


def _by_depth(column: str) -> tuple[Number, ...]:
    title, group = f"mean {column}, depth {{:.1f}} to {{:.1f}}", f"mean {column} by depth"
    return tuple(
        Number(cell, column, title.format(i / N_BINS, (i + 1) / N_BINS), Noise.CORRELATION, depth_bin=i, group=group)
        for i, cell in enumerate(DEPTH_COLUMNS)
    )


def _along_axis(cell: str, what: str, noise: Noise, *, quartiles: bool = False) -> list[Number]:
    """A measure's mean and quartiles over heads; `cell` ends in _abs for absolute values."""
    magnitude, column, group = cell.endswith("_abs"), cell.removesuffix("_abs"), f"mean {what}"
    numbers = [Number(cell, column, group, noise, magnitude=magnitude)]
    for name, (_, which) in _QUARTILES.items() if quartiles else ():
        title = f"{which} quartile of heads' {what}"
        numbers.append(Number(f"{cell}_{name}", column, title, noise, name, magnitude=magnitude, group=group))
    return numbers


_ALONG_AXIS = (
    *_along_axis("r_k_a_abs", "|r| of keys along a", Noise.CORRELATION, quartiles=True),
    *_along_axis("separation_strength", "separation", Noise.SHARE, quartiles=True),
    *_along_axis("plane_var_fraction", "share of variance in the plane", Noise.SHARE, quartiles=True),
    *_along_axis("alpha_k_abs", "|slope| of keys along a, per token", Noise.SLOPE),
    *_along_axis("mu_q_a", "query along a", Noise.PROJECTION),
    *_along_axis("bias_strength", "bias per token", Noise.BIAS, quartiles=True),
)
ROTATION = NumberTable(
    "rotation",
    "means and quartiles along the drift axis",
    tuple(sorted(_ALONG_AXIS, key=lambda number: number.statistic != "mean")),  # the means first
    "panel",
    "these results lack measures of the drift axis; `qkscope analyze RESULTS` adds them",
)
PLASTICITY = NumberTable(
    "plasticity",
    "means of plasticity",
    tuple(
        Number(cell, f"{SAMPLED}.{cell}", title, Noise.MEASURED, group="means of plasticity")
        for cell, title in (
            ("ap", "mean plasticity"),
            ("ap_first", "mean plasticity, first fifth"),
            ("ap_last", "mean plasticity, last fifth"),
            ("ap_drop", "mean drop of plasticity"),
        )
    ),
    "heads",
    f"these results have no {PLASTICITY_SAMPLED_CSV}, and the closed form in heads.csv is another estimator; "
    "keep vectors (qkscope run STUDY --vectors) and draw pairs (qkscope analyze RESULTS --plasticity-pairs 1000)",
)
TABLES = (
    NumberTable(
        "trajectory",
        "means by checkpoint",
        (
            Number("r_q", "r_q", "mean r_q", Noise.CORRELATION),
            Number("r_k", "r_k", "mean r_k", Noise.CORRELATION),
            Number("explained_variance", "explained_variance", "mean explained variance", Noise.SHARE),
        ),
        "draws",
    ),
    NumberTable("heatmap_rq", "mean r_q by depth", _by_depth("r_q"), "draws"),
    NumberTable("heatmap_rk", "mean r_k by depth", _by_depth("r_k"), "draws"),
    NumberTable(
        "taxonomy",
        "heads per category",
        tuple(
            Number(name, name, f"{name} heads", Noise.COUNT, "sum", group="heads per category") for name in CATEGORIES
        ),
        "draws",
    ),
    ROTATION,
    PLASTICITY,
)
NUMBERS: Mapping[tuple[str, str], Number] = {(t.name, number.cell): number for t in TABLES for number in t.numbers}
SAMPLED_COLUMNS = [name for n in PLASTICITY.numbers for name in (n.cell, error_name(n.cell))]


def measure_title(measure: str) -> str:
    """What a measure of heads is called."""
    return measure.replace("_variance", " variance")


def number_title(what: str, cell: str) -> str:
    """Which number of a checkpoint a row is about: a published one, or that of a head."""
    number = NUMBERS.get((what, cell))
    return number.title if number else f"{measure_title(what)}, {cell}"


def group_title(what: str, cell: str) -> str:
    """With which others it is summarized and drawn."""
    number = NUMBERS.get((what, cell))
    return number.group or number.title if number else measure_title(what)


@dataclass(frozen=True)
class PublishedReference:
    """A published study; each table has one row per checkpoint, named in the column `model`."""

    name: str
    source: str
    n_layers: int
    q_heads: int
    heads: int  # query heads in the published sample
    seed: int
    tokens: int  # queries (and as many keys) that the published statistics of one head rest on
    reading_error: Mapping[str, float]  # by table, or by table and number; for the taxonomy in heads
    contexts: Mapping[str, int]  # by checkpoint, in published order
    tables: Mapping[str, pd.DataFrame]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints' names, in published order."""
        return tuple(self.contexts)


def shipped_references() -> list[str]:
    """Names of the published studies that ship with the package."""
    folder = files("qkscope.data").joinpath("published")
    return sorted(entry.name for entry in folder.iterdir() if entry.joinpath("about.json").is_file())


def load_reference(name: str) -> PublishedReference:
    """Read a shipped reference. Raises KeyError for a name that is not shipped."""
    if name not in shipped_references():  # also keeps a name like ../x from becoming a path
        raise KeyError(name)
    folder = files("qkscope.data").joinpath("published", name)
    about: dict[str, Any] = json.loads(folder.joinpath("about.json").read_text(encoding="utf-8"))
    tables = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".csv"):
            with entry.open(encoding="utf-8") as file:
                tables[entry.name.removesuffix(".csv").removesuffix("_counts")] = pd.read_csv(file)
    as_stated = {key: about[key] for key in ("source", "n_layers", "q_heads", "heads", "seed", "reading_error")}
    return PublishedReference(
        name=name,
        tokens=about["documents"] * about["samples_per_document"],
        contexts={checkpoint["name"]: checkpoint["context"] for checkpoint in about["checkpoints"]},
        tables=tables,
        **as_stated,
    )
