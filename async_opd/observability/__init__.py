"""What people look at: run.log, metrics, console, wandb, trace, and the watch for a stalled run."""
