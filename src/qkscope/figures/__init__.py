"""Tables in, pictures out. Figures compute nothing; matplotlib is imported only when something is drawn."""
