"""Internals of torch that deqfast relies on. Each assumption is stated here once, and tested for each version."""
