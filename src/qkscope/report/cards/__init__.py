"""One module per card (or pair of cards): facts in, Markdown out. `build.py` knows which card goes where."""
