"""Summaries, figures with their cards, and the page, written into a results folder."""
