"""Moments in, tables out: pure functions over numpy and pandas, no model and no torch."""
