"""The CPU Adam kernel, the optimizer, clipping, loss scaling and the update pipeline."""
