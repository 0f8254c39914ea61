"""One table for each framework: every key that it knows, and what becomes of it."""
