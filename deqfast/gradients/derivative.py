"""Derivatives of a fixed point under the transforms of torch.func and in forward-mode AD.

There are two concepts: a ``StateFunction`` f, which vmaps fold, and its ``Linearisation`` at a state, which a
``Derivative`` uses. See ``transforms.functorch`` for the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..engine.solve import Options
from ..ops.double_backward import NoDoubleBackward
from ..torch_internals.transforms import forward_mode, over_members, without_tangent

Tensors = list[Tensor]


class StateFunction:
    """Function of a state, the leaves of a tree like z, and of all tensors that it uses.

    A subclass defines ``__call__`` or ``bind``.
    """

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        """Next state; `rows` are tensors with one row per row of the state, `others` any."""
        return self.bind(rows, others)(state)

    def bind(self, rows: Tensors, others: Tensors) -> Callable[[Tensors], Tensors]:
        """Function of the state only, outside of all transforms."""
        return lambda state: self(state, rows, others)

    def folded(self, members: int, dims: list[int | None], randomness: str) -> StateFunction:
        """The function of the rows of all members of a vmap; `dims` are the dimensions, 0 or None, of `others`."""
        return _Folded(self, members, dims, randomness)


@dataclass(frozen=True)
class _Folded(StateFunction):
    f: StateFunction
    members: int
    dims: list[int | None]
    randomness: str

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        call = torch.vmap(self.f, in_dims=(0, 0, self.dims), randomness=self.randomness)
        return [t.flatten(0, 1) for t in call(unfold(state, self.members), unfold(rows, self.members), others)]


Work = Callable[[Callable[[Tensors], Tensors], Tensors, int], Sequence[Tensor]]
"""Function on values. It takes f as a function of the state, the state, and the number of members folded into its rows.
It returns tensors whose dimension 0 are rows or samples."""


@dataclass(frozen=True)
class _Call:
    """Call of a function, without its tensors: those of the state, of the rows and the others, in numbers `counts`."""

    f: StateFunction
    members: int
    counts: list[int]

    def split(self, items: Iterable[Any]) -> list[list[Any]]:
        """Items, one for each tensor, as those of the state, of the rows and of the others."""
        items = iter(items)
        return [list(islice(items, count)) for count in self.counts]

    def linearised(self, tensors: Sequence[Tensor], needed: list[bool]) -> Linearisation:
        """Linearisation at these tensors, in the rows and others that are needed and differentiable."""
        state, rows, others = self.split(tensors)
        pairs = zip(rows + others, needed, strict=True)
        chosen = [i for i, (t, need) in enumerate(pairs) if need and (t.is_floating_point() or t.is_complex())]
        return Linearisation(self.f, state, rows, others, chosen, self.members)


class _CallFunction(torch.autograd.Function):
    """Function of a ``Work`` or a ``Derivative``, a ``_Call`` and the call's tensors. Vmaps fold into the rows."""

    @classmethod
    def of(
        cls, own: Any, f: StateFunction, state: Tensors, rows: Tensors, others: Tensors, members: int = 1
    ) -> Tensors:
        """Results for these tensors."""
        call = _Call(f, members, [len(state), len(rows), len(others)])
        return list(cls.apply(own, call, *state, *rows, *others))

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, own: Any, call: _Call, *tensors: Tensor) -> Any:
        count, (_, _, *dims) = info.batch_size, in_dims
        state, rows, others = call.split(zip(tensors, dims, strict=True))
        folded = [(t.expand(count, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1) for t, d in state + rows]
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in others]
        f = call.f.folded(count, [None if dim is None else 0 for _, dim in others], info.randomness)
        results = cls.apply(own, replace(call, f=f, members=count * call.members), *folded, *moved)
        return tuple(unfold(results, count)), (0,) * len(results)


class OnValues(_CallFunction):
    """Results of a ``Work`` on the values of the tensors, outside of all transforms, and without derivative."""

    @staticmethod
    def forward(work: Work, call: _Call, *tensors: Tensor) -> Any:
        state, rows, others = call.split(tensor.detach() for tensor in tensors)
        return tuple(work(call.f.bind(rows, others), state, call.members))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.results = len(output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return (None,) * ctx.results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


@dataclass(frozen=True)
class Linearisation:
    """Linearisation of f(state, rows, others) in its rows and others, at a constant state."""

    f: StateFunction
    state: Tensors
    rows: Tensors
    others: Tensors
    chosen: list[int]  # positions, among rows and others, of the tensors to differentiate in
    members: int  # of vmaps, folded into the rows

    def pull(self, grads: Tensors) -> Tensors:
        """Gradients in the chosen tensors, for gradients of f."""
        return torch.func.vjp(self._restricted, self._chosen)[1](grads)[0]

    def push(self, tangents: Tensors) -> Tensors:
        """Tangents of f, for tangents of the chosen tensors.

        It transposes twice, because forward-mode AD does not nest in itself.
        """
        value, product = torch.func.vjp(self._restricted, self._chosen)[:2]
        return transpose(product, value)(tangents)[0]

    @property
    def _chosen(self) -> Tensors:
        return [[*self.rows, *self.others][i] for i in self.chosen]

    def _restricted(self, chosen: Tensors) -> Tensors:
        """f as a function of the chosen tensors, in the dtypes of the state."""
        tensors = [*self.rows, *self.others]
        for i, tensor in zip(self.chosen, chosen, strict=True):
            tensors[i] = tensor
        return in_dtypes_of(self.state, self.f(self.state, tensors[: len(self.rows)], tensors[len(self.rows) :]))


class Derivative:
    """Derivative of a fixed point in the tensors that its function uses. This base class has none.

    Args:
        name: name of the adjoint, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def pull(self, at: Linearisation, grads: Tensors) -> Tensors:
        """Gradients in the chosen tensors, for gradients of the state."""
        raise self._missing()

    def push(self, at: Linearisation, tangents: Tensors) -> Tensors:
        """Tangents of the state, for tangents of the chosen tensors."""
        raise self._missing()

    def _missing(self) -> RuntimeError:
        missing = f"{self.name} has no derivative under torch.func and in forward-mode AD"
        return RuntimeError(f"deqfast: {missing}: use Implicit(), JFB(), Phantom() or Unrolled()")


class OneStep(Derivative):
    """Derivative of one more step from the state, with the state as a constant. Not differentiable twice.

    Args:
        name: name of the adjoint, for errors.
        surrogate: maps the state's own function to the one to differentiate.
    """

    def __init__(self, name: str, surrogate: Callable[[StateFunction], StateFunction] = lambda f: f) -> None:
        super().__init__(name)
        self.surrogate = surrogate

    def pull(self, at: Linearisation, grads: Tensors) -> Tensors:
        return self._refuse(replace(at, f=self.surrogate(at.f)).pull(grads), grads, at)

    def push(self, at: Linearisation, tangents: Tensors) -> Tensors:
        return self._refuse(replace(at, f=self.surrogate(at.f)).push(tangents), tangents, at)

    def _refuse(self, products: Tensors, vectors: Tensors, at: Linearisation) -> Tensors:
        sources = (*vectors, *at.state, *at.rows, *at.others)
        return [NoDoubleBackward.apply(product, self.name, *sources) for product in products]


class Attached(_CallFunction):
    """Copy of the state, differentiable in `rows` and `others` as a ``Derivative`` says."""

    @staticmethod
    def forward(derivative: Derivative, call: _Call, *tensors: Tensor) -> Any:
        return tuple(tensor.clone() for tensor in call.split(tensors)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.derivative, ctx.call, *tensors = inputs
        _, rows, others = ctx.call.split(tensors)
        ctx.save_for_backward(*output, *rows, *others)
        ctx.save_for_forward(*output, *rows, *others)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _, _, *needed = ctx.needs_input_grad
        state, rows, others = ctx.call.split(needed)
        pulled: dict[int, Tensor] = {}
        if any(grad is not None for grad in grads):
            at = ctx.call.linearised(ctx.saved_tensors, rows + others)
            full = [torch.zeros_like(z) if g is None else g for g, z in zip(grads, at.state, strict=True)]
            gradients = over_members(lambda grads: ctx.derivative.pull(at, grads), full)
            pulled = dict(zip(at.chosen, gradients, strict=True))
        return None, None, *[None for _ in state], *[pulled.get(i) for i, _ in enumerate(rows + others)]

    @staticmethod
    def jvp(ctx: Any, derivative: None, call: None, *tangents: Tensor | None) -> Any:
        _, rows, others = ctx.call.split(tangents)
        with forward_mode():  # torch ends it within a jvp, and would lose the tangents of outer levels
            saved = [without_tangent(tensor) for tensor in ctx.saved_tensors]
            at = ctx.call.linearised(saved, [tangent is not None for tangent in rows + others])
            pushed = [tangent for tangent in rows + others if tangent is not None]
            return tuple(over_members(lambda tangents: ctx.derivative.push(at, tangents), pushed))


def for_members(options: Options, members: int) -> Options:
    """Options of a solve of several members of a vmap, folded into one batch."""
    groups = options.groups
    return options if groups is None or members == 1 else replace(options, groups=groups.repeated(members))


def transpose(product: Callable[[Tensors], Any], at: Tensors) -> Callable[[Tensors], Any]:
    """Transposed product of a linear function of tensors shaped as these."""
    return torch.func.vjp(lambda v: product(v)[0], [torch.zeros_like(t) for t in at])[1]


def in_dtypes_of(state: Tensors, outputs: Tensors) -> Tensors:
    """`outputs` in the dtypes of the state."""
    return [y.to(z.dtype) for y, z in zip(outputs, state, strict=True)]


def unfold(tensors: Sequence[Tensor], members: int) -> Tensors:
    """Tensors (V, B, ...) of tensors (V * B, ...) with the rows of V = `members` members."""
    return [t.unflatten(0, (members, len(t) // members)) for t in tensors]
