"""Compiled backward solves: the product u -> J^T u of a cell at z* as a graph of its own, in a compiled loop.

``torch.compile`` captures the cell, with guards on all that it reads. The graph of its evaluation and its gradient is
split in two: the part that depends on u is the product, and the rest is computed once, at z*.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..engine.runners.compiled import Compiled
from ..engine.solve import Options
from ..ops.registry import library
from ..solution import Solution
from ..state.packing import Packing
from ..torch_internals import pytree
from ..torch_internals.autograd import in_order_of, keep, kept, vjp
from ..torch_internals.dispatch import OpOverload
from ..torch_internals.dynamo import Codes, reason

# The identity, which marks z among the inputs of a captured graph.
library.define("differentiated(Tensor z) -> Tensor")
library.impl("differentiated", torch.clone, "CompositeImplicitAutograd")
_differentiated = torch.ops.deqfast.differentiated.default

_REFUSAL = "the gradient's solve cannot be compiled (compile='forward' leaves it as it is)"


@dataclass(frozen=True)
class Product:
    """u -> J^T u at one z*."""

    graph: fx.GraphModule  # its inputs are the leaves of u and `saved`
    saved: list[tuple[Tensor, int]]  # values that do not depend on u, see ``keep``
    loops: Compiled  # compiled solves with this graph
    leaves: list[Tensor]  # those of z*; the leaves of u have their shapes, dtypes and memory orders

    def solve(self, start: list[Tensor], options: Options) -> Solution:
        """Solve u = J^T u + start from `start`, leaves like those of z*; the value is a list of leaves too."""
        start = [torch.empty_like(z).copy_(g) for z, g in zip(self.leaves, start, strict=True)]
        with torch.autocast(start[0].device.type, enabled=False):  # the graph contains its casts
            saved = [kept(tensor) for tensor in self.saved]
            return self.loops.solve(_affine, (self.graph, saved, start), start, options)


def _affine(u: list[Tensor], x: tuple[fx.GraphModule, list[Tensor], list[Tensor]]) -> list[Tensor]:
    graph, saved, start = x
    return [p + g for p, g in zip(graph(*u, saved), start, strict=True)]


class Linearised:
    """Compiled linearisations of a cell: one for each shape of a sample, for any batch."""

    def __init__(self) -> None:
        self._codes = Codes(_evaluated, backend=self._capture)
        self._current = threading.local()

    def __call__(self, cell: Callable[[Any, Any], Any], z: Any, x: Any) -> Product | None:
        """Product with the Jacobian of cell(., x) at z; None if there are no samples or torch runs code uncompiled.

        Raises:
            RuntimeError: torch.compile cannot compile the cell or its gradient, with the reason.
        """
        packing = Packing(z)
        if not packing.batch:
            return None
        leaves = [leaf.detach().requires_grad_() for leaf in pytree.tree_leaves(z)]
        x = pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, x)
        self._current.product = None
        try:
            with torch.enable_grad():
                self._codes.call(packing.signature(), cell, packing.spec, leaves, x)
        except Exception as error:
            raise RuntimeError(f"compile=True: {_REFUSAL}: {reason(error)}") from error
        product, self._current.product = self._current.product, None
        if product is None:
            return None
        graph, saved, loops = product
        return Product(graph, [keep(tensor) for tensor in saved], loops, leaves)

    def _capture(self, captured: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Backend of torch.compile, whose code leaves the product in `_current` in place of an evaluation."""
        states = [node.meta["example_value"] for node in captured.graph.nodes if node.target is _differentiated]

        def products(u: list[Tensor], inputs: list[Any]) -> list[Tensor]:
            evaluation = _Evaluation(captured)
            with torch.enable_grad():
                values = evaluation.run(*pytree.tree_map_only(Tensor, Tensor.detach, inputs))
                pulled = vjp(values, evaluation.leaves, u)
            return [torch.zeros_like(v) if p is None else p for p, v in zip(pulled, u, strict=True)]

        # The inputs with which torch.compile traced; its guards know their sizes.
        examples = [node.meta["example_value"] for node in captured.graph.nodes if node.op == "placeholder"]
        arguments = [torch.empty_like(z) for z in states], examples
        graph = make_fx(products, tracing_mode="symbolic")(*arguments)
        with torch.autocast(states[0].device.type, enabled=False):  # the graph contains its casts
            # Backward formulas may write to fresh zeros, which the split would otherwise compute only once.
            graph = make_fx(torch.func.functionalize(graph), tracing_mode="symbolic")(*arguments)
        once, product = _parted(graph, len(states))
        loops, outputs = Compiled(_REFUSAL), len(states)

        def run(*inputs: Any) -> list[None]:
            with torch.no_grad(), torch.autocast(states[0].device.type, enabled=False):
                self._current.product = product, once(*inputs), loops
            return [None] * outputs

        return run

    def __reduce__(self) -> Any:
        """A copy has none of the code, which lives in one process."""
        return Linearised, ()


def _evaluated(cell: Callable[[Any, Any], Any], spec: pytree.TreeSpec, leaves: list[Tensor], x: Any) -> list[Tensor]:
    z = pytree.tree_unflatten([_differentiated(leaf) for leaf in leaves], spec)
    # Copies, which the product does not need: the capture would drop outputs that repeat or are inputs.
    return [value.clone() for value in in_order_of(z, cell(z, x))]


class _Evaluation(fx.Interpreter):
    """Evaluation of a captured graph, with fresh `leaves` for z."""

    def __init__(self, captured: fx.GraphModule) -> None:
        super().__init__(captured)
        self.leaves: list[Tensor] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _differentiated:
            return super().call_function(target, args, kwargs)
        self.leaves.append(args[0].detach().requires_grad_())
        return self.leaves[-1]


def _parted(graph: fx.GraphModule, count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph: the part without the first `count` inputs, and the rest, with them and that part's results."""
    *nodes, output = graph.graph.nodes
    dependent = set(nodes[:count])
    for node in nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    computed = dependent.union(filter(_is_made_in_loops, nodes))  # by the product; it saves the rest of what it reads
    read = {*dependent, *output.args[0]}
    for node in reversed(nodes):
        if node in read and node in computed:
            read.update(node.all_input_nodes)
    sizes = {node: size for node in nodes if node in read and (size := _size(node, nodes)) is not None}
    read.update(tensor for tensor, _ in sizes.values())
    saved = [node for node in nodes if node in read and node not in computed and node not in sizes]

    once, product = fx.Graph(), fx.Graph()
    copies = {node: product.placeholder(node.name) for node in nodes[:count]}
    results = product.placeholder("saved")
    copies |= {node: product.call_function(operator.getitem, (results, i)) for i, node in enumerate(saved)}
    for number, (tensor, dimension) in sizes.items():
        copies[number] = product.call_function(torch.ops.aten.sym_size.int, (copies[tensor], dimension))
    for node in nodes[count:]:
        if node in read and node in computed:
            copies[node] = product.node_copy(node, copies.__getitem__)
    product.output([copies[node] for node in output.args[0]])
    alone: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in dependent:
            alone[node] = once.node_copy(node, alone.__getitem__)
    once.output([alone[node] for node in saved])
    once.eliminate_dead_code()
    return fx.GraphModule(graph, once), fx.GraphModule(graph, product)


def _size(number: fx.Node, nodes: list[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return the input and the dimension whose size the input `number` is; None if it is not a size."""
    if number.op == "placeholder" and isinstance(number.meta["val"], torch.SymInt):
        for node in nodes:
            shape = getattr(node.meta["val"], "shape", ()) if node.op == "placeholder" else ()
            for dimension, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and size.node.expr == number.meta["val"].node.expr:
                    return node, dimension
    return None


def _is_made_in_loops(node: fx.Node) -> bool:
    """Return whether the node is a size or a view; loops take neither sizes that vary nor tensors that share memory."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_made_in_loops(node.all_input_nodes[0])
    views = isinstance(node.target, OpOverload) and any(made.alias_info for made in node.target._schema.returns)
    return views or isinstance(node.meta["val"], torch.SymInt)
