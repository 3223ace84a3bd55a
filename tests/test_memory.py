"""The memory of histories: kept between solves on the CPU, never shared by two that live."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from solutions import on_cpu, solve_with_inverse

import deqfast
from deqfast.engine.loop import LateWatch
from deqfast.ops import choose_kernel, empty_history, memory, release_memory

CPU = torch.device("cpu")
SHAPE = (4, 20, 8192)  # 2.6 MB


@pytest.fixture(autouse=True)
def nothing_kept(poisoned_memory, monkeypatch):
    monkeypatch.setattr(memory, "SMALLEST", 1 << 20)
    release_memory()
    yield
    release_memory()


def history(shape=SHAPE, dtype=torch.float32):
    return empty_history(shape, dtype, CPU)


def test_memory_is_kept_for_the_next_history_that_fills_most_of_it():
    address = history().data_ptr()
    assert history().data_ptr() == address
    assert history((4, 20, 8192), torch.bfloat16).data_ptr() != address  # half as large
    assert history((4, 15, 8192)).data_ptr() == address


def test_what_is_given_back():
    """A block that nobody wants any more, and on release what is free."""
    history((4, 60, 8192))
    for _ in range(memory.PATIENCE):
        history()
    assert [block.memory.nbytes for block in memory._blocks.kept] == [torch.Size(SHAPE).numel() * 4]
    held = history().fill_(3)
    history()
    release_memory()
    assert [block.is_free for block in memory._blocks.kept] == [False] and bool((held == 3).all())


def test_every_thread_keeps_its_own():
    address = history().data_ptr()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: history().data_ptr()).result() != address


@on_cpu
@pytest.mark.parametrize(
    "solver", [deqfast.Broyden(1e-5, 40, history_size=40), deqfast.Anderson(1e-5, 40, history_size=20)]
)
def test_solves_give_the_same_bits_in_memory_that_was_used(solver, kernel):
    scale = torch.linspace(-0.9, 0.9, 8192)

    def f(z):
        return scale * z + 1

    first = deqfast.solve(f, torch.zeros(4, 8192), solver, kernel)
    assert memory._blocks.kept
    for block in memory._blocks.kept:
        block.memory.fill_(255)  # NaN in every dtype
    again = deqfast.solve(f, torch.zeros(4, 8192), solver, kernel)
    assert torch.equal(first.value, again.value) and torch.equal(first.iterations, again.iterations)
    assert all(block.is_free for block in memory._blocks.kept)


def test_another_default_device(monkeypatch):
    """Neither a solve under it nor one after it takes memory there."""
    monkeypatch.undo()  # torch.device knows torch's own functions only
    torch.utils._device._device_constructors.cache_clear()
    for kernel in ("auto", "torch"):
        release_memory()
        expected = deqfast.solve(torch.cos, torch.zeros(64, 4096), "anderson", kernel)
        release_memory()
        with torch.device("meta"):
            solutions = [deqfast.solve(torch.cos, torch.zeros(64, 4096, device="cpu"), "anderson", kernel)]
            assert LateWatch(torch.ones(1, device="cpu")).pinned.device == CPU
        solutions += [deqfast.solve(torch.cos, torch.zeros(64, 4096), "anderson", kernel)]
        assert expected.converged.all() and all(torch.equal(each.value, expected.value) for each in solutions)


@pytest.mark.parametrize("solver", [deqfast.Broyden(max_iter=400), deqfast.Anderson(max_iter=400, history_size=400)])
def test_products_of_pairs_lie_in_ordinary_pages(solver):
    """Large ones would be filled with zeros for all of them, of which a short solve touches few."""
    state = solver.init(torch.zeros(50, 8), choose_kernel("torch", CPU))
    kept = {block.memory.untyped_storage().data_ptr() for block in memory._blocks.kept}
    assert state.gram.nbytes > memory.SMALLEST and state.gram.untyped_storage().data_ptr() not in kept


def test_a_kept_inverse_keeps_its_history():
    scale = torch.linspace(-0.9, 0.9, 8192)

    def solve():
        return solve_with_inverse(lambda z: scale * z + 1, torch.zeros(4, 8192), deqfast.Anderson(), "torch")[1]

    first, v = solve(), torch.ones(4, 8192)
    before = first(v)
    solve()
    assert torch.equal(first(v), before)
