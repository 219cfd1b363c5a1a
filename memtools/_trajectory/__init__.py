"""Trajectories that are kept for several epochs of updates: the store, its epochs, the settings."""
