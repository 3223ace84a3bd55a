"""Training steps on a GPU: each is one launch, whose learning rate is still a float for the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import deqfast

from .options import SettingsError, StudyError, option

EAGER, GRAPHED = "eager", "graphed"  # how training steps ran
DEVICES = ("auto", "cpu", "cuda")


def eager_option() -> Any:
    """Option that turns graphs off."""
    return option("machine", "on a GPU, do not make one launch (a CUDA graph) of each training step", False)


def chosen_device(asked: str) -> str:
    """Device that one of DEVICES means here; SettingsError for "cuda" without a GPU."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: PyTorch sees no GPU here")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def graphed(step: Callable[[Any], Any], optimizer: Optimizer | None, device: torch.device) -> Callable[[Any], Any]:
    """``deqfast.make_graphed_step``, for a loop that sets the rate of the optimiser's first group to a float.

    A graph would repeat a float, so a tensor holds it. StudyError if the step cannot be captured.
    """
    launch, rate = deqfast.make_graphed_step(step), torch.zeros((), device=device)

    def call(batch: Any) -> Any:
        group = optimizer.param_groups[0] if optimizer is not None else {"lr": rate}
        if group["lr"] is not rate:
            group["lr"] = rate.fill_(group["lr"])
        try:
            return launch(batch)
        except RuntimeError as error:
            if not str(error).startswith("make_graphed_step"):
                raise
            raise StudyError(f"{error}; --eager does without a graph") from error

    return call


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """State whose rate is a float, so that graphed and eager steps may continue it."""
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = float(state["param_groups"][0]["lr"])
    return state
