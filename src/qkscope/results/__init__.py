"""A results folder: where everything in it lies, and what may be removed from it."""
