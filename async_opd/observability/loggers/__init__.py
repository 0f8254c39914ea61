"""Loggers beside wandb, each through its own library: ``log.loggers``."""
