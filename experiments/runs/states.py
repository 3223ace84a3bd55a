"""States of a training: written and read as checkpoints, and taken over if they fit."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten

from .files import reading, write_atomically

REMEDY = "delete it, and --resume trains from the start"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace a checkpoint, atomically."""
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def read_state(path: Path, progress: type) -> dict[str, Any] | None:
    """Read what `write_state` wrote; None without such a file. `progress` is a dataclass of entries that it must have.

    Raises Unreadable if it is damaged.
    """
    if not path.exists():
        return None
    with reading(path, REMEDY):
        with zipfile.ZipFile(path) as archive:  # torch.load itself does not look at the archive's checksums
            if changed := archive.testzip():
                raise ValueError(f"checksum of {changed} is wrong")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        msgspec.convert(state, progress)
    return state


def take_over(path: Path, state: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Load the states of these objects, by name. Raises Unreadable if one does not fit, with the file it is from."""
    with reading(path, REMEDY):
        for name, part in kept.items():
            expected = _stepped(part) if isinstance(part, Optimizer) else part.state_dict()
            part.load_state_dict(state[name])
            if isinstance(part, Optimizer | LRScheduler):  # these take anything; modules check for themselves
                _check_like(name, part.state_dict(), expected)


def _stepped(optimizer: Optimizer) -> dict[str, Any]:
    """State after a first step, which makes what the optimiser keeps of each parameter."""
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return twin.state_dict()


def _check_like(name: str, state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ValueError if a state has other entries, shapes or types than another one."""
    if "state" in expected:  # a parameter that never had a gradient has none
        expected = expected | {"state": {index: expected["state"][index] for index in state["state"]}}
    (leaves, tree), (others, other_tree) = tree_flatten(state), tree_flatten(expected)
    if tree != other_tree or list(map(_kind, leaves)) != list(map(_kind, others)):
        raise ValueError(f"{name} has other entries, shapes or types")


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
