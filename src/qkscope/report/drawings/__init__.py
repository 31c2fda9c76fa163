"""Figures that no declared chart describes: each function here draws one picture of a study."""
