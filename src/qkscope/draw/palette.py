"""The colors that figures and the page share, without matplotlib."""

BLUE, RED, PURPLE = "#3b82f6", "#ef4444", "#8b5cf6"
INK, GREY, LINE, FAINT = "#1f2937", "#6b7280", "#9ca3af", "#d1d5db"
# Causes of a change, far apart in lightness; figures add hatches where only hue differs.
CAUSE_COLOURS = {"window": "#0f766e", "base": "#c4b5fd", "weights": "#f59e0b", "unexplained": "#e5e7eb"}
AMBER = "#b45309"  # far from the blue in hue and lightness, for any colour vision
