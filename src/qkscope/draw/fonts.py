"""Letters for every label: fonts of this machine beside matplotlib's own, and what is said where none has a character.

matplotlib ships DejaVu Sans, which has no Chinese, Japanese or Korean and few emoji. Those characters are taken from
the first font of `OTHERS` that is installed here and has them. A character that no font has is written as its number
(`[U+4E2D]`) instead of an empty box, and a warning names the text.
"""

import warnings
from functools import cache

from matplotlib.font_manager import FontProperties, fontManager, get_font

from qkscope.errors import QkscopeWarning

OWN = "DejaVu Sans"  # ships with matplotlib: the same letters on every machine
# Outline fonts only: coloured emoji are pictures, which matplotlib cannot draw as text.
OTHERS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC", "Noto Sans SC", "Noto Sans JP",
    "Noto Sans KR", "Source Han Sans SC", "Source Han Sans", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Droid Sans Fallback", "IPAexGothic", "IPAGothic", "TakaoGothic", "NanumGothic", "UnBatang", "PingFang SC",
    "Hiragino Sans", "Hiragino Sans GB", "Heiti TC", "Apple SD Gothic Neo", "Arial Unicode MS", "Microsoft YaHei",
    "SimHei", "SimSun", "MS Gothic", "Yu Gothic", "Malgun Gothic", "Noto Sans", "Noto Sans Arabic",
    "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji", "Noto Sans Symbols2", "Noto Sans Symbols", "Symbola",
    "Segoe UI Symbol", "Segoe UI Emoji", "FreeSans", "FreeSerif", "Unifont",
)  # fmt: skip


@cache
def families() -> tuple[str, ...]:
    """The fonts to draw with, the first that has a character draws it."""
    there = {entry.name for entry in fontManager.ttflist}
    return (OWN, *(name for name in OTHERS if name in there))


@cache
def _characters(family: str) -> frozenset[int]:
    path = fontManager.findfont(FontProperties(family=[family]), fallback_to_default=False)
    return frozenset(get_font(path).get_charmap())


def drawable(text: str) -> str:
    """The text with every character that no font here has written as its number; a warning names the text then."""
    missing = {c for c in text if not any(ord(c) in _characters(family) for family in families())}
    if not missing:
        return text
    warnings.warn(
        f"no font on this machine has {_some(sorted(missing))} of {text!r}: figures show numbers instead, the page "
        "and the cards show the text; install for instance Noto Sans CJK or Noto Emoji",
        QkscopeWarning,
        stacklevel=2,
    )
    return "".join(f"[U+{ord(c):04X}]" if c in missing else c for c in text)


def _some(characters: list[str], most: int = 5) -> str:
    return "".join(characters[:most]) + ("…" if len(characters) > most else "")
