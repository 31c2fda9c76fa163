"""Single tokens of single heads, where vectors were kept."""

from qkscope.lenses.base import Lens
from qkscope.lenses.sample.table import DETAIL, TABLE

LENS = Lens(
    name="sample",
    title="Kept tokens",
    question="Where do single queries and keys of a head lie?",
    tables=(TABLE,),
    details=(DETAIL,),
)
