"""Wrong arguments, refused by their name with what to write instead, and options that do not go together."""

from __future__ import annotations

import functools
import math
import re
from functools import partial

import pytest
import torch
from torch import nn

import deqfast
from deqfast import (
    JFB,
    SHINE,
    Anderson,
    Broyden,
    Carry,
    DEQBlock,
    FCCell,
    Groups,
    Implicit,
    LinearCell,
    MixedAnderson,
    MonotoneCell,
    Neumann,
    Phantom,
    Picard,
    ResidualCell,
    Reversible,
    SolveDropout,
    SubhomogeneousCell,
    Unrolled,
    diagnose,
    find_fixed_points,
    root,
    solve,
)
from deqfast.api.refusals import REFUSED
from deqfast.compat.torchdeq import get_deq
from deqfast.engine.refusals import name_of
from deqfast.engine.solve import Options, Solve
from deqfast.gradients import as_adjoint
from deqfast.regularize import jacobian_penalty, spectral_radius
from deqfast.state.rows import mark_samples
from deqfast.torch_internals.ranks import Ranks


def halve(z, x):
    return 0.5 * z + x


class Cell(nn.Module):
    def forward(self, z, x):
        return 0.5 * torch.tanh(z) + x


class OwnSolver(Picard):
    """A user's solver, whose step is not deqfast's."""

    def advance(self, state, fz, k, last):
        super().advance(state, fz, k, last)


Z0 = torch.zeros(4, 3)
LABELS = torch.zeros(2, dtype=torch.int64)
LEARNED = nn.Bilinear(4, 3, 4)
LEARNED.initial_state = nn.Parameter(torch.zeros(4))


def given(**options):
    """A solve of three rows with these options."""
    return lambda: solve(torch.cos, torch.zeros(3, 2), **options)


def valued(value):
    return lambda: solve(lambda z: value, Z0)


def started(z0, **options):
    return lambda: solve(lambda z: z, z0, **options)


def ruled(mask):
    return given(stop_fn=lambda z, value, k: mask)


def mixed(mixing_fn):
    return given(solver=MixedAnderson(mixing_fn=mixing_fn))


def applied(cell, z, x):
    return lambda: cell(torch.zeros(z), torch.zeros(x))


def carried(init=None, batches=((Z0,),), size=4, z=Z0, done=Z0[:, 0] > 0):
    """A carry, and a step of it."""
    return lambda: Carry(DEQBlock(halve) if init is None else init, batches, size).advance(z, done)


NAMES = [
    (lambda: DEQBlock(halve, rtol=1e-4), TypeError, "use solver=Broyden(rtol=...)"),
    (lambda: DEQBlock(halve, ridge=0.0), TypeError, "use solver=Anderson(ridge=...)"),
    (lambda: DEQBlock(halve, checkpoint=True), TypeError, "use adjoint=Unrolled(checkpoint=...)"),
    (lambda: DEQBlock(halve, tol=1e-4), TypeError, "use solver=Broyden(rtol=...)"),
    (lambda: DEQBlock(halve, solvr="picard"), TypeError, "'solvr'; did you mean 'solver'?"),
    (lambda: DEQBlock(halve, colour=1), TypeError, "DEQBlock takes no argument 'colour'"),
    (lambda: Anderson(lam=1e-4), TypeError, "did you mean 'ridge'?"),
    (lambda: Anderson(m=6), TypeError, "did you mean 'history_size'?"),
    (lambda: Anderson(beta=0.5), TypeError, "did you mean 'relaxation'?"),
    (lambda: Broyden(step=1), TypeError, "did you mean 'relaxation'?"),
    *[(partial(Broyden, **{name: 1e-3}), TypeError, "did you mean 'rtol'?") for name in ("f_tol", "tol")],
    (lambda: DEQBlock(halve, adjoint="ift"), ValueError, "got 'ift'; did you mean 'implicit'?"),
    (lambda: DEQBlock(halve, adjoint="phantom_grad"), ValueError, "did you mean 'phantom'?"),
    (lambda: DEQBlock(halve, "fixed_point_iter"), ValueError, "did you mean 'picard'?"),
    (lambda: solve(torch.cos, torch.ones(1, 1), "andersen"), ValueError, "mean 'anderson'?"),
    (lambda: DEQBlock(halve, adjoint="JFB"), ValueError, "did you mean 'jfb'?"),
    (lambda: DEQBlock(halve, Broyden), ValueError, "did you mean Broyden()?"),
    (lambda: DEQBlock(halve, kernel="tritn"), ValueError, "got 'tritn'; did you mean 'triton'?"),
    (lambda: DEQBlock(halve, kernel="cpu"), ValueError, "did you mean 'cpp'"),
    (lambda: DEQBlock(halve, kernel="gpu"), ValueError, "did you mean 'cuda'"),
    (lambda: DEQBlock(halve, compile="yes"), ValueError, "compile must be one of False, True, 'forward'"),
    (lambda: DEQBlock(halve, eval_solver="fast"), ValueError, "eval_solver must be"),
    (lambda: DEQBlock(halve, JFB()), ValueError, "got JFB()"),
    (lambda: DEQBlock(halve, callback=print), TypeError, "'callback'; did you mean 'stop_fn'?"),
    (lambda: ResidualCell(8, kernel="fast"), ValueError, "one of 'auto', "),
    (lambda: deqfast.NeuralCollapse(2, kernel="cublas"), ValueError, "one of 'auto', "),
    (lambda: deqfast.neural_collapse(Z0[:2], LABELS, kernel="cublas"), ValueError, "got 'cublas'"),
    (lambda: FCCell(3, 3, "tan"), ValueError, "got 'tan'; did you mean 'tanh'?"),
    (lambda: get_deq(f_slover="broyden"), TypeError, "did you mean 'f_solver'?"),
]
CALLS = [
    (lambda: DEQBlock(None), TypeError, "cell must be a module or another function"),
    (lambda: DEQBlock(FCCell), TypeError, "cell must be"),
    (lambda: DEQBlock(nn.Linear(3, 3)), TypeError, "cell must accept (z, x)"),
    (lambda: DEQBlock(lambda z: z), TypeError, "takes (z)"),
    (lambda: DEQBlock(lambda z, x, mask: z), TypeError, "several inputs go into x, as a tuple"),
    (lambda: DEQBlock(nn.Bilinear(8, 3, 8))(Z0), ValueError, "start, a tensor of torch.float32 (4, 3): "),
    (lambda: DEQBlock(FCCell(3, 3).to("meta"))(Z0), ValueError, "weight on meta"),
    (lambda: DEQBlock(FCCell(3, 3))(Z0.double()), ValueError, "give x the shape and dtype that the cell takes"),
    (lambda: DEQBlock(FCCell(3, 3))(Z0.numpy()), TypeError, "x must be a floating-point tensor, got ndarray"),
    (
        lambda: DEQBlock(halve)(Z0, Z0),
        TypeError,
        "argument, x, got 2: several inputs of a cell go into x, as a tuple, and",
    ),
    (lambda: diagnose(Z0, halve), TypeError, "got a tensor of torch.float32 (4, 3)"),
    (lambda: DEQBlock(halve, init=0.0), TypeError, "init must be callable, got 0.0"),
    (lambda: DEQBlock(LEARNED)(Z0), TypeError, "initial_state of the cell must be a method of x, got Parameter"),
    *[
        (partial(DEQBlock(halve), x), ValueError, "Pass x.float(), or z0 to the call, or init=... to DEQBlock")
        for x in (torch.zeros(2, dtype=torch.int64), (torch.ones(2), torch.ones(2)), None, 3.0)
    ],
    (lambda: DEQBlock(torch.add)(torch.ones(4, 3), z0=torch.ones(2, 3)), ValueError, "(2, 3) and (4, 3)"),
    (lambda: solve(3, Z0), TypeError, "f must be callable, got 3"),
    (started(3), TypeError, "z0 must hold floating-point or complex tensors only, got int"),
    (started(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "got torch.int64"),
    (started(()), ValueError, "z0 must hold at least one tensor, got an empty structure"),
    (started(torch.tensor(1.0)), ValueError, "z0 must have the batch as its first dimension"),
    (started(Z0.to_sparse()), TypeError, "z0 must be dense"),
    (lambda: DEQBlock(lambda z, x: z.to_sparse())(Z0), TypeError, "the value of f must be dense"),
    (started(torch.nested.nested_tensor([Z0, Z0[1:]], layout=torch.jagged)), TypeError, "got a nested tensor"),
    (started((Z0, Z0[1:])), ValueError, "(4, 3) on cpu, (3, 3) on"),
    (started(Z0.to("meta")), ValueError, "got tensors on the device meta"),
    (started(Z0.index_fill(0, torch.tensor([1, 3]), math.nan)), ValueError, "it is not in 2 of 4 samples: 1, 3"),
    (
        started((torch.zeros(20, 1), torch.full((20, 2), math.inf))),
        ValueError,
        "20 samples: 0, 1, 2, 3, 4, 5, 6, 7, ...",
    ),
    (
        started(torch.tensor([[0.0], [0], [0], [math.nan]]), groups=torch.tensor([0, 0, 1, 1])),
        ValueError,
        "2 samples: 1",
    ),
    (lambda: DEQBlock(halve).trajectory(Z0.to("meta"), [1]), ValueError, "got tensors on the device meta"),
    (lambda: find_fixed_points(torch.cos, Z0.to("meta")), ValueError, "starts must hold values"),
    (lambda: spectral_radius(halve, Z0.to("meta"), Z0.to("meta")), ValueError, "z must hold values"),
    (lambda: jacobian_penalty(halve, Z0.to("meta"), Z0.to("meta")), ValueError, "z must hold values"),
    (lambda: DEQBlock(halve, drop_converged="no"), ValueError, "drop_converged must be one of False, True, got 'no'"),
    (given(trace="off"), ValueError, "trace must be one of False, True, got 'off'"),
    (lambda: DEQBlock(halve).trajectory(Z0, 3), TypeError, "must be a list"),
    (lambda: DEQBlock(halve).trajectory(Z0, [0]), ValueError, "at least 1"),
    (lambda: DEQBlock(halve).trajectory(Z0, [1.5]), TypeError, "integer"),
    (lambda: DEQBlock(halve).trajectory(Z0, [61]), ValueError, "max_iter, 20"),
    (lambda: DEQBlock(halve).trajectory(Z0, [2, 2]), ValueError, "ascend"),
    (valued(torch.zeros(4, 2)), ValueError, "f must return the shape of its argument, (4, 3), got (4, 2)"),
    (valued(torch.zeros(3, 3)), ValueError, "(4, 3), got (3, 3)"),
    (valued((Z0,)), ValueError, "f must return a tensor of shape (4, 3), got tuple"),
    (lambda: solve(lambda z: {"b": z["a"]}, {"a": Z0}), ValueError, "and nothing else"),
    (valued(None), ValueError, "a tensor of shape (4, 3), got None"),
    (
        lambda: solve(lambda z: (Z0, Z0[:, :2]), (Z0, Z0[:, :1])),
        ValueError,
        "[(4, 3), (4, 1)], got [(4, 3), (4, 2)]",
    ),
    (lambda: solve(lambda z: z * 1j, Z0), TypeError, "f must return floating-point tensors"),
    (lambda: solve(lambda z: z.real, Z0 * 1j), TypeError, "f must return complex tensors"),
]
OPTIONS_OF_A_SOLVE = [
    (given(groups=[0, 1]), TypeError, "groups must be None, 'batch' or a tensor of integers, got [0, 1]"),
    (given(groups="whole"), TypeError, "got 'whole'"),
    (given(groups=torch.zeros(3)), TypeError, "got a tensor of torch.float32"),
    (given(groups=LABELS), ValueError, "groups must have shape (3,) on cpu"),
    (given(groups=torch.tensor([0, -1, 0])), ValueError, "from 0 to below its length 3, got -1"),
    (given(groups=torch.tensor([0, 3, 0])), ValueError, "got 3"),
    (given(groups=Groups(torch.zeros(7, dtype=torch.int64))), ValueError, "groups of 7 rows on cpu"),
    (given(groups=Groups("batch", 7)), ValueError, "groups of 7 rows on cpu cannot serve a z0 of 3 rows"),
    (started((Z0, Z0), scale=(1.0,)), ValueError, "scale must hold a number for every tensor of z0"),
    (given(scale=0), ValueError, "scale must be finite and at least"),
    (given(scale=torch.ones(())), TypeError, "scale must be a number, got tensor"),
    *[
        (ruled(mask), ValueError, "stop_fn must return a mask (3,) torch.bool on cpu, got")
        for mask in (None, True, torch.tensor([True]), torch.ones(3), torch.zeros(3).bool().to("meta"))
    ],
    (mixed(lambda z, fz: fz - z), TypeError, "must return a tuple (error, proposal), got Tensor"),
    (mixed(lambda z, fz: (None, fz)), ValueError, "error must be a floating-point or complex tensor"),
    (mixed(lambda z, fz: (fz.sum(0), fz)), ValueError, "numbers in each of its 3 rows, on cpu"),
    (mixed(lambda z, fz: (fz[:, :0], fz)), ValueError, "got torch.float32 (3, 0) on cpu"),
    (mixed(lambda z, fz: (fz.to("meta"), fz)), ValueError, "(3, 2) on meta"),
    (mixed(lambda z, fz: (fz.to_sparse(), fz)), TypeError, "mixing_fn's error must be dense"),
    (mixed(lambda z, fz: (fz[:, : 2 if z.any() else 1], fz)), ValueError, "keep its 1 numbers per sample, got 2"),
    (mixed(lambda z, fz: (fz - z, fz[:, :1])), ValueError, "mixing_fn's proposal"),
    (mixed(lambda z, fz: (fz[:, :1] - z[:, :1], fz[:, :1])), ValueError, "mixing_fn's proposal"),
    (mixed(lambda z, fz: (fz.sub_(z), z)), ValueError, "must not modify its arguments"),
    (lambda: MixedAnderson(mixing_fn=3), TypeError, "mixing_fn must be callable, got 3"),
    (lambda: MixedAnderson(history_size=0, mixing_fn=halve), ValueError, "history_size must be at least 1, got 0"),
    (lambda: MixedAnderson(relaxation=-1, mixing_fn=halve), ValueError, "relaxation must be finite"),
    (lambda: MixedAnderson(ridge=-1, mixing_fn=halve), ValueError, "ridge must be finite"),
    (lambda: Implicit(MixedAnderson(mixing_fn=halve)), ValueError, "must not be MixedAnderson"),
    (lambda: mark_samples([Z0, Z0], 4, [True]), ValueError, "per_sample must hold True or False in the structure of x"),
    (lambda: mark_samples([Z0, Z0], 4, [True, 1]), ValueError, "per_sample must hold True or False"),
    (lambda: mark_samples([Z0, Z0[1:]], 4, [True, True]), ValueError, "must have 4 rows, as z0 has, got (3, 3)"),
    (given(causal=True, solver=OwnSolver()), ValueError, "causal serves Picard, Anderson and Broyden"),
    (given(causal=1.5), ValueError, "causal must be one of False, True"),
    (started(torch.zeros(2), causal=True), ValueError, "positions of a sequence as dimension 1 of each tensor of z0"),
    (started(torch.zeros(2, 0, 3), causal=True), ValueError, "causal needs the positions of a sequence"),
    (started((Z0, Z0[:, :2]), causal=True), ValueError, "causal needs the positions of a sequence"),
    (started(torch.tensor([[0.0], [math.nan]]), causal=True), ValueError, "it is not in 1 of 2 samples: 1"),
]
SOLVERS_AND_ADJOINTS = [
    *[
        (partial(solver, **{name: value}), (ValueError, TypeError), f"{name} must be ")
        for solver, name, values in (
            (Picard, "rtol", [-1e-3, 1, 40, math.nan, math.inf, "small", True, None]),
            (Picard, "max_iter", [0, -3, 2.0, True]),
            (Picard, "atol", [-1e-9]),
            (Anderson, "atol", [1e18]),
            (Picard, "norm", [2, "l1"]),
            (Anderson, "history_size", [0, 2.5]),
            (Broyden, "history_size", [-1]),
            (Anderson, "history_dtype", [torch.float16, "bfloat16"]),
            (Broyden, "history_dtype", [torch.float16]),
            (Picard, "relaxation", [0.0, 2.5, math.nan]),
            (Anderson, "relaxation", [0.0]),
            (Broyden, "relaxation", ["1", None, [1]]),
            (Anderson, "ridge", [-1e-9, 1.5, None]),
            (Anderson, "kind", ["III", 2]),
            (Broyden, "kind", ["best"]),
        )
        for value in values
    ],
    *[(partial(solver, 0.0), ValueError, "rtol and atol must not both be 0") for solver in (Picard, Anderson, Broyden)],
    (lambda: Phantom(steps=0), ValueError, "steps must be at least 1, got 0"),
    (lambda: Phantom(steps=2.0), TypeError, "steps must be an integer, got 2.0"),
    (
        lambda: Phantom(relaxation=0.0),
        ValueError,
        "relaxation must be finite and greater than 0 and at most 1, got 0.0",
    ),
    (lambda: Unrolled(steps=0), ValueError, "steps must be at least 1, got 0"),
    (lambda: Unrolled(checkpoint=2), ValueError, "checkpoint must be one of False, True, got 2"),
    (lambda: Neumann(steps=0), ValueError, "steps must be at least 1, got 0"),
    (lambda: Reversible(relaxation=1.0), ValueError, "greater than 0 and at most 0.99, got 1.0"),
    (lambda: Implicit("gmres"), ValueError, "got 'gmres'"),
    (lambda: Implicit(Broyden(rtol=0, atol=1e-3)), ValueError, "must have a positive rtol and atol=0, got Broyden"),
    (lambda: as_adjoint(JFB), ValueError, "adjoint must be a deqfast adjoint"),
    (lambda: SHINE(fallback=0.9), ValueError, "fallback must be"),
    (lambda: SHINE(fallback="2"), TypeError, "fallback must be"),
    (lambda: SHINE(fallback=math.nan), ValueError, "fallback must be"),
    (partial(DEQBlock(LinearCell(3), "picard", "shine"), Z0), ValueError, "SHINE needs the history of"),
]
CELLS_AND_FUNCTIONS = [
    (lambda: LinearCell(0), ValueError, "features must be at least 1, got 0"),
    (lambda: LinearCell(2.0), TypeError, "features must be an integer, got 2.0"),
    (lambda: FCCell(0, 3), ValueError, "in_features must be at least 1, got 0"),
    (lambda: FCCell(3, "8"), TypeError, "features must be an integer, got '8'"),
    (lambda: ResidualCell(0), ValueError, "channels must be at least 1, got 0"),
    (lambda: ResidualCell(8, groups=0), ValueError, "groups must be at least 1, got 0"),
    (lambda: ResidualCell(8, groups=3), ValueError, "groups must divide channels (8), got 3"),
    (lambda: MonotoneCell(3, 0), ValueError, "features must be at least 1, got 0"),
    (lambda: MonotoneCell(2.0, 4), TypeError, "in_features must be an integer, got 2.0"),
    (lambda: MonotoneCell(3, 4, "douglas"), ValueError, "one of 'peaceman-rachford', 'forward-back"),
    (lambda: MonotoneCell(3, 4, activation="tanh"), ValueError, "must be one of 'relu', 'identity', got 'tanh'"),
    (lambda: MonotoneCell(3, 4, margin=0), ValueError, "margin must be finite and greater than 0, got 0"),
    (lambda: MonotoneCell(3, 4, alpha=-1.0), ValueError, "alpha must be finite and greater than 0, got -1.0"),
    (lambda: SubhomogeneousCell(3, True), TypeError, "features must be an integer, got True"),
    (lambda: SubhomogeneousCell(3, 4, 2), ValueError, "kernel_size must be odd, got 2"),
    (lambda: SubhomogeneousCell(3, 4, (3, 3)), TypeError, "kernel_size must be an integer, got"),
    (lambda: SubhomogeneousCell(3, 4, degree=0), ValueError, "degree must be finite and greater than 0, got 0"),
    (lambda: SubhomogeneousCell(3, 4, degree=1.0), ValueError, "degree must be less than 1, got 1.0"),
    (applied(LinearCell(4), (2, 4), (2, 5)), ValueError, "x must have shape (B, 4), got (2, 5)"),
    (applied(FCCell(3, 4), (2, 4), (2, 4)), ValueError, "x must have shape (B, 3), got (2, 4)"),
    (applied(ResidualCell(8), (2, 8, 4, 4), (2, 4, 4, 4)), ValueError, "(B, 8, H, W), got (2, 4, 4, 4)"),
    (applied(ResidualCell(8), (2, 8, 4, 4), (2, 8, 4)), ValueError, "(B, 8, H, W), got (2, 8, 4)"),
    (applied(MonotoneCell(3, 4), (2, 4), (2, 4)), ValueError, "x must have shape (B, 3), got (2, 4)"),
    (applied(MonotoneCell(3, 4, "forward-backward"), (2, 4), (2, 4)), ValueError, "x must have shape (B, 3)"),
    (applied(SubhomogeneousCell(3, 4), (2, 4), (2, 4)), ValueError, "x must have shape (B, 3), got (2, 4)"),
    (applied(SubhomogeneousCell(3, 4, 3), (2, 4, 5, 5), (2, 3)), ValueError, "(B, 3, H, W), got (2, 3)"),
    (lambda: SolveDropout(-0.1), ValueError, "p must be finite and at least 0 and at most 1, got -0.1"),
    (lambda: SolveDropout(1.5), ValueError, "at most 1, got 1.5"),
    (lambda: SolveDropout(dims=(-1,)), ValueError, "dims must be at least 0, got -1"),
    (lambda: SolveDropout(dims=(2,))(Z0), ValueError, "dims must be dimensions of the input, which has 2, got (2,)"),
    (lambda: SolveDropout(dims=(1.0,)), TypeError, "dims must be an integer, got 1.0"),
    (lambda: root(torch.cos, Z0, sign=2), ValueError, "sign must be 1, -1 or None, got 2"),
    *[(partial(root, lambda z: z[:, :1], Z0, sign=sign), ValueError, "(4, 3), got (4, 1)") for sign in (None, 1)],
    (lambda: spectral_radius(halve, Z0, Z0, iterations=1), ValueError, "iterations must be at least 2, got 1"),
    (lambda: jacobian_penalty(halve, Z0, Z0, probes=0), ValueError, "probes must be at least 1, got 0"),
    (lambda: find_fixed_points(torch.cos, Z0, distance=0.0), ValueError, "distance must be finite and greater than 0"),
    (lambda: find_fixed_points(torch.cos, Z0.long()), TypeError, "starts must be a float32 or float64 tensor"),
    (lambda: find_fixed_points(torch.cos, Z0.bfloat16()), TypeError, "got a tensor of torch.bfloat16 (4, 3)"),
    (lambda: find_fixed_points(torch.cos, torch.tensor(1.0)), TypeError, "got a tensor of torch.float32 ()"),
    (lambda: find_fixed_points(torch.cos, [[1.0]]), TypeError, "got [[1.0]]"),
    (lambda: find_fixed_points(torch.cos, Z0 * math.nan), ValueError, "z0 must be finite"),
    (lambda: find_fixed_points(torch.cos, Z0, solver="newton"), ValueError, "solver must be"),
]
CARRIES = [
    (carried("broyden"), TypeError, "init must be a DEQBlock or a function of the data, got 'broyden'"),
    (carried(batches=Z0), TypeError, "batches must be an iterable of batches, got Tensor"),
    (carried(size=0), ValueError, "size must be at least 1, got 0"),
    (carried(batches=[]), ValueError, "batches must have at least one sample, got none"),
    (carried(batches=[("a", LABELS)]), TypeError, "batches must hold tensors"),
    (carried(batches=[(Z0, LABELS)]), ValueError, "equally many rows"),
    (carried(batches=[(Z0[:1],), (Z0[:1, :2],)]), ValueError, "batches must have rows of"),
    (carried(lambda data: data[0][:1]), ValueError, "the states of init must have 4 rows"),
    (carried(nn.DataParallel(DEQBlock(halve))), TypeError, "DEQBlock itself, got it within a DataParallel"),
    (carried(z=(Z0,)), TypeError, "z must have the structure"),
    (carried(z=Z0[:3]), ValueError, "z must have 4 rows"),
    (carried(z=Z0.double()), ValueError, "z must have rows of"),
    (carried(done=torch.zeros(4).int()), ValueError, "done must be a mask (4,) torch.bool, got (4,) torch.int32"),
    (carried(done=True), ValueError, "done must be a mask"),
]
MISTAKES = [*CARRIES, *NAMES, *CALLS, *OPTIONS_OF_A_SOLVE, *SOLVERS_AND_ADJOINTS, *CELLS_AND_FUNCTIONS]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_a_wrong_argument(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_cells_that_take_more_hide_what_they_take_or_are_wrapped():
    @functools.wraps(torch.tanh)
    def injected(z, x):
        return torch.tanh(z) + x

    class Called(nn.Module):
        def __call__(self, z, x):
            return halve(z, x)

    cells = halve, lambda *both: halve(*both), lambda z, x, more=None: halve(z, x), torch.add, nn.Bilinear(3, 3, 3)
    for cell in (*cells, injected, Called()):
        assert DEQBlock(cell).cell is cell


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RecursionError("itself"), RuntimeError("no")])
def test_other_errors_keep_their_type_when_batches_differ(error):
    def failing(z, x):
        raise error

    with pytest.raises(type(error), match=str(error)):
        DEQBlock(failing, warn=False)(torch.ones(1, 3), z0=torch.ones(2, 3))


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom", "reversible", "unrolled"])
def test_every_adjoint_checks_the_start_and_the_value(adjoint):
    for cell, x, z0, message in (
        (lambda z, x: x[:, :2], torch.ones(2, 3), None, r"f must return the shape of its argument, \(2, 3\), got"),
        (
            halve,
            torch.ones(2, 1),
            torch.tensor([[0.0], [torch.nan]]),
            "z0 must be finite; it is not in 1 of 2 samples: 1",
        ),
        (halve, torch.ones(2, 1), {}, "z0 must hold at least one tensor, got an empty structure"),
    ):
        with pytest.raises(ValueError, match=message):
            DEQBlock(cell, adjoint=adjoint)(x, z0=z0)


OPTIONS = {
    "drop_converged": {"drop_converged": True},
    "trace": {"trace": True},
    "trace of a Solution": {"trace": True},
    "stop_fn": {"stop_fn": lambda z, value, k: torch.zeros(len(z), dtype=torch.bool)},
    "scale": {"scale": 2.0},
    "cuda_graph": {"cuda_graph": True},
    "compile": {"compile": True},
    "Auto": {"solver": "auto"},
    "MixedAnderson": {"solver": MixedAnderson(mixing_fn=lambda z, fz: (fz - z, fz))},
    "SHINE": {"adjoint": "shine"},
    "Unrolled": {"adjoint": "unrolled"},
    "Reversible": {"adjoint": "reversible"},
    "lockstep": {"lockstep": Ranks(())},
    "state_group": {"state_group": Ranks(())},
    "causal": {"causal": True},
}
WAYS = {
    "torch.func": lambda call, x: torch.func.vmap(call)(x[:, None]),
    "torch.export": lambda call, x: torch.export.export(Model(call), (x,)),
    "torch.compile": lambda call, x: torch.compile(Model(call), backend="eager", fullgraph=True)(x),
    "a gradient of torch.func": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
}


class Prepared(Cell):
    def begin_solve(self):
        pass


class Model(nn.Module):
    """A model that makes this call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("way", "option"), [(name_of(way), name_of(option)) for way in REFUSED for option in REFUSED[way]]
)
def test_what_does_not_go_together(way, option):
    """Each entry of the table is an error that names both, with the reason."""

    def run():
        cell = Prepared() if option == "begin_solve" else Cell()
        block, x = DEQBlock(cell, **OPTIONS.get(way, {}) | OPTIONS.get(option, {})), torch.ones(2, 3)
        block.train(option == "training mode")

        def call(x):
            if way == "trajectory":
                return block.trajectory(x, [1])
            if option in ("groups", "groups of a call"):
                return block(x, groups="batch")
            return block(x, return_solution=True)[0]

        # A context may be the option as well as the way.
        inner = partial(WAYS[option], call) if option in WAYS else call
        return WAYS[way](inner, x) if way in WAYS else inner(x)

    # In a trace the error is dynamo's own.
    with pytest.raises(Exception, match=f"{way} cannot be combined with {option}( of .*)?: ") as caught:
        run()
    assert way.startswith("torch.") or type(caught.value) is ValueError


@pytest.mark.parametrize("option", ["drop_converged", "stop_fn", "lockstep", "state_group", "causal"])
def test_what_the_capture_of_somebody_else_refuses(option):
    z0 = torch.zeros(2, 3)
    call = Solve(z0, Options(solver=Picard(), **OPTIONS[option]))
    with pytest.raises(ValueError, match=f"a CUDA graph cannot be combined with {option}: "):
        call.device_loop(halve, call.begin(z0), "a CUDA graph")


def test_options_that_are_zero_are_not_given():
    block = DEQBlock(Cell(), drop_converged=0, trace=1, cuda_graph=0, compile=0)
    assert block.drop_converged is False and block.trace is True
    assert solve(torch.cos, torch.ones(2, 3), drop_converged=0, trace=1).trace is not None


def test_the_table_is_whole():
    """An entry that is dropped would be served silently, and takes its test with it."""
    assert [len(options) for options in REFUSED.values()] == [10, 9, 1, 1, 7, 8, 7, 7, 6, 9, 8, 2]


def test_a_compiled_backward_solve_refuses_what_the_forward_solve_does():
    adjoint, block = Implicit("auto"), DEQBlock(Cell(), compile=True)
    for wrong in (lambda: DEQBlock(Cell(), adjoint=adjoint, compile=True), lambda: setattr(block, "adjoint", adjoint)):
        with pytest.raises(ValueError, match="Auto of the adjoint's solver, Auto.*: its stages depend on values"):
            wrong()
    DEQBlock(Cell(), adjoint=adjoint, compile="forward")  # its backward solve is the ordinary loop


def test_refusals_go_by_type_not_by_name():
    block = DEQBlock(Cell(), type("Auto", (OwnSolver,), {})(max_iter=5), warn=False)
    assert len(block.trajectory(torch.ones(2, 3), [1])) == 2


@pytest.mark.parametrize("solvers", [{"solver": OwnSolver()}, {"eval_solver": OwnSolver()}])
def test_compiled_code_and_exports_refuse_a_step_in_python(solvers):
    message = "serves Picard, Anderson and Broyden, whose steps are ops, got OwnSolver"
    with pytest.raises(ValueError, match=f"compile=True {message}"):
        DEQBlock(Cell(), compile=True, **solvers)
    with pytest.raises(ValueError, match=f"torch.export {message}"):
        torch.export.export(Model(DEQBlock(Cell(), **solvers).eval()), (torch.ones(2, 3),))
