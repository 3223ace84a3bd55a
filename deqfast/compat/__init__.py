"""Ways in from other libraries: ``get_deq`` has torchdeq's interface, ``deepinv`` takes deepinv's algorithms."""

from .torchdeq import DEQ, get_deq

__all__ = ["DEQ", "get_deq"]
