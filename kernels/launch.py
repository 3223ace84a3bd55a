"""Launches of the solver steps, whose arguments are resolved once.

At each launch Triton selects a compiled kernel by the dtypes of the tensors, the alignment of their addresses to 16
bytes, and the integers that are constants of the kernel. This takes longer than a short kernel runs. A ``Plan`` keeps
the compiled kernels of a step. ``Plans`` keeps one plan for all steps with the same kernels.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, get_type_hints

from torch import Tensor

from ..torch_internals.graphs import current

OPTIONS = ("num_warps", "maxnreg", "num_stages")  # of the compiler
ALIGNMENT = 16  # bytes; triton compiles other code for a tensor that begins elsewhere
# A solve makes one plan per iteration until its window is full, then one per slot.
MAX_PLANS = 4096


class Launch:
    """A kernel, its grid of programs, and where its arguments come from.

    given: arguments by name that are the same in all steps of a plan, and options of the compiler. Arguments of other
    kernels are left out. buffers: names of the tensors that a plan allocates, and of the results. rule: names of the
    numbers of the stop rule. Other arguments are taken from the step's table, under their names without "p_".
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any], buffers: list[str], rule: tuple[str, ...]
    ) -> None:
        names = kernel.arg_names
        self._options = {"enable_fp_fusion": False} | {name: given[name] for name in OPTIONS if name in given}
        fixed = {name: value for name, value in given.items() if name in names}
        own = [name for name in names if name not in fixed and name not in buffers]
        take = attrgetter(*(f"rule.{name}" if name in rule else name.removeprefix("p_") for name in own))
        self._take: Callable[[Any], tuple[Any, ...]] = take if len(own) > 1 else lambda a: (take(a),)
        self._fixed = tuple(fixed.values())
        self._in_order = itemgetter(*map([*own, *fixed, *buffers].index, names))
        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        self._compiled: Callable[..., None] | None = None

    def __call__(self, a: Any, buffers: list[Tensor]) -> None:
        arguments = self._in_order((*self._take(a), *self._fixed, *buffers))
        if self._compiled is not None:
            self._compiled(*arguments)
            return
        integers = (int(value) if isinstance(value, bool) else value for value in arguments)
        compiled = self._kernel[self._grid](*integers, **self._options)
        if compiled is not None:  # else interpreted
            self._compiled = compiled[self._grid]


def launch(kernel: Any, grid: tuple[int, ...], a: Any, state: Tensor, **given: Any) -> None:
    """Launch a kernel once, on the device of `state`; see ``Launch``. For calls of an op that have no plan."""
    with current(state.device):
        Launch(kernel, grid, given, [], a.rule._fields if hasattr(a, "rule") else ())(a, [])


class Plan:
    """The launches of calls like `a`.

    results: names of the tensors that a call returns. buffers: shapes of tensors in the state's dtype that the launches
    share, by name.
    """

    def __init__(self, a: Any, *results: str, **buffers: tuple[int, ...]) -> None:
        self._rule = a.rule._fields if hasattr(a, "rule") else ()
        self._shapes, self._names, self._launches = buffers.values(), [*buffers, *results], list[Launch]()

    def add(self, kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
        """Add a launch, see ``Launch``."""
        self._launches.append(Launch(kernel, grid, given, self._names, self._rule))

    def run(self, a: Any, state: Tensor, results: Iterable[Tensor]) -> None:
        tensors = [*map(state.new_empty, self._shapes), *results]
        for launch in self._launches:
            launch(a, tensors)


@cache
def _tensors_of(table: type) -> Callable[[Any], tuple[Tensor, ...]]:
    """The tensors of a call with this table, in their order."""
    return attrgetter(*[name for name, kind in get_type_hints(table).items() if kind is Tensor])


class Plans:
    """The plans of an op, made by `make` from the table of a call, whose first tensor is the state or is like it."""

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._plans: dict[Hashable, Plan] = {}

    def run(self, a: Any, *choices: Hashable, results: Iterable[Tensor] = ()) -> None:
        """Run the call of `a`; nothing for an empty batch. A plan depends on the state's layout, and on `choices`."""
        tensors = _tensors_of(type(a))(a)
        state = tensors[0]
        if not len(state):
            return
        offsets = [address % ALIGNMENT for address in map(Tensor.data_ptr, tensors)]
        key = (*choices, *offsets, state.shape, state.dtype, state.device)
        with current(state.device):  # triton launches there
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                plan = self._plans.setdefault(key, self._make(a, *choices))
            plan.run(a, state, results)
