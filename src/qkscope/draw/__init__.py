"""How figures look: style, colours, saving."""
