"""A cluster's nodes and their comparison, the GPUs reserved on them, their order after a loss."""
