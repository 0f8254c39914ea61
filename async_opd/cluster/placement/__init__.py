"""The cluster's nodes, GPUs or places that are reserved on them, and their order after a loss."""
