"""How each kind of layer looks: one colour, marker and line for it in every figure of a study."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.draw import style

Dashes = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class KindMark:
    """How one kind of layer is drawn."""

    colour: str
    marker: str
    line: Dashes = "-"


ROTARY, NOPE = KindMark(style.BLUE, "o"), KindMark(style.AMBER, "^", "--")
# Far apart in lightness as well as in hue; more kinds than these begin again.
OTHERS = (
    KindMark("#0f766e", "s", (0, (5, 1))),
    KindMark("#9d174d", "D", (0, (3, 1, 1, 1))),
    KindMark("#4c1d95", "v", (0, (1, 1))),
    KindMark("#65a30d", "P", (0, (4, 2, 1, 2, 1, 2))),
)


def kind_marks(kinds: Sequence[str]) -> dict[str, KindMark]:
    """The marks of these kinds: rotary and NoPE layers with full attention always look the same."""
    usual = {"rotary": ROTARY, "rotary, full": ROTARY, "NoPE": NOPE, "NoPE, full": NOPE}
    others = [kind for kind in kinds if kind not in usual]
    return {kind: usual[kind] if kind in usual else OTHERS[others.index(kind) % len(OTHERS)] for kind in kinds}
