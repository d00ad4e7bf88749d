"""Advantages and losses: pure functions from arrays to arrays."""
