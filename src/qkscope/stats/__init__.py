"""What a table bears out: changes against their noise, courses of curves."""
