"""How each kind of layer looks: one colour, marker and line for it in every figure of a study."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from qkscope.draw import style
from qkscope.draw.curves import draw_errors

ASIDE = 0.06  # of the step from one entry to the next
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


def draw_kinds(
    axes: Axes,
    kinds: dict[str, pd.DataFrame],
    measure: str,
    colour: str,
    x: Iterable[float],
    *,
    joined: bool,
    scale: float = 1.0,
) -> None:
    """Beside a mean over all heads those of each kind of layer: hollow, with the kind's marker and the mean's colour.

    `kinds` has a row for each entry, whose values are missing where it has no such layers. Where no line joins the
    entries, marks stand a little to the right: kinds that hardly differ would hide the mean.
    """
    places: npt.NDArray[np.float64] = np.array(list(x), dtype=np.float64)
    for number, (kind, mark) in enumerate(kind_marks(list(kinds)).items()):
        rows, at = kinds[kind], places + (0.0 if joined else ASIDE * (number + 1))
        axes.plot(
            at, scale * rows[measure], color=colour, marker=mark.marker, linestyle="none",
            markersize=0.85 * style.marker_size(len(places)), markerfacecolor="white", markeredgewidth=1.1, zorder=5,
            gid=f"{measure} {kind}",
        )  # fmt: skip
        if f"{measure}_se" in rows.columns:
            draw_errors(axes, at, scale * rows[measure], scale * rows[f"{measure}_se"], gid=f"{measure} {kind}")
