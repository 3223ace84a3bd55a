"""How gradients pass a solve: JFB, Implicit, Phantom, SHINE, Unrolled. The one place that touches autograd for solves.

The forward value is the solver's z*, in training and evaluation alike. Gradients attach to one more evaluation of the
cell at z*, in which samples whose solve broke down are replaced by a healthy one, and then get no gradient: one NaN
row of x cannot turn a weight gradient into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .graphs import Graphs
from .ops.double_backward import NoDoubleBackward
from .packing import Packing
from .solution import Solution, Status
from .solve import finite_rows, solve
from .solvers import Solver, as_solver
from .solvers.base import check_count, check_number

Cell = Callable[[Any, Any], Any]


@dataclass
class Problem:
    """One forward pass of a DEQBlock: solve z = cell(z, x) from z0 with these settings."""

    cell: Cell
    x: Any
    z0: Any
    solver: Solver
    options: dict[str, Any]  # of every `solve`: kernel, check_every
    on_backward: Callable[[Solution], None]  # receives the Solution of a backward solve
    forward_options: dict[str, Any] = field(default_factory=dict)  # of the forward `solve` alone: compact, trace
    graphs: Graphs | None = None  # the forward solve is captured and replayed by them

    def solve(self) -> Solution:
        records = self.forward_options.get("trace") or self.forward_options.get("keep_inverse")
        if hasattr(self.cell, "fixed_point") and not records:
            with torch.no_grad():
                solution = self.cell.fixed_point(self.x, self.z0, self.solver, self.options["kernel"])
            if solution is not None:
                return solution
        if self.graphs is not None:
            return self.graphs.solve(self.cell, self.x, self.z0, self.solver, **self.options)

        batch = len(pytree.tree_leaves(self.z0)[0])

        def f(z: Any, rows: Tensor | None = None) -> Any:
            return self.cell(z, self.x if rows is None else _take_rows(self.x, rows, batch))

        return solve(f, self.z0, self.solver, **self.options, **self.forward_options)


def _take_rows(x: Any, rows: Tensor, batch: int) -> Any:
    """The rows of those tensors in x that have the batch as their first dimension."""

    def take(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch
        return leaf.index_select(0, rows) if has_batch else leaf

    return pytree.tree_map(take, x)


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *([1] * (like.dim() - 1)))


def _stand_in(tree: Any, broken: Tensor, donor: Tensor, healthy: Tensor) -> Any:
    """`tree` with its broken rows replaced by row `donor`, or by zeros where no row is healthy."""

    def replace_rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != len(broken):
            return leaf
        row = leaf.index_select(0, donor)
        return torch.where(_rows(broken, leaf), torch.where(healthy, row, torch.zeros_like(row)), leaf)

    return pytree.tree_map(replace_rows, tree)


def _without_broken(problem: Problem, solution: Solution) -> tuple[Any, Any, Tensor]:
    """(z*, x, broken) with stand-ins in the rows whose solve met a value that is not finite."""
    broken = solution.status == Status.NONFINITE
    if not len(broken) or (broken.device.type == "cpu" and not bool(broken.any())):
        return solution.value, problem.x, broken
    healthy = ~broken
    donor = healthy.to(torch.int8).argmax(keepdim=True)
    stand_in = [_stand_in(tree, broken, donor, healthy.any()) for tree in (solution.value, problem.x)]
    return stand_in[0], stand_in[1], broken


class _Attach(torch.autograd.Function):
    """Forward: the solver's values. Backward: `pull` maps their gradients to those of the attached evaluation."""

    @staticmethod
    def forward(ctx: Any, pull: Callable[..., list[Tensor]], name: str, count: int, *tensors: Tensor) -> Any:
        ctx.pull, ctx.adjoint, ctx.count = pull, name, count
        # Copies, not views: users may work in place on the output of a layer.
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            pulled = ctx.pull(list(grads))
        if torch.is_grad_enabled():  # create_graph=True
            pulled = [NoDoubleBackward.apply(g.requires_grad_(), ctx.adjoint) for g in pulled]
        return (None, None, None, *([None] * ctx.count), *pulled)


def _attach(value: Any, evaluation: Any, broken: Tensor, name: str, solve_adjoint: Callable[..., Any] | None) -> Any:
    """`value` with the gradient of `evaluation`, which `solve_adjoint`, if given, is asked to transform first."""
    values, spec = pytree.tree_flatten(value)
    attached = pytree.tree_leaves(evaluation)
    dtypes = [y.dtype for y in attached]

    def pull(grads: list[Tensor]) -> list[Tensor]:
        grads = [torch.where(_rows(broken, g), torch.zeros_like(g), g) for g in grads]
        if solve_adjoint is not None:
            grads = solve_adjoint(grads)
        return [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]

    return pytree.tree_unflatten(list(_Attach.apply(pull, name, len(values), *values, *attached)), spec)


def _detached(tree: Any, requires_grad: bool = False) -> Any:
    return pytree.tree_map(lambda t: t.detach().requires_grad_(requires_grad), tree)


@dataclass(frozen=True)
class Adjoint:
    """What every adjoint has: the value of a problem with its gradient attached, and the forward's Solution."""

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        solution = problem.solve()
        if not torch.is_grad_enabled():
            return solution.value, solution
        return self._differentiate(problem, solution), solution

    def _differentiate(self, problem: Problem, solution: Solution) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class JFB(Adjoint):
    """Jacobian-free backpropagation: one vector-Jacobian product of the cell at z*, with (I - J)^-1 taken as I.

    Fung et al., AAAI 2022.
    """

    def _differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = _without_broken(problem, solution)
        return _attach(solution.value, problem.cell(_detached(z), x), broken, "JFB", None)


@dataclass(frozen=True)
class Phantom(Adjoint):
    """Phantom gradient: backpropagation through `steps` damped calls z <- (1 - damping) z + damping f(z) from z*.

    Geng et al., NeurIPS 2021. steps >= 1, damping in ]0, 1].
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_number("damping", self.damping, 0.0, 1.0, low_open=True)

    def _differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = _without_broken(problem, solution)
        z = _detached(z)
        for _ in range(self.steps):
            z = pytree.tree_map(lambda a, b: a + self.damping * (b - a), z, problem.cell(z, x))
        return _attach(solution.value, z, broken, "Phantom", None)


def _depends_on_more(evaluation: Any, z: Any) -> bool:
    """Whether `evaluation` is differentiable in anything but the leaves `z`."""
    own = {id(leaf) for leaf in pytree.tree_leaves(z)}
    nodes = [y.grad_fn for y in pytree.tree_leaves(evaluation)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf's node
        if variable is not None and id(variable) not in own:
            return True
        nodes.extend(following for following, _ in node.next_functions)
    return False


@dataclass(frozen=True)
class Implicit(Adjoint):
    """The implicit function theorem: u = J^T u + g is solved as a fixed point, started at u = g.

    solver: of the backward solve, with stop="rel", so that the scale of the loss changes nothing; None: the forward's
    with tol 1e-6. The cell's graph at z* is kept until the backward pass, which needs several products with it.
    Bai et al., NeurIPS 2019.
    """

    solver: str | Solver | None = None

    def __post_init__(self) -> None:
        if self.solver is not None:
            object.__setattr__(self, "solver", as_solver(self.solver))
            if self.solver.stop != "rel":  # type: ignore[union-attr]
                raise ValueError(f"the solver of Implicit must have stop='rel', got {self.solver}")

    def _differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = _without_broken(problem, solution)
        z = _detached(z, requires_grad=True)
        evaluation = problem.cell(z, x)
        if not _depends_on_more(evaluation, z):
            return solution.value
        device = pytree.tree_leaves(z)[0].device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def solve_adjoint(grads: list[Tensor]) -> list[Tensor]:
            with torch.autocast(device, enabled=enabled, dtype=dtype):
                return self._solve_adjoint(problem, z, evaluation, grads)

        return _attach(solution.value, evaluation, broken, "Implicit", solve_adjoint)

    def _solve_adjoint(self, problem: Problem, z: Any, evaluation: Any, grads: list[Tensor]) -> list[Tensor]:
        inputs, spec = pytree.tree_flatten(z)
        outputs = pytree.tree_leaves(evaluation)
        # A gradient that is not finite is not solved for but passed on: a GradScaler must see it.
        finite = torch.stack([torch.isfinite(g.flatten(1)).all(dim=1) for g in grads]).all(dim=0)
        start = [torch.where(_rows(finite, g), g, torch.zeros_like(g)) for g in grads]

        attached = [i for i, y in enumerate(outputs) if y.requires_grad]  # the rest depends on nothing

        def f(u: Any) -> Any:
            leaves = pytree.tree_leaves(u)
            products = torch.autograd.grad(
                [outputs[i] for i in attached],
                inputs,
                [leaves[i].to(outputs[i].dtype) for i in attached],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return pytree.tree_unflatten([p + g for p, g in zip(products, start, strict=True)], spec)

        solver = self.solver if self.solver is not None else replace(problem.solver, tol=1e-6, stop="rel")
        solution = solve(f, pytree.tree_unflatten(start, spec), solver, **problem.options)
        problem.on_backward(solution)
        values = pytree.tree_leaves(solution.value)
        return [torch.where(_rows(finite, g), u, g) for u, g in zip(values, grads, strict=True)]


@dataclass(frozen=True)
class SHINE(Adjoint):
    """As JFB, with (I - J^T)^-1 taken from the history of the forward solve, which is kept until the backward pass.

    The forward solver must be Anderson or Broyden, else ValueError. One more small kernel than JFB, no solve. Ramzi et
    al., ICLR 2022, for the whole multisecant family.
    """

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        if torch.is_grad_enabled():
            problem.forward_options = {**problem.forward_options, "keep_inverse": True}
        value, solution = super().__call__(problem)
        return value, replace(solution, transposed_inverse=None)  # or the history would live as long as the Solution

    def _differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = _without_broken(problem, solution)
        inverse = solution.transposed_inverse
        assert inverse is not None
        spec = pytree.tree_structure(z)

        def pull(grads: list[Tensor]) -> list[Tensor]:
            return pytree.tree_leaves(inverse(pytree.tree_unflatten(grads, spec)))

        return _attach(solution.value, problem.cell(_detached(z), x), broken, "SHINE", pull)


@dataclass(frozen=True)
class Unrolled(Adjoint):
    """Backpropagation through `steps` plain calls of the cell from z0 (None: the solver's max_iter), without a solver.

    The value is the last iterate; the Solution's residual is that of the iterate before it, the last one f was
    evaluated at. Differentiable any number of times, also in z0.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        packing = Packing(problem.z0)
        with torch.no_grad():
            finite_rows(packing, problem.z0)
        value, solution = self._unroll(problem, packing, problem.z0, problem.x)
        broken = solution.status == Status.NONFINITE
        if not bool(broken.any()):
            return pytree.tree_map(torch.clone, value), solution  # users may work in place on the output of a layer
        # Once more with stand-ins, so that the broken rows leave no trace in the gradients of the others.
        stand_ins = replace(solution, value=problem.z0)
        z0, x, _ = _without_broken(problem, stand_ins)
        healthy, _ = self._unroll(problem, packing, z0, x)
        value = pytree.tree_map(lambda v, z: torch.where(_rows(broken, v), z.detach(), v), healthy, problem.z0)
        return value, replace(solution, value=_detached(value))

    def _unroll(self, problem: Problem, packing: Packing, z: Any, x: Any) -> tuple[Any, Solution]:
        steps = self.steps or problem.solver.max_iter
        previous = z
        for _ in range(steps):
            value = problem.cell(z, x)
            packing.check_value(value)
            previous, z = z, pytree.tree_map(lambda new, old: new.to(old.dtype), value, z)
        with torch.no_grad():
            now, before = packing.pack(z), packing.pack(previous)
            absolute = (now - before).norm(dim=1)
            relative = absolute / now.norm(dim=1).clamp_min(torch.finfo(now.dtype).tiny)
            measure = absolute if problem.solver.stop == "abs" else relative
            finite = torch.isfinite(now).all(dim=1) & torch.isfinite(measure)
            status = torch.where(measure <= problem.solver.tol, Status.CONVERGED, Status.MAX_ITER)
            status = torch.where(finite, status, Status.NONFINITE).to(torch.int8)
            absolute, relative, measure = (torch.where(finite, r, torch.inf) for r in (absolute, relative, measure))
            iterations = torch.full_like(status, steps, dtype=torch.int32)
        return z, Solution(_detached(z), status, iterations, measure, relative, absolute, steps, steps * packing.batch)


_BY_NAME: dict[str, type[Adjoint]] = {
    "jfb": JFB,
    "implicit": Implicit,
    "phantom": Phantom,
    "shine": SHINE,
    "unrolled": Unrolled,
}


def as_adjoint(adjoint: str | Adjoint) -> Adjoint:
    """The adjoint itself, or the default one a string names ("jfb", "implicit", "phantom", "shine", "unrolled")."""
    if isinstance(adjoint, Adjoint):
        return adjoint
    if isinstance(adjoint, str) and adjoint in _BY_NAME:
        return _BY_NAME[adjoint]()
    raise ValueError(f"adjoint must be a deqfast adjoint or one of {', '.join(map(repr, _BY_NAME))}, got {adjoint!r}")
