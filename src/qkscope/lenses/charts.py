"""Charts as declarations over measures.

A lens names the measures; `report/charts` draws them for any kind of study: native context length solid and common
window hollow, layer types as panels, lines for one training run and dots for seeds and models, error bars where errors
are known. No lens asks about windows, layer types, or kinds of study.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Panel:
    """One set of axes: the means of some measures."""

    measures: tuple[str, ...]
    title: str = ""  # the measure's title by default
    largest: bool = False  # also draw the head with the largest value


@dataclass(frozen=True)
class Trajectories:
    """Means over heads by checkpoint, ± 1 SD over heads as a band, ± 1 SE over documents as bars."""

    panels: tuple[Panel, ...]
    heads: bool = False  # also every head as a faint dot

    @property
    def measures(self) -> tuple[str, ...]:
        """All measures, in order."""
        return tuple(dict.fromkeys(name for panel in self.panels for name in panel.measures))


@dataclass(frozen=True)
class Shares:
    """Stacked bars of measures that add up to at most 1, by checkpoint or by depth."""

    stack: tuple[str, ...]  # bottom first
    over: Literal["checkpoints", "depth"] = "checkpoints"
    below: tuple[str, ...] = ()  # means drawn as lines in a narrow panel under the bars

    @property
    def measures(self) -> tuple[str, ...]:
        """All measures, in order."""
        return (*self.stack, *self.below)


@dataclass(frozen=True)
class DepthMap:
    """Means by checkpoint (rows) and layer or depth bin (columns), one map per measure."""

    measures: tuple[str, ...]
    margin: str = ""  # an indicator whose share of heads is printed at the end of each row of the last map


@dataclass(frozen=True)
class HeadScatter:
    """A dot per head at up to six checkpoints, colored by category or layer type."""

    x: str
    y: str
    color: Literal["category", "layer_type"] = "layer_type"
    thresholds: tuple[float, ...] = ()  # dashed lines on both axes
    diagonal: bool = False  # where both measures agree
    second: tuple[str, str] | None = None  # another pair of measures, in panels below

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Each pair of measures: across, and up."""
        return ((self.x, self.y), *([self.second] if self.second else []))

    @property
    def measures(self) -> tuple[str, ...]:
        """All measures, in order."""
        return tuple(name for pair in self.pairs for name in pair)


@dataclass(frozen=True)
class Drawing:
    """A picture of its own kind: `function` is a place, `package.module:name`, called with the study's tables."""

    function: str
    measures: tuple[str, ...] = ()  # those that the card reports


Chart = Trajectories | Shares | DepthMap | HeadScatter | Drawing
