"""Networks: sizes, common initial weights, constraints, and the choice of kernel."""

import pytest
import torch
from correctness import rounding
from nc_study import networks
from nc_study.analysis import last_block_radius
from nc_study.config import CELLS, MODELS, RUNNABLE, arm_options, settings_from
from nc_study.networks import Conv2d, build, cost, project
from study_helpers import float64, shapes_data
from torch.utils._python_dispatch import TorchDispatchMode


def make(model, **given):
    return build(settings_from("cifar_lt", model=model, device="cpu", dataset="shapes", kernel="torch", **given))


def test_the_explicit_network_is_resnet_18():
    network = make("explicit", width=64)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962 - 10  # no bias in the classifier
    convolutions = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 17 + 3  # with the classifier 18 layers, and three projections
    shapes = []
    network.trunk.register_forward_hook(lambda *call: shapes.append(call[-1].shape[1:]))
    logits, features, solution = network(torch.randn(2, 3, 32, 32))
    assert shapes == [(512, 4, 4)]
    assert logits.shape == (2, 10) and features.shape == (2, 512) and solution is None


def test_initial_weights_depend_only_on_the_seed_and_networks_differ_only_in_the_last_block():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = make("deq", width=1), make("deq", width=1), make("deq", width=1, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    deq = first.state_dict()
    for arm in RUNNABLE:
        state = make(**arm_options(arm), width=1).state_dict()
        shared = {name for name in state if not name.startswith("last.")}
        assert shared == {name for name in deq if not name.startswith("last.")}
        assert all(torch.equal(state[name], deq[name]) for name in shared)


def test_what_stands_between_the_explicit_network_and_the_deq():
    """`explicit-norm` is the explicit block before a normalisation, `tied` the DEQ's cell, `untied` has two of them."""
    x = torch.randn(3, 8, 4, 4)
    arms = ("explicit", "explicit-norm", "tied-1", "tied-2", "untied-2", "deq-implicit")
    explicit, norm, once, tied, untied, deq = (make(**arm_options(arm), width=1, scale=0.3).eval().last for arm in arms)
    units = rounding(torch.float32)
    torch.testing.assert_close(norm(x), torch.nn.functional.group_norm(explicit(x), 8), rtol=units, atol=units)
    first, second = untied.cells
    assert torch.equal(once(x), deq.cell(x, x)) and torch.equal(tied(x), deq.cell(deq.cell(x, x), x))
    assert torch.equal(untied(x), second(deq.cell(x, x), x)) and not torch.equal(untied(x), first(first(x, x), x))


@pytest.mark.parametrize("arm", RUNNABLE)
def test_every_parameter_of_every_arm_moves(arm):
    """A step without decay changes each; a block that a start from z = 0 leaves untrained would be seen. Width 2: with
    a channel to each group of the last normalisation the mean over the pixels would be its bias."""
    network = make(**arm_options(arm), width=2)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(network(images).logits, torch.arange(8)).backward()
    torch.optim.SGD(network.parameters(), 1.0).step()
    assert not [name for name, parameter in network.named_parameters() if torch.equal(parameter, before[name])]


def test_an_arm_costs_what_its_convolutions_do():
    """At width 1 the last block has 8 channels on 4 x 4 pixels: a convolution takes 2 * 9 * 8 * 8 * 16 operations."""
    convolution = 2 * 9 * 8 * 8 * 16
    arms = ("explicit", "tied-4", "untied-2")
    explicit, tied, untied = (cost(make(**arm_options(arm), width=1), None) for arm in arms)
    assert {arm.flops_evaluation for arm in (explicit, tied, untied)} == {2 * convolution}
    assert [arm.evaluations for arm in (explicit, tied, untied)] == [1, 4, 2]
    assert untied.last_parameters == 2 * tied.last_parameters
    deq = cost(make("deq", width=1), 12.5)
    assert deq.last_parameters == tied.last_parameters and deq.flops == tied.flops + 8.5 * 2 * convolution


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [("broyden", "jfb"), ("anderson", "implicit"), ("picard", "phantom"), ("broyden", "unrolled")],
)
def test_the_deq_network_takes_its_settings(solver, adjoint):
    network = make("deq", width=1, solver=solver, adjoint=adjoint, tol=0.02, max_iter=7)
    assert network.eval()(torch.empty(0, 3, 32, 32)).logits.shape == (0, 10)  # a process may have none of a split
    output = network.train()(torch.randn(3, 3, 32, 32).contiguous(memory_format=torch.channels_last))
    assert output.solution.evaluations <= 7 and network.last.solver.tol == 0.02
    assert network.last.drop_converged == (adjoint != "unrolled"), "an unrolled one runs no solver"
    output.logits.sum().backward()
    if adjoint == "implicit":  # its solve uses the forward's settings
        assert network.last.backward_solution.evaluations <= 7
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_the_scale_is_the_gain_of_the_branch_that_is_added_to_the_input(model):
    """A norm that follows removes the gain, so it must be on the branch to which the input is added."""
    branches, x = [], torch.randn(3, 8, 4, 4)
    for scale in (1.0, 0.25):
        block = make(model, width=1, scale=scale).eval().last
        block = block.cells[0] if model in CELLS else getattr(block, "cell", block)
        last = block.norm2 if model.startswith("explicit") else block.conv2
        last.register_forward_hook(lambda *call: branches.append(call[-1]))
        block(*[x] * (1 if model.startswith("explicit") else 2))
    torch.testing.assert_close(branches[1], branches[0] / 4)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_float32_kernels_compute_products_of_bfloat16(size, stride, monkeypatch):
    """Operands are integers whose sums do not exceed 2^24, so that no order of summation rounds. Result and gradients
    are therefore, in every bit, the exact ones of rounded operands, rounded once."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-1023, 1024, (2, 4, 6, 6), generator=draw).float()
    weight = torch.randint(-255, 256, (4, 4, size, size), generator=draw).float()  # 36 products of 2^18
    monkeypatch.setattr(networks, "multiplies_bf16", lambda: False)
    convolution = Conv2d(4, 4, size, stride)
    convolution.weight.data.copy_(weight)
    with Kernels() as kernels, torch.autocast("cpu", torch.bfloat16):
        results = differentiated(convolution, x, convolution.weight)
    assert kernels.dtypes == {torch.float32}
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float32, torch.float32]
    x, weight = x.bfloat16().double(), weight.bfloat16().double()
    exact = differentiated(lambda x: torch.nn.functional.conv2d(x, weight, None, stride, size // 2), x, weight)
    assert all(torch.equal(a.float(), b.float().bfloat16().float()) for a, b in zip(results, exact, strict=True))


def differentiated(function, x, weight):
    """Return the value at x, and the gradients in x and weight for a gradient of integers up to 127."""
    x, weight = x.clone().requires_grad_(), weight.requires_grad_()
    value = function(x)
    gradient = torch.randint(-127, 128, value.shape, generator=torch.Generator().manual_seed(1)).to(value)
    return value.detach(), *torch.autograd.grad(value, (x, weight), gradient)


class Kernels(TorchDispatchMode):
    """Collects the dtypes in which convolutions and their gradients are computed."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.overloadpacket.__name__:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["explicit", "deq"])
def test_project_moves_weights_into_the_bounds_and_no_others(model):
    network = make(model, width=1)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    project(network, e_w=1e6, e_h=None)
    assert all(torch.equal(parameter, before[name]) for name, parameter in network.named_parameters())
    project(network, e_w=0.01, e_h=0.3)
    assert network.classifier.weight.square().sum(1).mean().item() == pytest.approx(0.01)
    convolutions = [module.weight for module in network.last.modules() if isinstance(module, torch.nn.Conv2d)]
    assert sum(weight.square().sum().item() for weight in convolutions) ** 0.5 == pytest.approx(0.3)
    moved = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert len(moved) == 3 and len(convolutions) == 2


def test_the_spectral_radius_is_that_of_the_whole_jacobian():
    given = {"dataset": "shapes", "device": "cpu", "kernel": "torch", "width": 1, "test_images": 20}
    settings = settings_from("cifar_lt", model="deq", **given)
    with float64():
        data, network = shapes_data(settings), build(settings)
    state, radius = torch.get_rng_state(), last_block_radius(network, data)
    assert torch.equal(torch.get_rng_state(), state) and radius == last_block_radius(network, data)
    images = torch.cat([(data.train_labels == label).nonzero()[:1, 0] for label in range(3)])
    assert radius.labels[::5][:3] == (0, 1, 2)
    with torch.no_grad():
        x = network.trunk(network.stem(data.normalise(data.train_images[images])))
        z = network.last(x)
    for i in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda v, x=x[i : i + 1]: network.last.cell(v, x), z[i : i + 1])
        exact = torch.linalg.eigvals(jacobian.reshape(z[i].numel(), -1)).abs().max()
        assert radius.values[5 * i] == pytest.approx(exact.item(), rel=0.05)
