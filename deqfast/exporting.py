"""Traces by torch.export and torch.compile. In one, a look at values or at memory, and a change of mode, are to be
avoided."""

from __future__ import annotations

import re
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


def reason(error: BaseException) -> str:
    """Why a trace failed: what torch explains, else the first line of the error's first cause."""
    if explained := re.search(r"Explanation: (.+)", str(error)):
        return explained[1]
    while (cause := getattr(error, "inner_exception", error.__cause__)) is not None:
        error = cause
    return (str(error).strip() or type(error).__name__).splitlines()[0]
