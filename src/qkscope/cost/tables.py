"""What the head tables of one checkpoint take: as many lines and numbers as the registered lenses write.

Nothing here knows a lens. How many lines and bytes a head and a layer have is found out by making the tables of one
head with the study's own buckets, groups and windows, from random sums.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from qkscope.layers import LayerFacts, Rotary, Rotation
from qkscope.lenses.base import HeadTable
from qkscope.lenses.registry import head_tables
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.results.schema import IDENTITY_COLUMNS, LAYER_COLUMNS, REPLICATES, TABLES
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.tables.makers import WORTH_SEVERAL
from qkscope.tables.parts import stored

if TYPE_CHECKING:
    from qkscope.cost.work import CheckpointWork

EIGEN = 25  # FLOPs of an eigendecomposition with its vectors, in units of width³
FACTS = {*IDENTITY_COLUMNS, *LAYER_COLUMNS}  # what says whose a line is


# -- eigenproblems -----------------------------------------------------------------------------------------


def eigen_flops(work: CheckpointWork) -> float:
    """FLOPs of the eigenproblems: one for each head and window (own, common, and every doubling, each once).

    Where groups of documents have full squares, one more for each group; elsewhere replicates take a small subspace.
    """
    context = work.context
    common = min(work.common_window or context, context)
    windows = len({*work.layout.windows(), context, common})
    groups = min(work.layout.groups, work.documents)
    replicates = groups * len({context, common}) if groups >= FEWEST_GROUPS else 0
    every = sum(facts.q_heads for facts in work.layers)
    cubes = sum(facts.q_heads * facts.head_dim**3 for facts in work.layers) / every
    return EIGEN * cubes * work.heads * (windows + replicates)


def eigen_turns(work: CheckpointWork, cores: int) -> float:
    """The share of the tables' FLOPs that one core makes when layers are shared out, a whole layer to a core."""
    layers = len(work.layers)
    return ceil(layers / cores) / layers


# -- lines -------------------------------------------------------------------------------------------------


class TableAmount(NamedTuple):
    """Of tables: lines, numbers in them (without what says whose they are), and bytes."""

    lines: float
    numbers: float
    bytes: float

    def times(self, count: float) -> TableAmount:
        """So often."""
        return TableAmount(self.lines * count, self.numbers * count, self.bytes * count)

    def plus(self, other: TableAmount) -> TableAmount:
        """Both."""
        return TableAmount(self.lines + other.lines, self.numbers + other.numbers, self.bytes + other.bytes)


NOTHING = TableAmount(0, 0, 0)


def table_amounts(work: CheckpointWork) -> TableAmount:
    """This checkpoint's part of all head tables."""
    total, every = NOTHING, sum(facts.q_heads for facts in work.layers)
    of_kind: Counter[tuple[int, Rotary]] = Counter()
    heads_of: Counter[tuple[int, Rotary]] = Counter()
    for facts in work.layers:
        of_kind[facts.head_dim, facts.rotary] += 1
        heads_of[facts.head_dim, facts.rotary] += facts.q_heads
    for kind, layers in of_kind.items():
        groups = min(work.layout.groups, work.documents)
        one = _Sample(work.layout, *kind, groups, work.components, work.common_window, work.detail)
        by_head, by_layer = sampled_amounts(one, head_tables())
        total = total.plus(by_head.times(work.heads * heads_of[kind] / every)).plus(by_layer.times(layers))
    return total


@dataclass(frozen=True)
class _Sample:
    """What the lines of one head depend on."""

    layout: Layout
    width: int
    rotary: Rotary
    groups: int  # that have documents
    components: int
    common: int | None
    detail: bool


@lru_cache(maxsize=64)
def sampled_amounts(sample: _Sample, tables: tuple[HeadTable, ...]) -> tuple[TableAmount, TableAmount]:
    """What one head has in the tables, and what one layer has beside its heads."""
    context = sample.layout.context
    settings = RowSettings(
        common=min(sample.common or context, context), components=sample.components, detail=sample.detail
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that random sums do not define
        made = checkpoint_rows(_random_moments(sample), tables, settings, model="step-1000")
    by_head = by_layer = NOTHING
    for name, rows in made.items():
        header, contents = stored(name, rows)
        amount = TableAmount(len(rows), len(rows) * len(set(header.split(",")) - FACTS), len(contents))
        if name == REPLICATES or (name in TABLES and TABLES[name].per == "head"):
            by_head = by_head.plus(amount)
        else:
            by_layer = by_layer.plus(amount)
    return by_head, by_layer


def _random_moments(sample: _Sample) -> Moments:
    """One layer of one head: each group has a document with tokens in all buckets, more than the head has widths."""
    layout, width, half = sample.layout, sample.width, sample.width // 2
    rotation = None
    if sample.rotary == "rotary" and half:
        rotation = Rotation(tuple((i, i + half) for i in range(half)), tuple(1 / (1 + i) for i in range(half)))
    facts = LayerFacts(0, 1, 1, width, sample.rotary, 2 * half if rotation else None, rotation=rotation)
    moments = Moments(layout, [facts], {"n_layers": 2})
    many = max(2 * width, 4 * layout.buckets)
    at = np.unique(np.linspace(0, layout.context - 1, many).round().astype(np.int64))
    rng = np.random.default_rng(0)
    for group in range(sample.groups):
        q, k = (rng.normal(size=(1, 1, len(at), width)) for _ in "qk")
        moments.add(0, q, k, positions=at[None], groups=group)
    return moments


# -- who makes them ----------------------------------------------------------------------------------------


def processes(works: Sequence[CheckpointWork], share: float, cores: int) -> int:
    """How many processes make this share of the tables: as many as have something to do."""
    size = share * sum(work.sizes.file for work in works)
    return max(1, min(cores, ceil(share * len(works)), int(size // WORTH_SEVERAL)))
