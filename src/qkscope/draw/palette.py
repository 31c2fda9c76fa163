"""The colours of all figures and of the page, without matplotlib: one place, so that both look alike."""

BLUE, RED, PURPLE = "#3b82f6", "#ef4444", "#8b5cf6"
INK, GREY, LINE, FAINT = "#1f2937", "#6b7280", "#9ca3af", "#d1d5db"
AMBER = "#b45309"  # far from the blue in hue and lightness, for any colour vision

# Nine stops each of matplotlib's Blues and Reds, for drawings that are not made by matplotlib.
BLUES = ("#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b")
REDS = ("#fff5f0", "#fee0d2", "#fcbba1", "#fc9272", "#fb6a4a", "#ef3b2c", "#cb181d", "#a50f15", "#67000d")
