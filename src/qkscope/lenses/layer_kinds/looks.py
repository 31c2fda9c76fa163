"""How each kind of layer looks: one colour, mark and line for it in every figure of a study."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.draw import style

Dashes = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class KindLook:
    """The look of one kind of layer."""

    colour: str
    marker: str
    line: Dashes = "-"


ROTARY, NOPE = KindLook(style.BLUE, "o"), KindLook(style.AMBER, "^", "--")
# Far apart in lightness as well as in hue; more kinds than these begin again.
OTHERS = (
    KindLook("#0f766e", "s", (0, (5, 1))),
    KindLook("#9d174d", "D", (0, (3, 1, 1, 1))),
    KindLook("#4c1d95", "v", (0, (1, 1))),
    KindLook("#65a30d", "P", (0, (4, 2, 1, 2, 1, 2))),
)


def kind_looks(kinds: Sequence[str]) -> dict[str, KindLook]:
    """The looks of these kinds: rotary and NoPE layers with full attention always look the same."""
    usual = {"rotary": ROTARY, "rotary, full": ROTARY, "NoPE": NOPE, "NoPE, full": NOPE}
    others = [kind for kind in kinds if kind not in usual]
    return {kind: usual[kind] if kind in usual else OTHERS[others.index(kind) % len(OTHERS)] for kind in kinds}
