"""Whether torch.export traces: what is then to be avoided is a look at values or at memory, and a change of mode."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_exporting() -> bool:
    """Answer whether ``torch.export`` traces this, with strict=False; torch 2.11 takes torch.compile for an export."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


def is_tracing() -> bool:
    """Answer whether ``torch.compile`` or ``torch.export`` traces this; ``is_compiling`` tells of other threads too."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def outside_exports(mode: AbstractContextManager) -> AbstractContextManager:
    """`mode`, such as no_grad; nothing in an export, which it would cut into parts that torch 2.15 cannot load."""
    return nullcontext() if is_exporting() else mode
