"""Which rows the tables of a checkpoint have: windows, components, heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkscope.study.heads import HeadSample, LayerChoice, head_sample, layer_choice
from qkscope.study.schema import Study

COMPONENTS = 10  # as published; explained variance is spread thinly beyond


@dataclass(frozen=True)
class RowSettings:
    """Which rows tables have."""

    own: int | None = None  # tokens of the checkpoint's native context; by default all positions of its sums
    common: int | None = None  # tokens of the common window; by default there is nothing to compare with
    components: int = COMPONENTS
    heads: HeadSample | None = None
    layers: LayerChoice = "all"
    skip: int = 0  # leading positions that are left out: 1 leaves out attention sinks
    detail: bool = True  # whether tables with many rows per head are made
    vectors: Path | None = None  # where a sample of the checkpoint's vectors is kept, if one is
    common_of_sums: bool = False  # whether the common window is the one that the sums were made for


def row_settings(study: Study) -> RowSettings:
    """The settings of a study."""
    window = study.window_in_common()
    return RowSettings(
        common=window,
        components=study.components,
        heads=head_sample(study),
        layers=layer_choice(study),
        skip=study.skip_positions,
        detail=study.in_detail(),
        common_of_sums=window is None,
    )
