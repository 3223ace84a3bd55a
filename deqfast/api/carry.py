"""States and data that are kept across steps, with new samples in place of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_count
from ..state.rows import all_finite
from ..torch_internals import pytree
from .block import DEQBlock


class Carry:
    """Batch that is kept across steps: its states, its data, and the age of each sample.

    A step continues the solves from ``z`` and calls ``advance``. A new sample then replaces each finished one, and
    starts at its initial state. The others keep their state, without gradient. A step of few evaluations thus serves
    samples that need many, and no sample waits for the slowest one. Sources: the carry of TRM (Jolicoeur-Martineau,
    2025, "Less is more: recursive reasoning with tiny networks"), and the continuous batching of language models.

    Args:
        init: gives new samples their state: a ``DEQBlock``, by its start for x, or a function data -> z0. x is the
            first entry of a tuple or list of data, else all of them. A compiled or wrapped block is refused.
        batches: iterable of batches, trees of tensors (N, ...) with one row per sample, such as a DataLoader. N may
            vary. It is fetched when needed; ``chain.from_iterable(repeat(loader))`` of itertools makes endless epochs.
        size: samples kept, at least 1. After the last of `batches`, ``len(carry)`` decreases.
        device: where the data are kept; None: where the first batch is.

    Attributes:
        data: tree like a batch, of tensors (len(carry), ...).
        z: states of these samples, a tree of tensors without gradient: the z0 of the next call of the block.
        age: (len(carry),) int64, steps since each sample entered.
        taken: samples taken from `batches` so far; 0 until another attribute is first used.

    Raises:
        TypeError, ValueError: an argument is not as above; `batches` and `init` are also checked when used. Later
            batches or starts have another structure, shape or dtype than the first ones. The text names the argument.

    Examples:
        A loop of training; each sample leaves when its solve ends, at the latest after 16 steps:

        >>> last = lambda z, value, k: torch.full((len(z),), k == 4)  # a step ends with its last state
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), deqfast.Picard(max_iter=4), stop_fn=last, warn=False)
        >>> head = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.Adam([*block.parameters(), *head.parameters()])
        >>> batches = ((torch.randn(16, 3), torch.randn(16, 1)) for _ in range(100))
        >>> carry = deqfast.Carry(block, batches, size=8)
        >>> for _ in range(10):
        ...     x, y = carry.data
        ...     z, solution = block(x, z0=carry.z, return_solution=True)
        ...     optimizer.zero_grad()
        ...     (head(z) - y).square().mean().backward()
        ...     optimizer.step()
        ...     carry.advance(z, done=(solution.status != deqfast.Status.STOPPED) | (carry.age >= 15))
    """

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
        parts = init.modules() if isinstance(init, nn.Module) and not isinstance(init, DEQBlock) else []
        if any(isinstance(part, DEQBlock) for part in parts):
            raise TypeError(f"init must be the DEQBlock itself, got it within a {type(init).__name__}")
        if not isinstance(batches, Iterable) or isinstance(batches, (str, Tensor)):
            raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
        check_count("size", size)
        # Nothing is taken before it is needed: load_state_dict would discard it.
        self._init, self._batches, self._size = init, chain.from_iterable((batches,)), size
        self._device = None if device is None else torch.device(device)
        self._rest: list[Any] = []  # rows that are taken from `batches` and not yet used, in one or more trees
        self.taken = 0

    @cached_property
    def data(self) -> Any:
        """Data of the samples."""
        if (data := self._next(self._size)) is None:
            raise ValueError("batches must have at least one sample, got none")
        self._use(_count(data))
        return data

    @cached_property
    def z(self) -> Any:
        """States of the samples."""
        return self._start(self.data)

    @cached_property
    def age(self) -> Tensor:
        """Steps since each sample entered."""
        return torch.zeros(_count(self.z), dtype=torch.int64, device=pytree.tree_leaves(self.z)[0].device)

    def __len__(self) -> int:
        return len(self.age)

    @torch.no_grad()
    def advance(self, z: Any, done: Tensor) -> None:
        """Keep the states, and replace finished samples by new ones.

        The host waits for the device once, for the number of samples that are done, and for each tensor that is copied
        to another device. ``data`` and ``z`` are new tensors: nothing that a backward pass needs is overwritten.

        Args:
            z: the states after this step, a tree like ``z``; they are copied, without gradient. A sample whose state
                is not finite counts as done. A solve that broke down (NONFINITE) returns a finite state.
            done: (len(carry),) bool, the samples that are finished.

        Raises:
            TypeError, ValueError: an argument, a new batch or a start is not as above. The carry is then unchanged.
                A wrong batch is lost: the next call takes the one after it.
        """
        z = _copied("z", z, self.z, len(self))
        if not isinstance(done, Tensor) or done.dtype != torch.bool or done.shape != self.age.shape:
            got = f"{tuple(done.shape)} {done.dtype}" if isinstance(done, Tensor) else repr(done)
            raise ValueError(f"done must be a mask ({len(self)},) torch.bool, got {got}")
        finite = all_finite(pytree.tree_leaves(z))
        rows = (done.to(self.age.device) | ~finite).nonzero().flatten()
        data, age = self.data, self.age + 1
        if len(rows) and (fresh := self._next(len(rows))) is not None:
            filled, rows = rows[: _count(fresh)], rows[_count(fresh) :]
            z, data = _put(z, filled, self._start(fresh)), _put(data, filled, fresh)
            age = age.index_fill(0, filled, 0)
            self._use(len(filled))
        if len(rows):
            # The others, in their order. nonzero would wait for the device, for their number.
            kept = torch.zeros_like(age).index_fill(0, rows, 1).argsort(stable=True)[: len(age) - len(rows)]
            z, data, age = pytree.tree_map(lambda leaf: leaf.index_select(0, kept.to(leaf.device)), (z, data, age))
        self.z, self.data, self.age = z, data, age

    def _start(self, data: Any) -> Any:
        """Initial states of these data."""
        init: Any = self._init
        count = _count(data)
        if isinstance(init, DEQBlock):
            init, data = init._initial_state, data[0] if isinstance(data, (tuple, list)) else data
        with torch.no_grad():
            return _copied("the states of init", init(data), vars(self).get("z"), count)

    def _next(self, count: int) -> Any:
        """Copies of the next rows of data, at most `count`; None if there are none. They stay until ``_use``."""
        ready = sum(map(_count, self._rest))
        while ready < count and (batch := next(self._batches, None)) is not None:
            like = self._rest[0] if self._rest else None
            self._rest.append(_copied("batches", batch, like, device=self._device))
            ready += _count(batch)
        if len(self._rest) > 1:
            self._rest = [_joined(self._rest)]
        # A view would keep the whole batch in memory.
        return pytree.tree_map(lambda leaf: leaf[:count].clone(), self._rest[0]) if ready else None

    def _use(self, count: int) -> None:
        self._rest = [pytree.tree_map(lambda leaf: leaf[count:], self._rest[0])]
        self.taken += count

    def state_dict(self) -> dict[str, Any]:
        """Copies of states, data, ages and the unused rows of the last batch, for ``torch.save``.

        The position in `batches` is not in it. ``torch.load(weights_only=True)`` reads tuples, lists and dicts.
        """
        state = {"data": self.data, "z": self.z, "age": self.age}
        return pytree.tree_map(torch.clone, state) | {"rest": _joined(self._rest), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, with the `batches` of this object.

        To resume a run, load into a new carry before its first use. Its `batches` must begin with the first batch that
        the saved carry had not fetched. The tensors go to where this carry's are, else to `device`.

        Raises:
            TypeError, ValueError: the state does not fit, or is not of a carry, which is then unchanged.
        """
        names, own = ["data", "z", "age", "rest", "taken"], vars(self)
        if not isinstance(state, dict) or sorted(state) != sorted(names):
            got = list(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"the state must be a dict of {names}, got {got}")
        data = _copied("the state's data", state["data"], own.get("data"), device=self._device)
        z = _copied("the state's z", state["z"], own.get("z"), _count(data), self._device)
        age = torch.zeros(0, dtype=torch.int64, device=pytree.tree_leaves(z)[0].device)
        age = _copied("the state's age", state["age"], age, _count(data))
        rest = _copied("the state's rest", state["rest"], data)
        check_count("the state's taken", state["taken"], 0)
        self.data, self.z, self.age, self._rest, self.taken = data, z, age, [rest], state["taken"]


def _count(tree: Any) -> int:
    """Number of rows."""
    return len(pytree.tree_leaves(tree)[0])


def _copied(name: str, tree: Any, like: Any = None, count: int | None = None, device: Any = None) -> Any:
    """Copy without gradient of a tree of tensors with `count` rows (None: equally many), on `device`.

    If `like` is given, the copy is on its devices. TypeError or ValueError unless the rows are like its rows.
    """
    (leaves, spec), (own, own_spec) = pytree.tree_flatten(tree), pytree.tree_flatten(tree if like is None else like)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        kinds = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        raise TypeError(f"{name} must hold tensors with one row per sample, got {kinds}")
    if {len(leaf) for leaf in leaves} != {_count(tree) if count is None else count}:
        many = "equally many" if count is None else count
        raise ValueError(f"{name} must have {many} rows, got the shapes {[tuple(leaf.shape) for leaf in leaves]}")
    if spec != own_spec:
        raise TypeError(f"{name} must have the structure {own_spec}, got {spec}")
    rows, own_rows = ([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in tensors] for tensors in (leaves, own))
    if rows != own_rows:
        raise ValueError(f"{name} must have rows of the shapes and dtypes {own_rows}, got {rows}")
    devices = [device if like is None else leaf.device for leaf in own]
    moved = [leaf.detach().to(to, copy=True) for leaf, to in zip(leaves, devices, strict=True)]
    return pytree.tree_unflatten(moved, spec)


def _joined(trees: list[Any]) -> Any:
    """Tree of all rows of these trees."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *trees)


def _put(tree: Any, rows: Tensor, values: Any) -> Any:
    """Copy of the tree with these rows replaced."""
    return pytree.tree_map(lambda leaf, value: leaf.index_copy(0, rows.to(leaf.device), value), tree, values)
