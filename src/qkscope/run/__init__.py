"""Plan a study's captures, run them on any engine, resume them, and say how far they are."""
