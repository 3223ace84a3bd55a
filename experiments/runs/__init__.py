"""Runs that are recorded and resumed: their options, files, records and processes."""
