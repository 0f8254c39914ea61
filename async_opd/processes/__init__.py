"""Members, their restarts and their ends."""
