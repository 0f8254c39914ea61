"""Views of a run: run.log, metrics, console, wandb, trace, and the watch for a stalled run."""
