"""Loggers through their own libraries (``log.loggers``), and what all are told of a run."""
