"""The parts of a ``tierzero train`` run: ranks, schedule, metrics, progress, checkpoints, signals."""
