"""Sentences for facts: numbers, names, cards."""
