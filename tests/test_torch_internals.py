"""What deqfast assumes of torch and torch does not promise, for every version. Of transforms see test_func."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from deqfast.torch_internals import autograd, transforms
from deqfast.torch_internals.weights import next_node


def node_of(tensor):
    return autograd.edge_of(tensor)[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Doubled.seen = type(ctx), autograd.keeps_graph()
        return 2 * grad


class TestGraphs:
    def test_a_gradient_of_another_shape_is_refused(self):
        """torch's engine itself would sum it."""
        z = torch.ones(3, 4, requires_grad=True)
        with pytest.raises(RuntimeError, match="shape"):
            autograd.vjp([z.mean(dim=1, keepdim=True)], [z], [torch.ones(3, 4)])

    def test_nodes_are_numbered_in_the_order_of_their_recording_and_the_last_knows_its_leaf(self):
        x = torch.ones(2, requires_grad=True)
        before, number, after = x.exp(), next_node(), x.exp()
        assert node_of(before)._sequence_nr() < number == node_of(after)._sequence_nr()
        node, _ = node_of(before).next_functions[0]
        assert node.name() == "torch::autograd::AccumulateGrad" and node.variable is x

    def test_autocast_keeps_the_cast_of_a_weight(self):
        """Its node may be older than an evaluation that uses it, and is then no tensor computed outside."""
        weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            x @ weight
            begin = next_node()
            (cast, _) = node_of(x @ weight).next_functions[1]
        assert cast.name() == "ToCopyBackward0" and cast._sequence_nr() < begin

    @pytest.mark.parametrize("keeps", [False, True])
    def test_a_backward_pass_tells_whether_it_keeps_its_graph(self, keeps):
        """Its context is the node; compiled autograd gives a copy in its place."""
        x = torch.ones(2, requires_grad=True)
        Doubled.apply(x).sum().backward(retain_graph=keeps)
        assert Doubled.seen[1] == keeps and issubclass(Doubled.seen[0], BackwardCFunction)

    def test_a_hook_that_has_been_replaced_is_called(self):
        x, calls = torch.ones(2, requires_grad=True), []
        x.register_hook(calls.append)
        x.exp().sum().backward()
        (x * x).sum().backward(inputs=[x])
        autograd.vjp([x.exp()], [x], [torch.ones(2)])
        assert len(calls) == 2
        x.exp().sum().backward()
        assert len(calls) == 3

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of inputs without a gradient
    def test_hooks_are_the_users_again(self):
        """After the last of several contexts, unless the user has removed one in the meantime."""
        layer, hook = torch.nn.Linear(2, 2), lambda *_: None
        layer.weight.register_hook(hook)
        removed = layer.register_full_backward_hook(hook)
        layer.register_full_backward_pre_hook(hook)
        dicts = [layer.weight._backward_hooks, layer._backward_hooks, layer._backward_pre_hooks]
        with autograd.for_products(layer), autograd.for_products(layer):
            y = layer(torch.ones(1, 2))
            copied = copy.deepcopy(layer)
            removed.remove()
        autograd.vjp([y], [layer.weight], [torch.ones(1, 2)])
        assert [list(hooks.values()) for hooks in dicts] == [[hook], [], [hook]]
        assert [*copied._backward_pre_hooks.values()] == [hook]


class TestDispatch:
    def test_what_makes_more_of_an_op_than_its_kernel_is_seen(self):
        """The test of launches has modes and the profiler."""
        x, seen = torch.ones(2), []
        assert transforms.runs_only(x, x.clone())
        assert not transforms.runs_only(x, torch.nn.Parameter(x))
        assert not transforms.runs_only(x, x.to("meta"))
        torch.vmap(lambda row: seen.append(transforms.runs_only(x, x)) or row)(x)
        torch.func.grad(lambda y: seen.append(transforms.runs_only(x, x)) or y.sum())(x)
        assert seen == [False, False]
        only = torch.compile(lambda y: y + 1 if transforms.runs_only(y, y) else y, backend="eager", fullgraph=True)
        assert torch.equal(only(x), x)
