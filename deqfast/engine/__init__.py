"""Solves: compiled once for a layout and a set of options, and run by one of several runners."""
