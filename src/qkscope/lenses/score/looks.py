"""How the parts of a score look: one colour and name each, in every figure of the lens."""

from dataclasses import dataclass

from qkscope.draw import style


@dataclass(frozen=True)
class PartLook:
    """The look of one part."""

    name: str
    colour: str


# From the bottom of a bar to its top, dark and light in turn, so that neighbours differ in print and for any eye.
LOOKS = (
    PartLook("position", "#6d28d9"),
    PartLook("query-position", "#c4b5fd"),
    PartLook("preference", style.AMBER),
    PartLook("query", "#99d5cf"),
)
