"""Analyses of the sums: each lens is a room with its tables, figures, cards and what the page shows.

A new analysis is a folder here and a line below.
"""

from qkscope.lenses import concordance, depth, layer_kinds, measures, position, rope, taxonomy, windows
from qkscope.lenses.registry import register

for room in (position, concordance, taxonomy, layer_kinds, depth, windows, measures, rope):
    register(room.LENS)
