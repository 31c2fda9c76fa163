"""Single tokens of single heads, where vectors were kept."""

from qkscope.lenses.base import Detail, Lens
from qkscope.lenses.sample.table import TABLE

LENS = Lens(
    name="sample",
    title="Kept tokens",
    question="Where do single queries and keys of a head lie?",
    tables=(TABLE,),
    details=(Detail("sample", TABLE, ("token",), ("position", "q_pc0", "q_pc1", "k_pc0", "k_pc1")),),
)
