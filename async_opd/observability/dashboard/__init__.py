"""The saved wandb workspace of a run: its panels, and what each of them tells."""
