"""torchdeq's interface on deqfast's solvers and adjoints.

Source of the interface: torchdeq 0.1.0, Geng and Kolter, arXiv 2310.18605.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_choice, check_count, check_number, did_you_mean
from ..api.notice import Notice, warn
from ..api.trajectory import Taps, solve_along
from ..cells.protocol import solving
from ..engine.plan import Plan
from ..engine.solve import Options, Solves, check_finite
from ..gradients import Adjoint, Implicit, Phantom
from ..gradients.base import confirmed
from ..regularize import spectral_radius
from ..solution import Solution, Status
from ..solvers import Anderson, Broyden, Picard, Solver
from ..state.evaluation import evaluate
from ..state.groups import Grouping
from ..state.norms import sample_norms
from ..state.packing import Packing
from ..state.rows import per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, in_order_of
from ..torch_internals.dynamo import untraced
from ..torch_internals.transforms import check_plain, check_values
from ..torch_internals.transforms import values as unwrapped
from ..torch_internals.weights import hold_weights, modules_of
from .captured import Captures

_DEFAULTS: dict[str, Any] = dict(f_solver="fixed_point_iter", f_max_iter=40, f_tol=1e-3, f_stop_mode="abs")
_DEFAULTS |= dict(b_solver="fixed_point_iter", b_max_iter=40, b_tol=1e-6, b_stop_mode="abs")
_DEFAULTS |= dict(eval_factor=1.0, eval_f_max_iter=0, no_stat=None, cuda_graph=False)
_DEFAULTS |= dict(ift=False, hook_ift=False, grad=1, tau=1.0, sup_gap=-1, sup_loc=None, n_states=1, indexing=None)
# Further options of torchdeq's command line: for normalisations, losses and the training loop.
_ELSEWHERE = {"core", "gamma", "jac_loss_weight", "jac_loss_freq", "jac_incremental", "sradius_mode", "norm_type"}
_ELSEWHERE |= {"norm_no_scale", "norm_clip", "norm_clip_value", "norm_target_norm", "sn_n_power_iters"}
_SOLVER_OPTIONS = {
    "fixed_point_iter": ("tau", "return_final"),
    "simple_fixed_point_iter": ("tau",),
    "anderson": ("m", "lam", "tau", "return_final"),
    "broyden": ("LBFGS_thres", "ls", "return_final"),
}
_IN_CALLS = {option for options in _SOLVER_OPTIONS.values() for option in options}
# Options that only torchdeq's solvers honour in full, with the values that deqfast's solvers honour too.
_THEIRS: dict[str, tuple[Any, ...]] = {"lam": (0.0, 1e-4), "ls": (False,)}
_INSTEAD = dict.fromkeys(("f_solver", "b_solver"), "choose one of deqfast's solvers") | {
    "lam": "leave lam out for a ridge of 1e-6 relative to each sample's window, or give lam=0 for none",
    "ls": "leave ls out",
}
_UNKNOWN = 1e8  # torchdeq's residual before the first evaluation
_TINY = 1e-300  # replaces the length of a value of zeros
_LATER_BYTES = 2**20  # of evaluations that wait: to compare them takes longer than to copy them
_RUN_ALL = 1e-30  # tolerance that a residual meets only at an exact fixed point


def get_deq(args: Any = None, **kwargs: Any) -> DEQ:
    """Layer with torchdeq's interface: replaces ``torchdeq.get_deq``, with the same options and defaults.

    The page Coming from torchdeq lists the differences, of which the main one is that each sample stops by itself. It
    also says what `cuda_graph=True` needs, which replays captured forward solves on a GPU.

    A keyword that is unknown and an option that cannot be honoured raise an error. As in torchdeq `ift` replaces the
    last state's `grad`, `n_states` replaces `indexing`, and `sup_gap` replaces `sup_loc`; the last two with a warning.
    torchdeq itself runs solvers from ``register_solver``, and calls with a `lam` or `ls` that deqfast's solvers lack.

    Args:
        args: torchdeq's options as a mapping, a Namespace or another object with attributes. It may have further keys
            or attributes. One warning names all such keys, or the attributes that resemble an option.
        kwargs: options, which override those in `args`; that is not modified.

    Returns:
        Layer ``deq(func, z_init, solver_kwargs=None, sradius_mode=False)``, see ``DEQ``.

    Raises:
        TypeError: a keyword is unknown, or a value has the wrong type. The text names an option that it resembles.
        ValueError: a value is out of range.

    Examples:
        >>> deq = get_deq(f_solver="broyden", f_max_iter=20, f_tol=1e-4, f_stop_mode="rel", ift=True)
        >>> layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        >>> states, info = deq(lambda z: torch.tanh(0.5 * layer(z) + x), torch.zeros(4, 8))
        >>> states[-1].shape, info["rel_lowest"].shape
        (torch.Size([4, 8]), torch.Size([4]))
    """
    options = _options(args, kwargs)
    core = options.get("core", "sliced")
    check_choice("core", core, tuple(_CORES))
    return _CORES[core](options)


def register_deq(deq_type: str, core: Callable[[dict[str, Any]], Any]) -> None:
    """Make ``get_deq(core=deq_type)`` return ``core(options)``, with all that get_deq received, by name."""
    _CORES[deq_type] = core


class _Options(dict[str, Any]):
    """Options by name, known or not, after a warning of the others. ``config`` is torchdeq's name for them."""

    config = property(lambda options: options)


def _options(args: Any, kwargs: dict[str, Any]) -> _Options:
    """Options of `args` and `kwargs`; `kwargs` override `args`. See ``get_deq``."""
    if type(args).__name__ == "DEQConfig":  # torchdeq's
        args = args.config
    own: Mapping[str, Any] = {} if args is None else args if isinstance(args, Mapping) else vars(args)
    options, known = _Options({**own, **kwargs}), sorted(_DEFAULTS.keys() | _ELSEWHERE)
    own_core = options.get("core", "sliced") not in ("sliced", "indexing")  # it may have options of its own
    for name in () if own_core else sorted(kwargs.keys() - {*known}):
        if name in _IN_CALLS:
            raise TypeError(f"get_deq takes no {name!r}: pass it in solver_kwargs of the call")
        raise TypeError(f"get_deq takes no {name!r}{did_you_mean(name, known)}")
    if not isinstance(args, _Options):
        unused = {name: did_you_mean(name, known, 0.8) for name in sorted(options.keys() - {*known}, key=str)}
        is_config = own is args and not own_core  # else only what resembles an option is sure to be meant as one
        listed = [repr(name) + (hint and f" ({hint[2:]})") for name, hint in unused.items() if hint or is_config]
        if listed:
            warn(f"deqfast: get_deq does not use {', '.join(listed)}")
    return options


def import_torchdeq(need: str) -> Any:
    """torchdeq; ImportError that begins with `need` if it is not installed."""
    try:
        import torchdeq
    except ImportError as error:
        raise ImportError(f"{need}: pip install torchdeq") from error
    return torchdeq


class _SolverName(str):
    """Name of a solver. A call runs the function of this name in torchdeq, whose layers have that function here."""

    function = property(
        lambda name: import_torchdeq("a call of f_solver or b_solver needs torchdeq").get_solver(str(name))
    )
    __name__ = property(lambda name: name.function.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _is_function(solver: Any) -> bool:
    """Return whether this is a function, not the name of a solver."""
    return callable(solver) and not isinstance(solver, str)


def _named(solver: Any) -> Any:
    """Name of the solver whose function in torchdeq this is; any other value unchanged."""
    names = map(_SolverName, _SOLVER_OPTIONS if _is_function(solver) else ())
    return next((str(name) for name in names if name.function is solver), solver)


def _is_registered(solver: Any) -> bool:
    """Return whether a solver of this name was registered by ``torchdeq.register_solver``."""
    library = sys.modules.get("torchdeq")
    try:
        function = library and library.get_solver(solver)
    except (AssertionError, KeyError, TypeError):
        return False
    return bool(function) and not getattr(function, "__module__", "").startswith("torchdeq.")


def _check_list(name: str, value: Any) -> list[Any]:
    """`value` as a list, empty for None; TypeError for anything but a list or tuple."""
    if value is not None and not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of numbers of steps, got {value!r}")
    return list(value or ())


def _warn_unknown(unknown: dict[str, Any]) -> None:
    """Warn of keywords that a call does not use. torchdeq drops them silently."""
    names = {"solver_kwargs", "sradius_mode", "backward_writer", "x", "groups"}
    for name, value in unknown.items():
        if value is not None:
            within = name in _IN_CALLS or name == "f_max_iter"
            hint = "; it belongs in solver_kwargs" if within else did_you_mean(name, sorted(names))
            warn(f"deqfast: a call of the layer does not use {name}={value!r:.60}{hint}")


def _checked_state(z: Any) -> tuple[Any, list[bool]]:
    """z_init as a tensor or a list, and for each of its tensors whether it lacks dimensions."""
    leaves: list[Any] = [z] if isinstance(z, Tensor) else list(z) if isinstance(z, (list, tuple)) else [None]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            got = type(z).__name__ if leaf is None else f"{type(leaf).__name__} in it"
            raise TypeError(f"z_init must be a tensor or a list of tensors, got {got}")
        if not leaf.is_floating_point():
            raise TypeError(f"z_init must be floating-point, got {leaf.dtype}")
    return z if isinstance(z, Tensor) else leaves, [not leaf.dim() for leaf in leaves]


def _as_rows(z: Any) -> Any:
    """Tensor or list in which tensors without dimensions get the shape (1,)."""
    return pytree.tree_map(lambda leaf: leaf if leaf.dim() else leaf[None], z)


def _without_rows(z: Any, bare: list[bool]) -> Any:
    """Tensor or list as before ``_as_rows``; `bare` marks the tensors without dimensions."""
    leaves = [z] if isinstance(z, Tensor) else z
    leaves = [leaf[0] if was else leaf for leaf, was in zip(leaves, bare, strict=True)]
    return leaves[0] if isinstance(z, Tensor) else leaves


@dataclass(frozen=True)
class _Method:
    """Solver that makes the same iterates as torchdeq, of z = z + relaxation (f(z) - z)."""

    solver: Solver
    max_iter: int = 0  # evaluations as torchdeq counts them; 0: no solve
    relaxation: float = 1.0
    unseen: int = 0  # first evaluations whose residual torchdeq does not keep
    ends_in_f: bool = True  # return f at the iterate with the least residual, not the iterate itself
    is_final: bool = False  # return the last iterate, not the one with the least residual
    is_bare: bool = False  # make all evaluations, and judge the last one only

    @cached_property
    def solving(self) -> Options:
        """Options of a solve by this method: the same object at each call, so that compiled solves are found again."""
        return Options(solver=self.solver)


@lru_cache(maxsize=128)
def _limited(method: _Method, max_iter: int) -> _Method:
    """The method with `max_iter` evaluations. torchdeq's Broyden does not count its evaluation at z0."""
    calls = max(max_iter, 1) + (not method.ends_in_f)
    return replace(method, max_iter=max_iter, solver=replace(method.solver, max_iter=calls))


def _method(side: str, name: str, tol: float, stop: str, options: dict[str, Any]) -> _Method:
    """Method of one side; `side` is "f" (forward) or "b" (backward), the prefix of its options."""
    for option in options.keys() - set(_SOLVER_OPTIONS[name]):
        hint = did_you_mean(option, ("f_max_iter", *_SOLVER_OPTIONS[name]))
        warn(f"deqfast: {name} does not use {option}={options[option]!r:.60}{hint}")
    bare = name == "simple_fixed_point_iter"
    final = bare or bool(options.get("return_final"))
    tol = _RUN_ALL if final else tol or _RUN_ALL
    if stop == "rel" and tol >= 1:
        raise ValueError(f"{side}_tol must be less than 1 if the residual is relative, got {tol!r}")
    common: dict[str, Any] = {"rtol": tol} if stop == "rel" else {"rtol": 0.0, "atol": tol}
    tau = options.get("tau", 1.0)
    check_number("tau", tau, 0.0, 2.0, low_open=True)
    if name == "broyden":
        if options.get("LBFGS_thres") is not None:
            check_count("LBFGS_thres", options["LBFGS_thres"])
        solver = Broyden(history_size=options.get("LBFGS_thres"), **common)
        return _Method(solver, unseen=1, ends_in_f=False, is_final=final)
    if name == "anderson":  # m counts iterates, history_size their differences
        check_count("m", options.get("m", 6), 2)
        ridge = 0.0 if options.get("lam") == 0 else 1e-6
        anderson = Anderson(history_size=options.get("m", 6) - 1, relaxation=tau, ridge=ridge, **common)
        return _Method(anderson, unseen=2, is_final=final)
    return _Method(Picard(**common), relaxation=tau, is_final=final, is_bare=bare)


def _option(name: str) -> property:
    """Attribute of a layer that reads and sets this option. A new value applies from the next call."""

    def get(layer: DEQ) -> Any:
        value = layer.options[name]
        return _SolverName(value) if name.endswith("solver") and isinstance(value, str) else value

    def put(layer: DEQ, value: Any) -> None:
        options = {**layer.options, name: _named(value)}
        copy(layer)._configure(options)  # raises before the layer changes
        layer._configure(options)

    return property(get, put)


_States = tuple[list[Any], Solution, _Method]


class DEQ(nn.Module):
    """Layer with torchdeq's interface, made by ``get_deq``, whose options it takes: ``DEQSliced`` or ``DEQIndexing``.

    A subclass of your own, for ``register_deq``, defines ``forward``.

    Attributes:
        args: all options by name, also as ``args.config``, with the keys that are not used.
        f_solver, b_solver: names of the solvers; a call of the name runs torchdeq's function. These and the solvers'
            other options can be set. f_solver may be set to a function like torchdeq's solvers, which torchdeq runs.
        eval_f_max_iter: maximum number of evaluations of func in evaluation mode.
        theirs: options whose solver only torchdeq can run.
    """

    f_solver, f_max_iter, f_tol, f_stop_mode = map(_option, ("f_solver", "f_max_iter", "f_tol", "f_stop_mode"))
    b_solver, b_max_iter, b_tol, b_stop_mode = map(_option, ("b_solver", "b_max_iter", "b_tol", "b_stop_mode"))
    eval_f_max_iter = property(
        lambda layer: (
            layer.options["eval_f_max_iter"] or int(layer.options["f_max_iter"] * layer.options["eval_factor"])
        ),
        _option("eval_f_max_iter").fset,
    )
    args = property(lambda layer: layer.options)
    core: str  # torchdeq's name for the class

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__()
        given = _options(args, kwargs)
        self._configure({**_DEFAULTS, **given})
        for name, by in (("indexing", "n_states"), ("sup_loc", "sup_gap")):
            if self.options[name] and self.options[by] > max(_DEFAULTS[by], 0):
                warn(f"deqfast: {name}={self.options[name]} has no effect next to {by}={self.options[by]}")
        more = "info and backward_writer report every solve"
        # A forward solve that ends at max_iter is not reported: here max_iter is often the intended stop.
        self._forward_notice = Notice("forward", more, expected={Status.MAX_ITER})
        self._backward_notice = Notice("backward", more)
        self._solves = Solves()
        self._captures = Captures()

    def __setattr__(self, name: str, value: Any) -> None:
        # torch would register a module instead of setting the option, such as a solver that is a module.
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _configure(self, options: dict[str, Any]) -> None:
        """Set these options; TypeError or ValueError for invalid ones."""
        self.options = _Options(options)
        implicit = options["ift"] or options["hook_ift"]
        theirs = [name for name in ("f_solver", "b_solver") if _is_registered(options[name])]
        theirs = ["f_solver", *theirs] if _is_function(options["f_solver"]) else theirs
        self.theirs = [name for name in theirs if implicit or name == "f_solver"]
        for each in ("f", "b"):
            if f"{each}_solver" not in theirs:
                check_choice(f"{each}_solver", options[f"{each}_solver"], tuple(_SOLVER_OPTIONS))
            check_choice(f"{each}_stop_mode", options[f"{each}_stop_mode"], ("abs", "rel"))
            check_number(f"{each}_tol", options[f"{each}_tol"], 0.0)
        check_count("f_max_iter", options["f_max_iter"], 0)
        check_count("b_max_iter", options["b_max_iter"])
        check_choice("cuda_graph", options["cuda_graph"], (False, True))
        self.traces = not (options["no_stat"] or options["f_solver"] == "simple_fixed_point_iter")
        if "f_solver" not in self.theirs:
            self.method = self._forward_method({})
        check_count("eval_f_max_iter", self.eval_f_max_iter, 0)
        at, grad = self._evaluations(options["f_max_iter"]), options["grad"]
        grad = [grad] if isinstance(grad, int) else _check_list("grad", grad)
        if len(grad) not in (1, len(at)):
            raise ValueError(f"grad must hold one number of steps or one for each of {len(at)} states, got {grad}")
        grad = grad * len(at) if len(grad) == 1 else grad
        for steps in grad:
            check_count("grad", steps)
        check_number("tau", options["tau"], 0.0, 1.0, low_open=True)
        self.gradients = [self._phantom(steps) for steps in grad]
        if implicit and "b_solver" not in theirs:
            backward = _method("b", options["b_solver"], options["b_tol"], "rel", {}).solver
            # Starts at the gradient. torchdeq starts at zeros, and reaches the gradient after one product.
            self.gradients[-1] = _Gradient(Implicit(replace(backward, max_iter=options["b_max_iter"])))

    def forward(
        self,
        func: Callable[..., Any],
        z_init: Tensor | Sequence[Tensor],
        solver_kwargs: dict[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Callable[[dict[str, Tensor]], None] | None = None,
        x: Any = None,
        groups: Grouping = None,
        **unknown: Any,
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """Solve z = func(z) from z_init, for B samples.

        Args:
            func: maps tensors like z_init's to the same shapes. A module's parametrised weights are computed once.
            z_init: floating-point (B, ...), or a list of such tensors. A tensor without dimensions is one sample.
            solver_kwargs: `f_max_iter`, and options of the solver: `tau` of fixed_point_iter, `m` and `tau` of
                anderson, `LBFGS_thres` of broyden. `return_final=True` returns the last iterate, not the best. torchdeq
                itself runs a `lam` of anderson other than 0 and 1e-4, and `ls=True` of broyden. Unused ones warn.
            sradius_mode: estimate the spectral radius of func's Jacobian at the solution, in evaluation.
            backward_writer: called with the ``info`` of each backward solve of ift, whose traces have the least
                residuals only.
            x: a tensor or a tree of tensors, passed to func as its last argument. It is needed for second derivatives
                through ift, such as forces in a loss. Rows of x that are NaN then do not affect the gradients.
            groups: for a func that couples rows of z_init, such as the nodes of a graph, see ``deqfast.solve``.
            unknown: keywords that are not used. Each that is not None gives a warning.

        Returns:
            (states, info). In training: the states that the options ask for, the solution last, each after the
            evaluations of func that its gradient needs. In evaluation: the solution. info: abs_lowest, rel_lowest,
            nstep (B,); abs_trace, rel_trace (B, N), residuals of the iterates; sradius (B,) if asked for, else (1,).

        Raises:
            TypeError, ValueError: an option, z_init or the value of func is not as above, or z_init is not finite.
            ImportError: torchdeq has to run this call and is not installed.
        """
        _warn_unknown(unknown)
        given = dict(solver_kwargs or {})
        theirs = self._torchdeqs(given)
        if theirs and (x is not None or groups is not None or self.options["cuda_graph"]):
            no = "no x, no groups and no cuda_graph"
            raise ValueError(f"{theirs} is run by torchdeq, which takes {no}: {_INSTEAD[theirs]}")
        if theirs:
            return untraced(self._run_torchdeq, theirs, func, z_init, given, sradius_mode, backward_writer)
        states, info, solution = untraced(self._run, func, z_init, x, given, sradius_mode, backward_writer, groups)
        self._forward_notice.look(solution)
        return states, info

    def _torchdeqs(self, given: dict[str, Any]) -> str:
        """Name of what only torchdeq can run: a solver, or an option of this call; else empty."""
        used = () if self.theirs else _SOLVER_OPTIONS[self.options["f_solver"]]
        asked = [name for name in _THEIRS if name in used and given.get(name, 0) not in _THEIRS[name]]
        return next(iter(self.theirs + asked), "")

    def _run_torchdeq(self, needed: str, *call: Any) -> Any:
        """States and info from torchdeq's own layer with these options; ImportError naming what needs torchdeq."""
        function = self.options["f_solver"] if _is_function(self.options["f_solver"]) else None
        options = {name: value for name, value in self.options.items() if value not in (None, function)}
        library = import_torchdeq(f"{needed} is run by torchdeq ({_INSTEAD[needed]})")
        layer = library.get_deq(options, core=self.core).train(self.training)
        layer.f_solver = function or layer.f_solver
        return layer(*call)

    def _run(
        self, func: Any, z: Any, x: Any, given: dict[str, Any], sradius_mode: bool, writer: Any, groups: Any
    ) -> Any:
        z, bare = _checked_state(z)
        check_plain("solve", z)
        check_values("z_init", z)
        max_iter = given.pop("f_max_iter", self.options["f_max_iter"] if self.training else self.eval_f_max_iter)
        check_count("f_max_iter", max_iter, 0)
        method = self._forward_method(given) if given else self.method

        def on_backward(solution: Solution) -> None:
            self._backward_notice.look(solution)
            if writer is not None:
                writer(_info(solution, method))

        cell = (lambda z, x: func(z, *x)) if isinstance(z, Tensor) else (lambda z, x: list(func(*z, *x)))
        z = _as_rows(z) if any(bare) else z
        samples = None if groups is None else Packing(z, groups).groups
        options = method.solving if samples is None else Options(solver=method.solver, groups=samples)
        own: dict[str, Any] = dict(on_backward=on_backward, advances=self.training)
        own["solves"] = self._solves if samples is None else None
        own["cell"] = (lambda z, x: _as_rows(cell(_without_rows(z, bare), x))) if any(bare) else cell
        plan = Plan(x=() if x is None else (x,), z0=detached(z), options=options, **own)
        with solving(modules_of(func)), hold_weights(modules_of(func)):  # begin_solve may change the modules
            at = self._evaluations(max_iter) if self.training else [max_iter]
            gradients = self.gradients if self.training else self.gradients[-1:]
            states, solution, method = self._states(plan, method, at, gradients)
            if not self.traces:
                solution = solution.changed(trace_abs=None, trace_rel=None)
            info = _info(solution, method)
            if sradius_mode and not self.training:
                radius = spectral_radius(plan.cell, states[-1], plan.x, 100, plan.groups)
                info["sradius"] = radius.to(pytree.tree_leaves(states[-1])[0].dtype)
        if any(bare) and not isinstance(z, Tensor):  # torchdeq returns (1,) for a single tensor
            states = [_without_rows(state, bare) for state in states]
        return states, info, solution

    def _states(self, plan: Plan, method: _Method, at: list[int], gradients: list[_Gradient]) -> _States:
        """States with these gradients; then the Solution and the method of the solve that ends in the last state."""
        raise NotImplementedError("a subclass of DEQ must define forward")

    def _solve(self, plan: Plan, method: _Method, at: list[int]) -> tuple[list[Any], Any, Solution]:
        """As ``_solve``, captured if the options ask for it."""
        if not (self.options["cuda_graph"] and method.max_iter):
            return _solve(plan, method, at)
        refused = {"groups": plan.groups is not None, "return_final=True": method.is_final and not method.is_bare}
        refused |= {"simple_fixed_point_iter": method.is_bare, "core='indexing' with several states": bool(at)}
        if names := [name for name, given in refused.items() if given]:
            raise ValueError(f"cuda_graph=True cannot be combined with {names[0]}: a replay makes one solve by itself")
        plan = replace(plan, options=method.solving)
        value, solution = self._captures.solve(plan, method.relaxation, method.ends_in_f)
        return [], value, solution if method.ends_in_f else solution.changed(iterations=solution.iterations - 1)

    def _spread(self, max_iter: int, count: int) -> list[int]:
        """Numbers of the evaluations after which the `count` states are taken."""
        return [(k + 1) * (max_iter // count) for k in range(count)]

    def _forward_method(self, given: dict[str, Any]) -> _Method:
        options = self.options
        return _method("f", options["f_solver"], options["f_tol"], options["f_stop_mode"], given)

    def _evaluations(self, max_iter: int) -> list[int]:
        """Numbers of the evaluations after which the states of a training pass are taken."""
        count, given = self.options["n_states"], _check_list("indexing", self.options["indexing"])
        check_count("n_states", count)
        if count > max_iter > 0:
            raise ValueError(f"n_states={count} must be at most f_max_iter, got {max_iter}")
        if count > 1:
            return self._spread(max_iter, count)
        for n in given:
            check_count("indexing", n)
        if any(a >= b for a, b in zip(given, [*given[1:], max_iter], strict=False)):
            raise ValueError(f"indexing must ascend and end below f_max_iter={max_iter}, got {given}")
        return [*given, max_iter]

    def _phantom(self, steps: int) -> _Gradient:
        """Gradient of a state through `steps` steps, with states at the steps of sup_gap or sup_loc."""
        gap, at, tau = self.options["sup_gap"], _check_list("sup_loc", self.options["sup_loc"]), self.options["tau"]
        at = at if gap <= 0 else []
        if gap > steps or any(not 0 < n < steps for n in at):
            raise ValueError(f"sup_gap and sup_loc must lie within the {steps} steps of grad, got {gap} and {at}")
        chosen = (*range(gap, steps + 1, gap),) if gap > 0 else (*at, steps)
        return _Gradient(Phantom(chosen[-1], tau), chosen)

    def extra_repr(self) -> str:
        changed = {name: self.options[name] for name, default in _DEFAULTS.items() if self.options[name] != default}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())


class DEQSliced(DEQ):
    """Layer that solves in slices. Each slice starts where the gradient's steps of the state before ended."""

    core = "sliced"

    def _states(self, plan: Plan, method: _Method, at: list[int], gradients: list[_Gradient]) -> _States:
        states: list[Any] = []
        for gradient, end, begin in zip(gradients, at, [0, *at], strict=False):
            if states:
                plan = replace(plan, z0=detached(states[-1]))
            method = _limited(method, end - begin)
            _, value, solution = self._solve(plan, method, [])
            attached, last = _attach(plan, method, gradient, solution.changed(value=value))
            states += attached
        return states, last, method


class DEQIndexing(DEQ):
    """Layer whose states are iterates of one solve."""

    core = "indexing"

    def _states(self, plan: Plan, method: _Method, at: list[int], gradients: list[_Gradient]) -> _States:
        states: list[Any] = []
        method = _limited(method, at[-1])
        # The state after evaluation n of f is the argument of evaluation n + 1. Broyden counts one less.
        before, value, solution = self._solve(plan, method, [n + method.ends_in_f for n in at[:-1]])
        for gradient, state in zip(gradients, [*before, value], strict=True):
            attached, last = _attach(plan, method, gradient, solution.changed(value=state))
            states += attached
        return states, last, method

    def _spread(self, max_iter: int, count: int) -> list[int]:
        return [max_iter - (count - 1 - k) * (max_iter // count) for k in range(count)]


_CORES: dict[str, Callable[[dict[str, Any]], Any]] = {"sliced": DEQSliced, "indexing": DEQIndexing}


def _solve(plan: Plan, method: _Method, at: list[int]) -> tuple[list[Any], Any, Solution]:
    """States at the evaluations `at`, the value that torchdeq's solver returns, and the Solution."""
    if not method.max_iter:
        unsolved = _unsolved(plan)
        return [unsolved.value] * len(at), unsolved.value, unsolved
    kept = _Kept(plan, method)
    if method.is_bare:
        return _iterate(plan, kept, at)
    options = method.solving if plan.groups is None else replace(plan.options, solver=method.solver)
    states, solution = solve_along(replace(plan, cell=kept, options=options), at)
    if not len(solution.status):
        return states, solution.value, solution
    return states, *kept.choose(solution)


def _iterate(plan: Plan, kept: _Kept, at: list[int]) -> tuple[list[Any], Any, Solution]:
    """What ``_solve`` returns, by all evaluations of a bare method. A sample that is not finite keeps its z0."""
    packing, taps = kept.packing, Taps(kept, at)
    check_finite(packing.pack(plan.z0))
    z = plan.z0
    with torch.no_grad():
        for _ in range(kept.method.max_iter):
            values = packing.check_value(evaluate(taps, z, plan.x))
            pairs = zip(values, packing.leaves, strict=True)
            # Copies, as func may return memory that it writes again.
            z = pytree.tree_unflatten([value.to(leaf.dtype, copy=True) for value, leaf in pairs], packing.spec)
        absolute, relative = kept.residuals()[:, -1].to(packing.dtype)
        finite = torch.isfinite(absolute)
        rows = finite if packing.groups is None else packing.groups.per_row(finite)
        chosen = partial(pytree.tree_map, lambda v, start: torch.where(per_row(rows, v), v, start))
        *states, value = [chosen(state, plan.z0) for state in (*taps.states, z)]
    status = torch.full_like(finite, Status.MAX_ITER, dtype=torch.int8).masked_fill(~finite, Status.NONFINITE)
    count = torch.full_like(status, kept.calls, dtype=torch.int32)
    made = {"evaluations": kept.calls, "sample_evaluations": kept.calls * packing.batch}
    return states, value, Solution(value, status, count, absolute, relative, absolute, **made)


def _surely_all(samples: Tensor) -> bool:
    """Return whether this mask has all samples; False on a GPU, to avoid a wait for the device."""
    return samples.device.type == "cpu" and bool(unwrapped(samples).all())


class _Kept:
    """Damped map of a plan. It keeps all residuals and, for each sample, the evaluation that torchdeq chooses."""

    def __init__(self, plan: Plan, method: _Method) -> None:
        self.plan, self.method = plan, method
        self.packing = Packing(plan.z0, plan.groups)
        self.kept: list[Tensor] = []  # leaves of the chosen evaluations' values, or of the states returned
        self.least: Tensor | None = None  # their residuals, (B,) float64, in the measure that stops the solve
        self.later: list[list[Tensor]] = []  # copies of the leaves of later ones, to be compared with `kept` together
        self.latest: list[Tensor] = []  # leaves of the value of the last evaluation
        self.lengths: list[Tensor] = []  # |value - z| and |value| of every evaluation, alternating
        self.calls = 0

    def __call__(self, z: Any, x: Any) -> Any:
        value, tau = self.plan.cell(z, x), self.method.relaxation
        values, states = self.packing.check_value(value), pytree.tree_leaves(z)
        if tau != 1.0:
            values = [tau * y + (1 - tau) * z for y, z in zip(values, states, strict=True)]
            value = pytree.tree_unflatten(values, self.packing.spec)
        self.calls += 1
        if not self.method.is_bare or self.calls == self.method.max_iter:
            self._keep(states, values)
        self.latest = values
        return value

    def _keep(self, states: list[Tensor], values: list[Tensor]) -> None:
        groups, method = self.plan.groups, self.method
        length = sample_norms([y - z for y, z in zip(values, states, strict=True)], groups)
        self.lengths += [length, sample_norms(values, groups)]
        if method.is_final:
            self.kept = values if method.ends_in_f else [leaf.clone() for leaf in states]
            return
        self.later.append([leaf.clone() for leaf in (values if method.ends_in_f else states)])
        if len(self.later) * sum(leaf.nbytes for leaf in self.later[-1]) > _LATER_BYTES:
            self._compare()

    def _compare(self) -> None:
        """Keep of each sample the evaluation of the least residual, the first of several."""
        lengths = self.lengths[-2 * len(self.later) :]
        residual = torch.stack(lengths[::2])
        if not self.method.solver.is_absolute:
            residual = residual / torch.stack(lengths[1::2]).clamp_min(_TINY)
        residual = residual.nan_to_num(math.inf, math.inf)
        candidates = self.later
        if self.least is not None:
            residual, candidates = torch.cat([self.least[None], residual]), [self.kept, *candidates]
        self.least, choice = residual.min(dim=0)
        chosen = list(range(len(candidates)))
        if choice.device.type == "cpu":
            chosen = torch.unique(unwrapped(choice)).tolist()
        self.kept, self.later = candidates[chosen[-1]], []
        for n in chosen[:-1]:
            self.kept = self._select(choice == n, candidates[n], self.kept)

    def _select(self, samples: Tensor, chosen: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        """Copies of `chosen` in the rows of the samples, else of `others`: both may lie in the solver's memory."""
        if _surely_all(samples):
            return [a.clone() for a in chosen]
        if _surely_all(~samples):
            return [b.to(a.dtype, copy=True) for a, b in zip(chosen, others, strict=True)]
        rows = samples if self.plan.groups is None else self.plan.groups.per_row(samples)
        pairs = zip(chosen, others, strict=True)
        return [torch.where(per_row(rows, a), a, b.to(a.dtype)) for a, b in pairs]

    def residuals(self) -> Tensor:
        """|value - z| and |value - z| / |value| of the evaluations recorded, (2, N, B) float64."""
        length, size = (torch.stack(self.lengths[first::2]) for first in (0, 1))
        return torch.stack([length, torch.where(length == 0, 0, length / size)])

    def choose(self, solution: Solution) -> tuple[Any, Solution]:
        """Value that torchdeq's solver returns, and the solution with its residuals and its evaluation count.

        A converged sample has the value of its last evaluation, after which it was frozen. A sample that became
        non-finite has the solution's last finite iterate. Any other sample has the value with the least residual.
        """
        if self.later:
            self._compare()
        trace = self.residuals()
        if self.method.is_final:
            step, kept = torch.full_like(solution.iterations, self.calls), trace[:, -1]
        else:
            kept = trace.nan_to_num(math.inf, math.inf).amin(dim=1)
            first = (trace == kept[:, None]).to(torch.int8).argmax(dim=1)
            step = torch.where(kept < math.inf, first + 1, 0)[int(not self.method.solver.is_absolute)]
        kept, step = kept.to(solution.residual.dtype), step.to(solution.iterations.dtype)
        owned = not (self.method.is_final and self.method.ends_in_f)  # else it is the memory of func's value
        values = self.kept if owned else [leaf.clone() for leaf in self.kept]
        (absolute, relative), iterations = kept.unbind(), step
        ends, counts = [Status.NONFINITE, *([] if self.method.is_final else [Status.CONVERGED])], solution.counts
        if counts is None or any(counts[status] for status in ends):
            values, absolute, relative, iterations = self._with_ended(solution, kept, step)
        if not self.method.ends_in_f:  # torchdeq's Broyden does not count its evaluation at z0
            iterations = iterations - 1
        changes: dict[str, Any] = {"residual_abs": absolute, "residual_rel": relative, "iterations": iterations}
        changes["residual"] = absolute if self.method.solver.is_absolute else relative
        changes["trace_abs"], changes["trace_rel"] = trace.to(kept.dtype)
        return pytree.tree_unflatten(values, self.packing.spec), replace(solution, **changes)

    def _with_ended(
        self, solution: Solution, kept: Tensor, step: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Values, residuals and steps, with those of the solution for samples that converged or broke down."""
        states = pytree.tree_leaves(solution.value)
        broken = solution.status == Status.NONFINITE
        done = torch.zeros_like(broken) if self.method.is_final else solution.converged
        values = self._select(done, self.latest if self.method.ends_in_f else states, self.kept)
        values = values if _surely_all(~broken) else self._select(broken, states, values)
        known = done | broken
        lowest = torch.minimum(kept, torch.stack([solution.residual_abs, solution.residual_rel]))
        absolute, relative = torch.where(known, lowest, kept)
        return values, absolute, relative, torch.where(known, solution.iterations, step)


def _unsolved(plan: Plan) -> Solution:
    """Solution that is z0 itself, with the residual that torchdeq starts from."""
    packing = Packing(plan.z0, plan.groups)
    unknown = torch.full((packing.batch,), _UNKNOWN, dtype=packing.dtype, device=packing.device)
    count = torch.zeros_like(unknown, dtype=torch.int32)
    status = torch.full_like(count, Status.MAX_ITER, dtype=torch.int8)
    value = pytree.tree_map(torch.clone, plan.z0)
    return Solution(value, status, count, unknown, unknown, unknown, evaluations=0, sample_evaluations=0)


def _attach(plan: Plan, method: _Method, gradient: _Gradient, solution: Solution) -> tuple[list[Any], Solution]:
    """The states of a solution with this gradient; and the solution, checked by the gradient's evaluation of func."""
    records = torch.is_grad_enabled()
    if not (records or plan.advances):
        return [solution.value], solution
    solver, tol = method.solver, method.solver.tol / method.relaxation
    tol = tol if solver.is_absolute else min(tol, 0.99)
    if tol != solver.tol:
        solver = replace(solver, atol=tol) if solver.is_absolute else replace(solver, rtol=tol)
        plan = replace(plan, options=replace(plan.options, solver=solver))
    if plan.advances and not (records and isinstance(gradient.adjoint, Implicit)):
        return gradient.along_steps(plan, solution)
    value, solution = gradient.adjoint.differentiate(plan, solution)
    return [value], solution


@dataclass(frozen=True)
class _Gradient:
    """Gradient of a state in training, in which ``Phantom`` records its steps, differentiable any number of times."""

    adjoint: Adjoint
    taken: tuple[int, ...] = (1,)  # numbers of its steps after which a state is returned

    def along_steps(self, plan: Plan, solution: Solution) -> tuple[list[Any], Solution]:
        """States after the steps from z*, all in one chain; and the solution, checked by the first evaluation."""
        solved = solution.arriving is not None or solution.evaluations > 0  # else z* is z0; a graph evaluates always
        z, x, broken = plan.without_broken(solution) if solved else (solution.value, plan.x, None)
        leaves, spec = pytree.tree_flatten(z)
        first: list[Tensor] = []

        def f(leaves: list[Tensor]) -> list[Tensor]:
            values = in_order_of(z, plan.cell(pytree.tree_unflatten(leaves, spec), x))
            first[:] = first or values
            return values

        step = Phantom(1, self.adjoint.relaxation if isinstance(self.adjoint, Phantom) else 1.0)
        states = []
        for n in range(1, self.taken[-1] + 1):
            leaves = step.damped(f, leaves)
            if n in self.taken:
                state = pytree.tree_unflatten(leaves, spec)
                if broken is not None:
                    state = pytree.tree_map(lambda v, s: torch.where(per_row(broken, v), v, s), solution.value, state)
                states.append(state)
        return states, confirmed(solution, plan.options, z, first) if solved else solution


def _info(solution: Solution, method: _Method) -> dict[str, Tensor]:
    """torchdeq's statistics. Traces begin with `_UNKNOWN`, and are padded with the least residual."""
    info = {"abs_lowest": solution.residual_abs, "rel_lowest": solution.residual_rel}
    traces = {"abs_trace": solution.trace_abs, "rel_trace": solution.trace_rel}
    for (name, trace), lowest in zip(traces.items(), list(info.values()), strict=True):
        rows = lowest[None]
        if trace is not None:
            rest = method.solver.max_iter - max(len(trace), method.unseen)
            rows = torch.cat([torch.full_like(rows, _UNKNOWN), trace[method.unseen :], rows.expand(max(rest, 0), -1)])
        info[name] = rows.T
    steps = solution.iterations.float()
    return {**info, "nstep": steps, "sradius": -torch.ones(1, device=steps.device)}
