"""The page's own colors: blue and red are queries and keys and nothing else, so categories have others.

Each category has a color for light and one for dark paper; on either, `mixed` stands back. Any two on one paper differ
by at least `LEAST` (CIEDE2000) for readers with typical vision and with protanopia, deuteranopia or tritanopia; a test
computes it. Position-dominated heads whose keys track position in reverse have a color of their own. Parts and causes
have the colors of the figures (`Measure.color`, `draw/palette.py`).
"""

from qkscope.lenses.categories import (
    CONTENT_FOCUSED,
    K_POSITIONAL,
    MIXED,
    POSITION_DOMINATED,
    Q_POSITIONAL,
    UNDEFINED,
)

LEAST = 18.0
AGAINST = "keys in reverse"  # position-dominated with r_k below 0
CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#5b2a86",
    AGAINST: "#ffb01a",
    Q_POSITIONAL: "#07b388",
    K_POSITIONAL: "#8c84a1",
    CONTENT_FOCUSED: "#2b4f00",
    MIXED: "#cdd1d7",
    UNDEFINED: "#ffffff",
}
DARK_CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#a188c0",
    AGAINST: "#ffb219",
    Q_POSITIONAL: "#07d1a4",
    K_POSITIONAL: "#d4d2ef",
    CONTENT_FOCUSED: "#558428",
    MIXED: "#4b5058",
    UNDEFINED: "#161b22",
}
# Signed values: brown below 0, green-blue above, pale at 0.
DIVERGING = ("#543005", "#8c510a", "#bf812d", "#dfc27d", "#f4f1ea", "#a6d8cd", "#4ca79b", "#12766c", "#003c30")
# Values of one sign: pale to dark, the upper half of the same map.
SEQUENTIAL = DIVERGING[4:]
# Lines, bars and parts that are neither queries nor keys nor categories.
SERIES = ("#3f4a5a", "#b7791f", "#2f8f83", "#a26bb5")
