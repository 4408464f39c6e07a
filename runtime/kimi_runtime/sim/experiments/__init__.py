"""Experiments: regimes that stand in files, the runs they ask for, and what they show."""
