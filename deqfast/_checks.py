"""Checks of arguments. Each error names the argument, what it must be and what it is."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Our names of options and choices, with those elsewhere (torchdeq, optimistix, jaxopt, scipy, papers, our drafts).
_ELSEWHERE = {
    "implicit": ("ift", "implicit_diff"),
    "phantom": ("phantom_grad",),
    "unrolled": ("bptt",),
    "jfb": ("one_step",),
    "picard": ("fixed_point_iter", "simple_fixed_point_iter", "forward_iteration"),
    "history_size": ("m", "lbfgs_thres", "memory", "history"),
    "ridge": ("lam",),
    "steps": ("step",),
    "relaxation": ("beta", "tau", "damping", "mixing", "step"),
    "rtol": ("tol", "tolerance", "eps", "f_tol", "stop", "stop_mode", "f_stop_mode"),
    "atol": ("stop", "stop_mode", "f_stop_mode"),
    "max_iter": ("threshold", "max_steps", "f_max_iter"),
    "drop_converged": ("compact",),
    "stop_fn": ("halt", "callback"),
    "cpp": ("cpu", "c++"),
    "cuda": ("gpu",),
    "solver": ("f_solver",),
    "adjoint": ("b_solver", "grad"),
}

Kind = TypeVar("Kind")


def nearest(name: Any, names: Iterable[Any], cutoff: float = 0.7) -> list[str]:
    """Return deqfast's names for what other libraries call `name`, else the name that resembles it most, if any."""
    if not isinstance(name, str):
        return []
    lower = {each.lower(): each for each in names if isinstance(each, str)}
    known = [word for word, others in _ELSEWHERE.items() if name.lower() in others and word in lower]
    return [lower[word] for word in known or get_close_matches(name.lower(), lower, 1, cutoff)]


def did_you_mean(name: Any, names: Iterable[Any], cutoff: float = 0.7) -> str:
    """Return "; did you mean ...?" with the nearest names, or an empty string."""
    near = nearest(name, names, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_keywords(owner: str, given: Iterable[str], allowed: Sequence[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that `owner` does not take.

    `elsewhere` maps a keyword of another object to what the user should write instead.
    """
    for name in given:
        if name not in allowed:
            places = [elsewhere[word] for word in nearest(name, [*allowed, *elsewhere]) if word in elsewhere]
            hint = f"; use {' or '.join(places)}" if places else did_you_mean(name, allowed)
            raise TypeError(f"{owner} takes no argument {name!r}{hint}")


def settings_of(name: str, kinds: Iterable[type]) -> dict[str, str]:
    """Return for every field of these dataclasses how to set it through `name`, in the first class that has it."""
    places: dict[str, str] = {}
    for kind in kinds:
        for field in inspect.signature(kind).parameters:
            places.setdefault(field, f"{name}={kind.__name__}({field}=...)")
    return places


@functools.cache
def _keywords_of(kind: Any) -> tuple[str, ...] | None:
    """Keywords of a class's constructor; None if it takes any."""
    parameters = inspect.signature(kind.__init__, follow_wrapped=False).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return tuple(parameters)[1:]


class ChecksKeywords:
    """Base of classes whose constructor explains a keyword that it does not take."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        kind: Any = cls
        if options and (allowed := _keywords_of(kind)) is not None:
            check_keywords(cls.__name__, options, allowed, cls._keywords_elsewhere())
        return super().__new__(cls)

    @classmethod
    def _keywords_elsewhere(cls) -> Mapping[str, str]:
        """What to write instead of a keyword that belongs to another object."""
        return {}


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
    """Raise unless `value` is a finite real number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    bound = f"{'greater than' if low_open else 'at least'} {low:g}"
    bound += f" and at most {high:g}" if high < math.inf else ""
    if not math.isfinite(number) or number > high or number < low or (low_open and number == low):
        raise ValueError(f"{name} must be finite and {bound}, got {value!r}")


def check_count(name: str, value: Any, low: int = 1, high: int | None = None) -> None:
    """Raise unless `value` is an integer of at least `low` and at most `high` (None: without bound)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if high is not None and int(value) > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{did_you_mean(value, allowed)}")


def check_flag(name: str, value: Any) -> bool:
    """Return the truth value; raises ValueError for another value."""
    check_choice(name, value, (False, True))
    return bool(value)


def object_named(name: str, value: Any, kind: type[Kind], by_name: Mapping[str, type[Kind]]) -> Kind:
    """Return `value` if it is a `kind`, else the object of that name with default settings.

    Raises:
        ValueError: `value` is neither.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in by_name:
        return by_name[value]()
    is_class = isinstance(value, type) and issubclass(value, kind)
    hint = f"; did you mean {value.__name__}()?" if is_class else did_you_mean(value, by_name)
    kind_of = kind.__name__.lower()
    raise ValueError(
        f"{name} must be a deqfast {kind_of} or one of {', '.join(map(repr, by_name))}, got {value!r}{hint}"
    )


def described(value: Any) -> str:
    """Return the value as an error shows it: of a tensor its dtype and shape only."""
    return f"a tensor of {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def check_callable(name: str, value: Any) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {described(value)}")


def check_cell(cell: Any) -> None:
    """Raise TypeError unless `cell` can be called as cell(z, x)."""
    if not callable(cell) or isinstance(cell, type):
        raise TypeError(f"cell must be a module or another function of (z, x), got {described(cell)}")
    if (signature := signature_of(cell)) is None:
        return
    try:
        signature.bind(None, None)
    except TypeError:
        taken = f"{type(cell).__name__}.forward" if _has_forward(cell) else getattr(cell, "__name__", "it")
        remedy = "several inputs go into x, as a tuple"
        raise TypeError(f"cell must accept (z, x), got {cell!r}: {taken} takes {signature}; {remedy}") from None


def signature_of(cell: Any) -> inspect.Signature | None:
    """Return the signature of a call of the cell; None if it is unknown or hooks may change the arguments."""
    if _has_forward(cell) and cell._forward_pre_hooks:
        return None
    try:
        return inspect.signature(cell.forward if _has_forward(cell) else cell, follow_wrapped=False)
    except (TypeError, ValueError):  # compiled functions lack a signature
        return None


def _has_forward(cell: Any) -> bool:
    """Return whether a call of the cell runs its ``forward``."""
    return isinstance(cell, nn.Module) and type(cell).__call__ is nn.Module.__call__


def check_start(z0: Any, x: Any, is_given: bool, error: RuntimeError) -> None:
    """Raise ValueError with the start if the error is about shapes or types and may come from z0 or x.

    Args:
        is_given: whether z0 is an argument of the call, and not the block's own start.
    """
    if error.__cause__ is not None:  # explained where it was raised
        return
    complains = type(error) is RuntimeError and re.search(r"\b(size|shape|d?type)s?\b", str(error))
    if not complains or not isinstance(z0, Tensor) or not isinstance(x, Tensor):
        return
    if z0.shape[:1] != x.shape[:1]:
        sizes = f"batches of different sizes, {tuple(z0.shape)} and {tuple(x.shape)}"
        raise ValueError(f"z0 and x have {sizes}, and the solve failed: {error}") from error
    if not is_given:
        remedy = "give x the shape and dtype that the cell takes, or the state its own by z0=, init= or initial_state"
        raise ValueError(f"the solve failed from its start, {described(z0)}: {remedy}; {error}") from error


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError if `tensor` is sparse, nested or a DTensor."""
    if hasattr(tensor, "placements"):
        shard = f"the local shard of a tensor that is spread over processes, {name}.to_local()"
        raise TypeError(f"{name} must be {shard}, with state_group= for their process group, got a DTensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        jagged = "a nested tensor, whose values() are rows for the `groups` of a solve"
        got = jagged if tensor.layout == torch.jagged else "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be dense, of layout torch.strided, got {got}")


def matplotlib_figure(user: str, width: float, height: float) -> Any:
    """Return an empty figure of this size in inches for the method `user`, which needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{user} needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")
