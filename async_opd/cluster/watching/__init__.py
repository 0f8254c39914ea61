"""Watches the cluster of a run: lost nodes, the GPUs that are missing then, a lost head."""
