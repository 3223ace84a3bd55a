"""Whole studies: which runs, and several of them at a time, on one machine or under torchrun."""
