"""What a run notices of its cluster: lost nodes, the GPUs that are missing then, a lost head."""
