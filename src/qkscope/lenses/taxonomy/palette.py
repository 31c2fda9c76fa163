"""The published colours of the categories, without matplotlib: figures and page share them."""

from qkscope.lenses.taxonomy.table import (
    CONTENT_FOCUSED,
    K_POSITIONAL,
    MIXED,
    POSITION_DOMINATED,
    Q_POSITIONAL,
    UNDEFINED,
)

CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#3b82f6",
    Q_POSITIONAL: "#6366f1",
    K_POSITIONAL: "#ec4899",
    CONTENT_FOCUSED: "#10b981",
    MIXED: "#9ca3af",
    UNDEFINED: "#ffffff",
}
