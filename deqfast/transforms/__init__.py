"""Solves within torch.func, torch.compile and torch.export."""
