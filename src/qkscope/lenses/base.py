"""What a lens is: one analysis of the sums, with everything that it writes, draws, says and shows.

A lens is a value. It lists its tables (each column with its definition), how a layer's rows follow from the layer's
sums, what can be derived head by head, tables that need several checkpoints at once, the figures with their cards, and
what the page shows. The drivers of `tables`, `report` and `page` loop over the registered lenses and know none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from qkscope.kinds import CHECKPOINTS, StudyKind
from qkscope.lenses.charts import Chart
from qkscope.results.schema import COMPONENTS_TABLE, PLACE_COLUMNS, QK, TABLES, TableKind, table_kind

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from qkscope.lenses.sums import LayerSums, StudySums
    from qkscope.lenses.views import Results, WindowView
    from qkscope.stats.jackknife import Scale

# At which windows measures are computed: each checkpoint's own context, the window that all share (where that is
# another), both, or these and every doubling up to the own context.
Windows = Literal["own", "common", "own and common", "every"]
ViewKind = Literal["curve", "heatmap", "scatter", "bars"]


@dataclass(frozen=True)
class Measure:
    """A number that a table has for each row, and what it means: docs, cards and page take the definition from here."""

    name: str
    definition: str  # one sentence in plain text
    unit: str = ""  # for axes: tokens, per token; empty for a pure number
    limits: tuple[float, float] | None = None  # what the number cannot exceed, for instance (-1, 1)
    error: Scale | None = "plain"  # on which scale its error over documents is found; None: it has none, as counts
    bias: bool = False  # whether few documents shift it by as much as its error: the error then takes that in
    text: bool = False  # whether it is words instead: each cell a JSON string, so that it is only ever data
    title: str = ""  # what charts and sentences call it, such as "query norm"; the name by default
    # number: averaged over heads. indicator: 0 or 1, its mean is a share of heads. code and constant: never averaged.
    kind: Literal["number", "indicator", "code", "constant"] = "number"
    optional: bool = False  # tables that earlier versions wrote may lack it
    color: str = ""  # in every chart; by default the next of the palette

    @property
    def label(self) -> str:
        """Its title, or its name as words."""
        return self.title or self.name.replace("_", " ")


def titled(measures: Sequence[Measure], titles: Mapping[str, str]) -> tuple[Measure, ...]:
    """The measures with titles by name; a measure that is not named keeps its own."""
    return tuple(replace(each, title=titles.get(each.name, each.title)) for each in measures)


@dataclass(frozen=True)
class HeadTable:
    """A set of measures of each checkpoint and head: `rows` computes those of one layer from that layer's sums.

    Each array has one entry per head, (heads,), or one per head and place on a second axis, (heads, places): a
    component, a position bucket, a plane. Sets with the same second axis are columns of one table (`heads`, `buckets`,
    ...), to which the driver adds who and where (checkpoint, window, layer, head, place). It also calls `rows` with the
    sums without each group of documents in turn, and writes the errors that follow next to each column, as
    `<column>_se`. A set per layer has arrays (1, places).
    """

    name: str  # of the set: a plain word
    columns: tuple[Measure, ...]
    rows: Callable[[LayerSums], Mapping[str, NDArray[Any]]] | None  # None: another command writes `<name>.csv`
    windows: Windows = "own and common"
    across: str | None = None  # the second axis, and the column with the place on it: pc, bucket, plane
    per: Literal["head", "layer"] = "head"
    detail: bool = False  # so many rows that large studies go without (study key `detail`)
    holds_fixed: str = ""  # what replicates share with the whole, in words
    first_order: str = ""  # what replicates have of their own to first order, in words
    # `rows` looks at each head by itself, so it can be given several replicates at once, as further heads (a set per
    # layer then has a row for each of `sums.copies`). What it takes from the whole comes by `sums.shared`.
    stackable: bool = False
    own_buckets: bool = False  # replicates have bucket covariances of their own, and share nothing with the whole
    estimator: str = ""  # how the numbers were found, where there are several ways
    judged: tuple[Measure, ...] = ()  # what `judge` adds: columns that say how sure others are
    judge: Callable[[Judged], Mapping[str, NDArray[Any]]] | None = None
    replicated: tuple[str, ...] = ()  # columns whose replicates are kept for every head
    # What follows from a head's columns and is of use as a mean over heads only, such as sizes and logarithms.
    averaged: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    averaged_measures: tuple[Measure, ...] = ()  # what `averaged` adds
    # Of these, the means that are also kept separately for position-dominated heads and for the others.
    by_category: tuple[str, ...] = ()
    check: Callable[[pd.DataFrame, str], None] | None = None  # looks at a checkpoint's rows; warns
    needs_vectors: bool = False  # made only for checkpoints whose vectors were kept

    # What follows from these:
    kind: TableKind = field(init=False)  # what a row of its table is
    table: str = field(init=False)  # that has these measures as columns; else a file of their own
    key: tuple[str, ...] = field(init=False)  # the columns that identify a row
    has_row_per_head: bool = field(init=False)  # whether a head has exactly one row at a window
    names: tuple[str, ...] = field(init=False)  # of its own columns, without errors
    texts: tuple[str, ...] = field(init=False)  # of its columns that are words
    written: tuple[str, ...] = field(init=False)  # of columns, each followed by its error, and what is judged

    def __post_init__(self) -> None:
        published = self.across == "pc" and self.name in (QK, COMPONENTS_TABLE)
        kind = TABLES[self.name] if published else table_kind(self.across, self.per)
        derived = {
            "kind": kind,
            "table": self.name if self.rows is None else kind.name,
            "key": kind.key,
            "has_row_per_head": self.per == "head" and self.across is None,
            "names": tuple(column.name for column in self.columns),
            "texts": tuple(column.name for column in self.columns if column.text),
            "written": (*_with_errors(self.columns), *(column.name for column in self.judged)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def with_averaged(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of its columns that are there, and, where all are, what follows from them for means over heads."""
        columns = {name: values[name] for name in self.names if name in values}
        if self.averaged is None or len(columns) < len(self.names):
            return columns
        return {**columns, **self.averaged(columns)}


@dataclass(frozen=True)
class Judged:
    """A layer's columns, their errors (`<column>_se`), and the replicates of each (groups, heads[, components])."""

    columns: Mapping[str, NDArray[Any]]
    replicates: Mapping[str, NDArray[Any]]  # empty where there are none
    sums: LayerSums


def error_name(column: str) -> str:
    """The column that has another one's standard error over documents."""
    return f"{column}_se"


def _with_errors(columns: tuple[Measure, ...]) -> list[str]:
    return [name for c in columns for name in ((c.name, error_name(c.name)) if c.error else (c.name,))]


@dataclass(frozen=True)
class StudyTable:
    """A file whose rows are about several entries at once, such as each step from one checkpoint to the next.

    It has a column `windows`, `own` or `common`: at which choice of windows a row was computed.
    """

    file: str
    columns: tuple[Measure, ...]  # numbers; those with an error have it next to them, as in head tables
    key: tuple[str, ...]  # the columns that identify a row
    texts: tuple[str, ...]  # columns that are words; those that name entries end in `model`
    detail: bool = False  # as for head tables

    @property
    def written(self) -> tuple[str, ...]:
        """The names of all that it writes."""
        return (*dict.fromkeys((*self.key, *self.texts)), *_with_errors(self.columns))


@dataclass(frozen=True)
class StudyBuild:
    """How tables about a whole study are made, once the head tables of all its entries are there."""

    tables: tuple[StudyTable, ...]
    # By file; a table that does not apply is left out. None: another command writes the files.
    build: Callable[[StudySums], Mapping[str, pd.DataFrame]] | None
    kinds: tuple[StudyKind, ...] = (CHECKPOINTS,)  # of the studies for which they are made


@dataclass(frozen=True)
class WindowMeans:
    """What a summary with a row for each entry and window says of how sure numbers are at a window."""

    quantities: Mapping[str, str]  # columns that are means over all heads, and what of a head each is the mean of
    enough: str  # the column with 1 where a window is long enough, 0 where not, and nothing where that is not known
    fewest: Mapping[str, int]  # so many tokens and documents are enough


@dataclass(frozen=True)
class Summary:
    """A table over the heads of each checkpoint, `tables/<name>.csv`; `build` returns None where there is none."""

    name: str
    build: Callable[[WindowView], pd.DataFrame | None]
    at_common_window: bool = True  # also made there, as `<name>_common.csv`
    over_windows: WindowMeans | None = None  # what the page states of errors, where it has a row per entry and window


@dataclass(frozen=True)
class Figure:
    """A chart and its card, declared over measures. Both exist where the results have the measures and tables."""

    name: str
    title: str  # the headline; the span of the checkpoints is added
    chart: Chart
    caption: str  # what is drawn, in one or two sentences; windows, layer types and errors are added
    measures: tuple[str, ...] = ()  # those that the card reports, most important first; the chart's by default
    needs: tuple[str, ...] = ()  # names of tables
    number: int | None = None  # one of the ten main figures; others are in the appendix
    worthwhile: Callable[[WindowView], bool] | None = None  # whether there is enough to draw
    models: Callable[[WindowView], Sequence[str]] | None = None  # the checkpoints that it shows, where not all
    # Sentences that no template writes, at most three in all; the rest come from the trends of `measures`.
    takeaways: Callable[[Results], Sequence[str]] | None = None

    @property
    def reported(self) -> tuple[str, ...]:
        """The measures that the card reports."""
        return self.measures or self.chart.measures

    def exists(self, at: WindowView) -> bool:
        """Whether results carry the figure: the one place that decides it."""
        if not any(map(at.has_measure, self.reported)) or not all(map(at.has, self.needs)):
            return False
        return self.worthwhile is None or self.worthwhile(at)


@dataclass(frozen=True)
class View:
    """What the page shows of a lens, declared over named columns of its head tables.

    A curve or bars: means over heads by checkpoint. A heatmap: one column, layers by heads. A scatter: two columns,
    a dot per head.
    """

    kind: ViewKind
    title: str  # `{noun}` in it stands for what an entry is called: checkpoint, seed, model
    columns: tuple[str, ...]
    about: str = ""  # one sentence below the title
    figure: str | None = None  # whose card it opens


@dataclass(frozen=True)
class IntervalView:
    """What the page shows of a table about the study: rows of an entry, each a value with its 95 % interval."""

    title: str
    file: str  # of a `StudyTable` with a column `model`
    names: tuple[str, ...]  # columns of words that name a row
    value: str
    low: str
    high: str
    only: tuple[tuple[str, str], ...] = ()  # rows in which these columns have these words
    about: str = ""
    figure: str | None = None  # whose card it opens


@dataclass(frozen=True)
class Detail:
    """What the page shows of a table with several rows per head (or layer), when a reader opens a head."""

    name: str  # by which the page's views know it
    table: HeadTable  # one with a second axis
    shared: tuple[str, ...]  # columns that all heads of an entry have in common at a place
    columns: tuple[str, ...]
    of_layer: tuple[str, ...] = ()  # columns that all heads of a layer have in common at a place; they may be words
    # Bytes that it may take by itself, before compression; 0: it shares those of all details. Its columns are one byte
    # for each place, enough to draw points. Where four entries take more than the room, it has fewer columns, the
    # last ones first; where one alone does, fewer places.
    room: int = 0
    essential: int = 0  # how many of its columns it has in any case
    together: int = 1  # how many columns, one after the other, are of use only with each other

    def __post_init__(self) -> None:
        every = (*self.shared, *self.of_layer, *self.columns)
        shared = (self.across, *PLACE_COLUMNS.get(self.table.table, ()))
        unknown = [name for name in every if name not in (*shared, *self.table.written)]
        if unknown:
            raise ValueError(f"detail {self.name!r}: {self.table.name} has no {', '.join(unknown)}")

    @property
    def across(self) -> str:
        """The column with the place on the second axis."""
        if self.table.across is None:
            raise ValueError(f"detail {self.name!r}: {self.table.name} has one row per {self.table.per}")
        return self.table.across


@dataclass(frozen=True)
class OwnView:
    """A view with a module of its own in the page, where named columns do not describe what is to be seen."""

    name: str  # by which the module finds its data
    data: Callable[[Results], Any]  # plain values, which become JSON


@dataclass(frozen=True)
class Lens:
    """One analysis."""

    name: str  # a plain word: file names, anchors
    title: str
    question: str  # what a reader asks; the heading of its section on the page
    question_across: str = ""  # the same of seeds and models, where `question` is about stages of a run
    tables: tuple[HeadTable, ...] = ()
    of_study: tuple[StudyBuild, ...] = ()  # tables that need all entries of a study
    derive: Callable[[pd.DataFrame], pd.DataFrame] | None = None  # adds columns that follow from those of qk.csv
    derived: tuple[Measure, ...] = ()  # the measures that `derive` adds
    summaries: tuple[Summary, ...] = ()
    figures: tuple[Figure, ...] = ()
    views: tuple[View, ...] = ()
    intervals: tuple[IntervalView, ...] = ()
    details: tuple[Detail, ...] = ()
    own_views: tuple[OwnView, ...] = ()
    # What a change from one entry to another is made of, by measure and layer type: see `long_tables.ATTRIBUTION`.
    attribution: Callable[[WindowView, str, str], Mapping[tuple[str, str], Mapping[str, float]]] | None = None
    examples: Callable[[WindowView], Sequence[Mapping[str, Any]]] | None = None  # single heads, as the page draws them


def later(place: str) -> Callable[..., Any]:
    """A function by its place, `package.module:name`, imported when it is called.

    Drawing needs matplotlib, which takes a second to import; declaring a figure must not.
    """
    module, _, name = place.partition(":")

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **options)

    call.__name__, call.__qualname__, call.__module__ = name, name, module
    return call
