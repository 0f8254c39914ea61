"""Predicts a run before it is paid for: discrete events, no sleeping, thousands of replicas."""
