"""Set a results folder against published numbers or another folder: one room for the whole feature."""
