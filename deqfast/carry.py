"""States and data that are kept across steps, with new samples in place of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._checks import check_count
from .block import DEQBlock
from .state.rows import rows_of
from .torch_internals import pytree


class Carry:
    """Batch that is kept across steps: its states, its data, and the age of each sample.

    A step solves on from ``z`` and calls ``advance``. This replaces each finished sample by a new one, which starts at
    its initial state. The others keep their state, without gradient. So a step of few evaluations serves samples that
    need many, and no sample waits for the slowest one. Source: the carry of TRM (Jolicoeur-Martineau, 2025, "Less is
    more: recursive reasoning with tiny networks"), the continuous batching of language models.

    Args:
        init: a ``DEQBlock``, whose start for the new data is their state; or a function data -> z0. The block's x is
            then the first entry of the data if these are a tuple or list, else all of them.
        batches: iterable of batches, trees of tensors (N, ...) with one row per sample, such as a DataLoader. N may
            vary. For endless epochs pass ``itertools.chain.from_iterable(itertools.repeat(loader))``.
        size: samples kept, at least 1. At the end of `batches` finished samples leave without replacement, and the
            batch becomes smaller; ``len(carry)`` is its present size.
        device: where the data are kept; None: where they are.

    Attributes:
        data: tree like a batch, of tensors (len(carry), ...).
        z: states of these samples, a tree of tensors without gradient: the z0 of the next call of the block.
        age: (len(carry),) int64, steps since each sample came.
        taken: samples taken from `batches` so far.

    Raises:
        TypeError, ValueError: an argument is not as above. Later batches have another structure, shape or dtype than
            the first one. The text names the argument.

    Examples:
        A loop of training; each sample leaves when its solve ends, at the latest after 16 steps:

        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), deqfast.Picard(max_iter=2), warn=False)
        >>> head = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.Adam([*block.parameters(), *head.parameters()])
        >>> batches = ((torch.randn(16, 3), torch.randn(16, 1)) for _ in range(100))
        >>> carry = deqfast.Carry(block, batches, size=8)
        >>> for _ in range(10):
        ...     x, y = carry.data
        ...     z, solution = block(x, carry.z, return_solution=True)
        ...     optimizer.zero_grad()
        ...     (head(z) - y).square().mean().backward()
        ...     optimizer.step()
        ...     carry.advance(z, done=(solution.status != deqfast.Status.MAX_ITER) | (carry.age >= 15))
    """

    data: Any
    z: Any

    def __init__(
        self,
        init: DEQBlock | Callable[[Any], Any],
        batches: Iterable[Any],
        size: int,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if not callable(init):
            raise TypeError(f"init must be a DEQBlock or a function of the data, got {init!r}")
        if not isinstance(batches, Iterable) or isinstance(batches, (str, Tensor)):
            raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
        check_count("size", size)
        self._init, self._batches, self._device = init, iter(batches), device
        self._rest: list[Tensor] = []  # leaves of the rows that are taken from `batches` and not yet used
        self._spec: Any = None
        self._like: list[Any] = []  # shape of a row and dtype of each leaf
        self.taken = 0
        if (leaves := self._take(size)) is None:
            raise ValueError("batches must have at least one sample, got none")
        self.data = self._tree(leaves)
        self.z = self._start(self.data, len(leaves[0]))
        self.age = torch.zeros(len(leaves[0]), dtype=torch.int64, device=pytree.tree_leaves(self.z)[0].device)

    def __len__(self) -> int:
        return len(self.age)

    @torch.no_grad()
    def advance(self, z: Any, done: Tensor) -> None:
        """Keep the states, and replace finished samples by new ones.

        The host waits for the device once, for the number of samples that are done. ``data`` and ``z`` are new tensors
        if there are any: nothing that a backward pass still needs is overwritten.

        Args:
            z: the states after this step, a tree like ``z``; gradients are cut. A sample whose state is not finite
                counts as done. A solve that broke down returns a finite state, and has the status NONFINITE.
            done: (len(carry),) bool, the samples that are finished.

        Raises:
            TypeError, ValueError: an argument is not as above.
        """
        leaves, spec = self._checked(z)
        if not isinstance(done, Tensor) or done.dtype != torch.bool or done.shape != self.age.shape:
            got = f"{tuple(done.shape)} {done.dtype}" if isinstance(done, Tensor) else repr(done)
            raise ValueError(f"done must be a mask ({len(self)},) torch.bool, got {got}")
        finite = torch.stack([torch.isfinite(rows_of(leaf)).all(dim=1) for leaf in leaves]).all(dim=0)
        rows = (done.to(self.age.device) | ~finite).nonzero().flatten()
        self.age = self.age + 1
        if len(rows) and (fresh := self._take(len(rows))) is not None:
            count = len(fresh[0])
            start = self._start(self._tree(fresh), count)
            filled, rows = rows[:count], rows[count:]
            leaves = _put(leaves, filled, pytree.tree_leaves(start))
            self.data = self._tree(_put(pytree.tree_leaves(self.data), filled, fresh))
            self.age[filled] = 0
        if len(rows):
            kept = torch.ones_like(self.age, dtype=torch.bool).index_fill_(0, rows, False).nonzero().flatten()
            leaves, self.age = [leaf.index_select(0, kept) for leaf in leaves], self.age[kept]
            self.data = pytree.tree_map(lambda leaf: leaf.index_select(0, kept.to(leaf.device)), self.data)
        self.z = pytree.tree_unflatten(leaves, spec)

    def _checked(self, z: Any) -> tuple[list[Tensor], Any]:
        """Leaves of z without gradient, and its structure; TypeError or ValueError unless they are those of ``z``."""
        (leaves, spec), (own, own_spec) = pytree.tree_flatten(z), pytree.tree_flatten(self.z)
        if spec != own_spec:
            raise TypeError(f"z must have the structure of the states, {own_spec}, got {spec}")
        shapes, own_shapes = ([(tuple(leaf.shape), leaf.dtype) for leaf in of] for of in (leaves, own))
        if shapes != own_shapes:
            raise ValueError(f"z must have the shapes and dtypes of the states, {own_shapes}, got {shapes}")
        return [leaf.detach() for leaf in leaves], spec

    def _start(self, data: Any, count: int) -> Any:
        """Initial states of the data of `count` samples."""
        init: Any = self._init
        if isinstance(init, DEQBlock):
            init, data = init._initial_state, data[0] if isinstance(data, (tuple, list)) else data
        with torch.no_grad():
            z = pytree.tree_map(torch.detach, init(data))
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(z)]
        if any(shape[:1] != (count,) for shape in shapes):
            raise ValueError(f"init must return states of {count} samples, got tensors of the shapes {shapes}")
        return z

    def _tree(self, leaves: list[Tensor]) -> Any:
        return pytree.tree_unflatten(leaves, self._spec)

    def _take(self, count: int) -> list[Tensor] | None:
        """Leaves of the next rows of data, at most `count`; None if there are none."""
        parts: list[list[Tensor]] = []
        while count:
            if not self._rest or not len(self._rest[0]):
                if (batch := next(self._batches, None)) is None:
                    break
                self._rest = self._leaves_of(batch)
                continue
            parts.append([leaf[:count] for leaf in self._rest])
            self._rest = [leaf[count:] for leaf in self._rest]
            count, self.taken = count - len(parts[-1][0]), self.taken + len(parts[-1][0])
        # Copies: views would keep whole batches in memory, and an iterable may overwrite them.
        return [torch.cat(of_leaf).to(self._device) for of_leaf in zip(*parts, strict=True)] or None

    def _leaves_of(self, batch: Any) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(batch)
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            kinds = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
            raise TypeError(f"batches must hold tensors with one row per sample, got a batch of {kinds}")
        if len({len(leaf) for leaf in leaves}) > 1:
            shapes = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(f"the tensors of batches must have equally many rows, got the shapes {shapes}")
        like = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if self._spec is None:
            self._spec, self._like = spec, like
        if (spec, like) != (self._spec, self._like):
            raise ValueError(f"batches must be alike, {self._spec} of {self._like}, got {spec} of {like}")
        return leaves

    def state_dict(self) -> dict[str, Any]:
        """States, data and ages, for ``torch.save``. The position in `batches` is not part of it."""
        data, z = pytree.tree_leaves(self.data), pytree.tree_leaves(self.z)
        rest = [leaf.clone() for leaf in self._rest]
        return {"data": data, "z": z, "age": self.age, "rest": rest, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, with the `batches` of this object.

        Raises:
            ValueError: it has other data or states than this object.
        """
        for name, tree in (("data", self.data), ("z", self.z)):
            leaves, spec = pytree.tree_flatten(tree)
            own, given = ([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in of] for of in (leaves, state[name]))
            if own != given:
                raise ValueError(f"the state's {name} must be like this carry's, {own}, got {given}")
            moved = [leaf.to(mine.device) for leaf, mine in zip(state[name], leaves, strict=True)]
            setattr(self, name, pytree.tree_unflatten(moved, spec))
        self.age, self._rest, self.taken = state["age"].to(self.age.device), state["rest"], state["taken"]


def _put(leaves: list[Tensor], rows: Tensor, values: list[Tensor]) -> list[Tensor]:
    """Copies of the leaves with these rows replaced."""
    pairs = zip(leaves, values, strict=True)
    return [leaf.index_copy(0, rows.to(leaf.device), value.to(leaf.device, leaf.dtype)) for leaf, value in pairs]
