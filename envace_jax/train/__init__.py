"""Training: packing, the update, checkpoints, the loop, and the supervised warm start."""
