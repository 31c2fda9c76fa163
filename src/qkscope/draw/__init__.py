"""Style of figures: colors, text, axes, files."""
