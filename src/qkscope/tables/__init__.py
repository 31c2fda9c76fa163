"""From moments to the tables of a results folder."""
