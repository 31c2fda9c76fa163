"""Figures with their cards: what was found (`findings`), in which words (`phrases`, `cards`), written out."""
