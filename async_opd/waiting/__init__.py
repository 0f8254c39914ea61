"""Waits with a bound: deadlines, progress watchdogs, gates, and races of several waits."""
