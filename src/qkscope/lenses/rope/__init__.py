"""What RoPE alone predicts of every head, and what is left."""

from qkscope.lenses.base import Lens
from qkscope.lenses.rope import kernel, planes, table
from qkscope.lenses.rope.split_table import SPLITS

LENS = Lens(
    name="rope",
    title="RoPE alone",
    question="How much of a head's position signal does RoPE alone predict?",
    tables=(table.TABLE, planes.TABLE, kernel.TABLE),
    of_study=(SPLITS,),
)
