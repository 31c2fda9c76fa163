"""Rotary and NoPE layers, full, sliding and chunked attention, apart."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.kind_of_layer import with_layer_kind
from qkscope.lenses.layer_kinds import card
from qkscope.lenses.layer_kinds.table import layer_kinds_at

LENS = Lens(
    name="layer_kinds",
    title="Kinds of layers",
    question="Do layers of different kinds differ?",
    derive=with_layer_kind,
    summaries=(Summary("layer_kinds", layer_kinds_at, at_common_window=False),),
    figures=(
        Figure(
            "layer_kinds",
            later("qkscope.lenses.layer_kinds.figure:draw_layer_kinds"),
            card.layer_kinds,
            needs=("trajectory", "layer_kinds"),
            number=8,
            leads=1,
        ),
    ),
)
