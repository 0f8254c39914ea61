"""Checks of runs with images: which models get them, and whether these can take them."""
