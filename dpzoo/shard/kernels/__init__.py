"""Algorithms on plain tensors and a group: the loops that overlap communication with compute."""
