"""Properties of every solve, for any shapes, dtypes, memory, solver, kernel, gradient, and other samples."""

from __future__ import annotations

import torch
from correctness import after_solve, assert_close, bounds, lost, rounding
from hypothesis import example, given
from hypothesis import strategies as st
from op_calls import examples
from torch.utils import _pytree as pytree

import deqfast
from deqfast import Anderson, Broyden, Groups, Picard, Status, solve

KERNELS = [name for name in ("cpp", "torch") if deqfast.backends()[name]]
SOLVED = ("status", "iterations", "residual", "residual_rel", "residual_abs")

kernels = st.sampled_from(KERNELS)
seeds = st.integers(0, 2**16)
dtypes = st.sampled_from([torch.float32, torch.float64])
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3)
layouts = st.sampled_from(["contiguous", "transposed", "strided", "expanded", "offset"])


@st.composite
def solvers(draw, tols=(1e-2, 1e-4), budgets=(3, 30)):
    """A solver of any kind, with few or enough evaluations."""
    common = bounds(draw(st.sampled_from(tols)), draw(st.booleans())) | {"max_iter": draw(st.sampled_from(budgets))}
    kind = draw(st.sampled_from([Picard, Anderson, Broyden]))
    if kind is Picard:
        return Picard(relaxation=draw(st.sampled_from([0.7, 1.0])), **common)
    history = draw(st.sampled_from([None, 1, 4]))
    kinds = ["I", "II"] if kind is Anderson else ["good", "bad"]
    return kind(history_size=history, kind=draw(st.sampled_from(kinds)), **common)


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def laid_out(tensor, layout):
    """The same values in other memory, with the batch as they were."""
    if layout == "transposed" and tensor.dim() > 2:
        return tensor.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "strided":
        wide = tensor.new_full((2 * len(tensor), *tensor.shape[1:]), torch.nan)
        wide[::2] = tensor
        return wide[::2]
    if layout == "offset":
        flat = torch.cat([tensor.new_full((3,), torch.nan), tensor.reshape(-1)])
        return flat[3:].view(tensor.shape)
    return tensor.contiguous()


class Map:
    """Contraction that treats every element by itself: z -> tanh(slope z) + shift, the slopes below 0.9."""

    def __init__(self, seed, batch, shape, dtype):
        self.slope = 0.9 * random(seed, batch, *shape).tanh().to(dtype)
        self.shift = random(seed + 1, batch, *shape, dtype=dtype)

    def of(self, rows):
        part = object.__new__(Map)
        part.slope, part.shift = self.slope[rows], self.shift[rows]
        return part

    def __call__(self, z):
        return torch.tanh(self.slope * z) + self.shift


def same(a, b, rows_a=slice(None), rows_b=slice(None)):
    """Whether two solutions are bit by bit the same in these samples."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in SOLVED]
    pairs += zip(pytree.tree_leaves(a.value), pytree.tree_leaves(b.value), strict=True)
    return all(torch.equal(x[rows_a], y[rows_b]) for x, y in pairs)


@examples
@given(seeds, st.integers(2, 6), shapes, dtypes, solvers(), kernels, st.data())
def test_a_sample_knows_nothing_of_its_batch(seed, batch, shape, dtype, solver, kernel, data):
    """By itself, among others in another order, and among others that break down, it has the same bits."""
    f, z0 = Map(seed, batch, shape, dtype), random(seed + 2, batch, *shape, dtype=dtype)
    together = solve(f, z0, solver, kernel)
    row = data.draw(st.integers(0, batch - 1))
    assert same(solve(f.of([row]), z0[[row]], solver, kernel), together, [0], [row])
    order = data.draw(st.permutations(range(batch)))
    assert same(solve(f.of(order), z0[order], solver, kernel), together, slice(None), order)
    f.shift[row] = data.draw(st.sampled_from([torch.nan, torch.inf]))
    poisoned, others = solve(f, z0, solver, kernel), [other for other in range(batch) if other != row]
    assert same(poisoned, together, others, others)
    assert poisoned.status[row] == Status.NONFINITE and torch.equal(poisoned.value[row], z0[row])


@examples
@given(seeds, st.integers(0, 4), shapes, dtypes, solvers(), kernels, layouts)
def test_memory_of_the_start_means_nothing(seed, batch, shape, dtype, solver, kernel, layout):
    """Nor is it written to. In another order of the elements sums round otherwise, and only then."""
    f, z0 = Map(seed, batch, shape, dtype), random(seed + 2, batch, *shape, dtype=dtype)
    if layout == "expanded":
        z0 = z0[:1].clone() if batch else z0
        given = z0.expand(batch, *shape)
        z0 = given.contiguous()
    else:
        given = laid_out(z0, layout)
    before = given.clone()
    first, other = solve(f, z0, solver, kernel), solve(f, given, solver, kernel)
    assert torch.equal(given, before)
    if layout == "transposed":
        both = first.converged & other.converged
        scale = 1 + first.value.abs().amax() if first.value.numel() else 1
        assert ((first.value - other.value)[both].abs() <= after_solve(solver.tol) * scale).all()
    else:
        assert same(first, other)


@examples
@given(seeds, st.integers(1, 5), shapes, dtypes, solvers(), kernels)
def test_what_a_solution_says_is_so(seed, batch, shape, dtype, solver, kernel):
    """By the residual at its value, computed again in float64."""
    f = Map(seed, batch, shape, dtype)
    solution = solve(f, torch.zeros(batch, *shape, dtype=dtype), solver, kernel)
    f.slope, f.shift = f.slope.double(), f.shift.double()
    z = solution.value.double()
    size = f(z).reshape(batch, -1).norm(dim=1)
    gap = (f(z) - z).reshape(batch, -1).norm(dim=1)
    rounded = rounding(dtype, 8) * (1 + size)  # a product, tanh, a sum and a difference
    allowed = solver.tol * (1 if solver.is_absolute else size) + rounded
    assert (gap <= allowed)[solution.converged].all()
    assert ((gap - solution.residual_abs).abs() <= rounded + rounding(dtype) * gap).all()
    assert set(solution.status.tolist()) <= {Status.CONVERGED, Status.MAX_ITER}
    assert (solution.iterations <= solution.evaluations).all() and solution.evaluations <= solver.max_iter
    assert (solution.converged | (solution.iterations == solver.max_iter)).all()


@examples
@given(seeds, st.integers(1, 5), st.lists(shapes, min_size=2, max_size=3), solvers(), kernels)
def test_a_tree_is_solved_as_its_leaves_side_by_side(seed, batch, kinds, solver, kernel):
    maps = [Map(seed + 3 * i, batch, shape, torch.float64) for i, shape in enumerate(kinds)]
    z0 = {"first": torch.zeros_like(maps[0].shift), "rest": [torch.zeros_like(m.shift) for m in maps[1:]]}

    def on_tree(z):
        return {"rest": [m(part) for m, part in zip(maps[1:], z["rest"], strict=True)], "first": maps[0](z["first"])}

    flat = object.__new__(Map)
    flat.slope = torch.cat([m.slope.reshape(batch, -1) for m in maps], dim=1)
    flat.shift = torch.cat([m.shift.reshape(batch, -1) for m in maps], dim=1)
    tree, joint = solve(on_tree, z0, solver, kernel), solve(flat, torch.zeros_like(flat.shift), solver, kernel)
    joined = torch.cat([leaf.reshape(batch, -1) for leaf in pytree.tree_leaves(tree.value)], dim=1)
    assert all(torch.equal(getattr(tree, name), getattr(joint, name)) for name in SOLVED)
    assert torch.equal(joined, joint.value)


@examples
@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 4), solvers(), kernels)
@example(0, [1, 0, 1, 0], 2, Broyden(1e-4, 30), KERNELS[0])  # equally long, but not in order
def test_groups(seed, numbers, width, solver, kernel):
    """Groups of a row each change nothing; others are solved as their rows side by side are, in any order."""
    index, rows = torch.tensor(numbers), len(numbers)
    f, z0 = Map(seed, rows, [width], torch.float64), torch.zeros(rows, width, dtype=torch.float64)
    assert same(solve(f, z0, solver, kernel), solve(f, z0, solver, kernel, groups=torch.arange(rows)))
    if int(index.max()) >= rows:
        index = index % rows
    grouped = solve(f, z0, solver, kernel, groups=Groups(index))
    for number in range(int(index.max()) + 1):
        own = (index == number).nonzero().flatten()
        single = solve(f.of(own), z0[own], solver, kernel, groups="batch")
        if len(own):
            assert torch.equal(single.status[0], grouped.status[number])
            assert torch.equal(single.iterations[0], grouped.iterations[number])
            assert_close(single.value, grouped.value[own], after_solve(lost(torch.float64, solver.tol)))
