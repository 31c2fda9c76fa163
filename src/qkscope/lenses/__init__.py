"""Analyses of the sums: each lens is a room with its tables, figures, cards and what the page shows.

A new analysis is a folder here and a line below.
"""

from qkscope.lenses import (
    ablation,
    across_models,
    attention,
    categories,
    claims,
    concordance,
    kind_of_layer,
    measures,
    norms,
    plasticity,
    position,
    profile,
    rope,
    rotation,
    runs,
    sample,
    score,
    shifted,
    windows,
)
from qkscope.lenses.registry import register

ROOMS = (
    position,
    concordance,
    categories,
    kind_of_layer,
    windows,
    measures,
    profile,
    score,
    rotation,
    rope,
    plasticity,
    norms,
    attention,
    shifted,
    ablation,
    across_models,
    runs,
    claims,
    sample,
)

for room in ROOMS:
    register(room.LENS)
