"""Measurements: TierZero beside other systems, on the same model and data."""
