"""Analyses of the sums: each lens is a room with its table, figures, cards and views."""
