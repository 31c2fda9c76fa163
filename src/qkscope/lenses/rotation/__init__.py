"""How queries and keys drift with position, along which axis, and what that adds to a score."""

from qkscope.lenses.base import Figure, Lens, Summary, View, later
from qkscope.lenses.rotation.planes import TABLE as PLANES
from qkscope.lenses.rotation.summaries import depth_at, relation_at, rotation_at
from qkscope.lenses.rotation.table import TABLE

DRAW = "qkscope.lenses.rotation"

LENS = Lens(
    name="rotation",
    title="Drift and separation",
    question="Along which axis do queries and keys drift, and what does that add to a score?",
    tables=(TABLE, PLANES),
    summaries=(
        Summary("rotation", rotation_at),
        Summary("rotation_depth", depth_at),
        Summary("rotation_relation", relation_at),
    ),
)
