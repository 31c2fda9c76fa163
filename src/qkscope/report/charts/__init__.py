"""Draws the charts that lenses declare, and pictures of their own kind; each function returns a matplotlib figure."""
