"""Predicts a run before it is started: discrete events in virtual time, thousands of replicas."""
