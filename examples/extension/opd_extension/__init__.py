"""A loss and a prompt source for async_opd; config.yaml beside the package uses both."""
