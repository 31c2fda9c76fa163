"""Analyses of the sums: each lens is a room with its tables, figures, cards and what the page shows.

A new analysis is a folder here and a line below.
"""

from qkscope.lenses import (
    ablation,
    across_models,
    claims,
    concordance,
    depth,
    layer_kinds,
    measures,
    norms,
    null,
    plasticity,
    position,
    profile,
    rope,
    rotation,
    runs,
    sample,
    score,
    taxonomy,
    windows,
)
from qkscope.lenses.registry import register

ROOMS = (
    position,
    concordance,
    taxonomy,
    layer_kinds,
    depth,
    windows,
    measures,
    profile,
    score,
    rotation,
    rope,
    plasticity,
    norms,
    null,
    ablation,
    across_models,
    runs,
    claims,
    sample,
)

for room in ROOMS:
    register(room.LENS)
