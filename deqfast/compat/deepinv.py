"""deepinv's optimisation algorithms as deep equilibrium models on deqfast's solvers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..api.block import DEQBlock
from ..gradients import Adjoint
from ..solution import Solution
from ..solvers import Solver

# Number of variables that an iteration continues from. With one, each iteration recomputes the auxiliary variable.
_VARIABLES = {"GD": 1, "PGD": 1, "HQS": 1, "ADMM": 2, "DRS": 2, "CP": 3}


class _Iteration(nn.Module):
    """One iteration of a model as a cell of x = (y, physics)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.variables = _VARIABLES[_name(model)]

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, Any]) -> tuple[Tensor, ...]:
        model, (y, physics) = self.model, x
        fidelity, prior = model.update_data_fidelity_fn(0), model.update_prior_fn(0)
        state = model.fixed_point.iterator({"est": z}, fidelity, prior, model.update_params_fn(0), y, physics)
        return tuple(state["est"][: self.variables])

    def initial_state(self, x: tuple[Tensor, Any], init: Any = None) -> tuple[Tensor, ...]:
        """The model's own start: as many variables as its iterations continue from."""
        y, physics = x
        start, *rest = self.model.init_iterate_fn(y, physics, init)["est"]
        if _name(self.model) in ("ADMM", "DRS"):  # their second variable has the shape of the image
            rest = [z if z.shape == start.shape else torch.zeros_like(start) for z in rest]
        return tuple([start, *rest][: self.variables])


def _name(model: Any) -> str:
    return type(model.fixed_point.iterator).__name__.removesuffix("Iteration")


class Equilibrium(nn.Module):
    """Algorithm of deepinv (>= 0.4), solved for its fixed point by deqfast. Each image stops independently.

    Runs GD, PGD and HQS, and three algorithms of several variables that deepinv's own DEQ does not support: ADMM, DRS
    and CP. The model's `max_iter`, stopping rule and acceleration are not used. `get_output` gets what is iterated.

    Args:
        model: a ``deepinv.optim.BaseOptim``, such as ``deepinv.optim.PGD(...)``, with or without ``DEQ``.
        solver: as for ``DEQBlock``.
        adjoint: as for ``DEQBlock``.
        options: further ones of ``DEQBlock``.

    Raises:
        TypeError: `model` is not a ``BaseOptim``.
        ValueError: the model runs another algorithm, or what the text names changes between iterations.

    Attributes:
        solution: Solution of the last call, or None.
    """

    solution: Solution | None

    def __init__(
        self, model: Any, solver: str | Solver = "anderson", adjoint: str | Adjoint = "implicit", **options: Any
    ) -> None:
        super().__init__()
        iterator = getattr(getattr(model, "fixed_point", None), "iterator", None)
        if iterator is None or not hasattr(model, "init_params_algo"):
            raise TypeError(f"model must be a deepinv.optim.BaseOptim, got {type(model).__name__}")
        if _name(model) not in _VARIABLES:
            raise ValueError(f"model must be one of {', '.join(_VARIABLES)}, got {_name(model)}")
        several = {name: len(value) for name, value in dict(model.init_params_algo).items() if len(value) > 1}
        several |= {name: len(v) for name in ("prior", "data_fidelity") if (v := getattr(model, name)) and len(v) > 1}
        if several:
            raise ValueError(f"a fixed point needs the same iteration throughout, but the model has lists of {several}")
        self.iteration = _Iteration(model)
        self.block = DEQBlock(self.iteration, solver, adjoint, **options)
        self.solution = None

    def forward(self, y: Tensor, physics: Any, init: Any = None) -> Tensor:
        """Restored images (B, C, H, W) for the measurements y; `init`: as deepinv's models take it."""
        x = y, physics
        value, self.solution = self.block(x, z0=self.iteration.initial_state(x, init), return_solution=True)
        return self.iteration.model.get_output({"est": value})
