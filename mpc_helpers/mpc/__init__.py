"""Noise: the one computation that the three helpers run together."""
