"""From moments or raw vectors to the tables of a results folder."""
