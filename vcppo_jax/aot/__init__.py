"""Compiling ahead of time for hardware that is not here, and what a compiled program costs on it."""
