"""Whether torch.export traces: what is then to be avoided is a look at values or at memory."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Answer whether ``torch.export`` traces this, with strict=False; torch 2.11 takes torch.compile for an export."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()
