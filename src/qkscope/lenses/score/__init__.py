"""What scores are made of: position, a fixed preference among keys, and what depends on the query."""

from qkscope.lenses.base import Lens
from qkscope.lenses.score.map_table import TABLE as MAP
from qkscope.lenses.score.table import TABLE

LENS = Lens(name="score", title="Score", question="What do scores follow?", tables=(TABLE, MAP))
