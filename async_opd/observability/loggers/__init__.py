"""Loggers through their own libraries (``log.loggers``), and the run's metadata for them."""
