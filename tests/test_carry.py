"""The carry: finished samples make room for new ones, and nothing else changes."""

import copy
from itertools import chain, repeat

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from deqfast import Carry, DEQBlock, Picard, Status


def numbered(count, size=4):
    """Batches of (x, number), x random (size, 3)."""
    x, number = torch.randn(count, 3), torch.arange(count)
    return [(x[at : at + size], number[at : at + size]) for at in range(0, count, size)]


def halves(z, x):
    return 0.5 * torch.tanh(z) + x


def block(**options):
    return DEQBlock(halves, Picard(1e-3, 3, **options), warn=False)


def test_finished_samples_are_replaced_in_place_and_the_others_keep_state_and_age():
    batches = numbered(8)
    carry = Carry(lambda data: 10.0 + data[0], batches, size=5)
    before, x = carry.data, torch.cat([x for x, _ in batches])
    assert carry.data[1].tolist() == [0, 1, 2, 3, 4] and carry.taken == 5 and torch.equal(carry.z, 10 + x[:5])
    z = torch.randn(5, 3, requires_grad=True)
    carry.advance(2 * z, torch.tensor([False, True, False, True, False]))
    assert carry.data[1].tolist() == [0, 5, 2, 6, 4] and carry.age.tolist() == [1, 0, 1, 0, 1]
    assert torch.equal(carry.data[0], x[carry.data[1]]) and not carry.z.requires_grad
    assert torch.equal(carry.z[[0, 2, 4]], 2 * z[[0, 2, 4]]) and torch.equal(carry.z[[1, 3]], 10 + x[5:7])
    assert before[1].tolist() == [0, 1, 2, 3, 4]  # a backward pass may still need it
    carry.advance(z + 1, torch.zeros(5, dtype=torch.bool))
    assert carry.age.tolist() == [2, 1, 2, 1, 2] and carry.taken == 7 and not carry.z.requires_grad


def test_at_the_end_finished_samples_leave():
    carry = Carry(lambda data: data[0], numbered(7), size=5)
    carry.advance(carry.z, torch.ones(5, dtype=torch.bool))
    assert carry.data[1].tolist() == [5, 6] and carry.age.tolist() == [0, 0]
    carry.advance(carry.z + 1, torch.tensor([True, False]))
    assert carry.data[1].tolist() == [6] and carry.age.tolist() == [1] and torch.equal(carry.z, carry.data[0] + 1)
    carry.advance(carry.z, torch.ones(1, dtype=torch.bool))
    assert len(carry) == 0 and carry.z.shape == (0, 3) and carry.taken == 7


def test_every_sample_is_solved_as_in_one_long_solve():
    """Plain iteration continued from the carry makes the same iterates; so is the number of evaluations."""
    batches = numbered(30)
    x = torch.cat([x for x, _ in batches])
    solved, loop = torch.full((30, 3), torch.nan), block()
    whole = DEQBlock(halves, Picard(1e-3, 100))(x, return_solution=True)[1]
    carry, ages = Carry(loop, batches, size=8), torch.zeros(30, dtype=torch.int64)
    with torch.no_grad():
        while len(carry):
            x, number = carry.data
            z, solution = loop(x, carry.z, return_solution=True)
            done = solution.status != Status.MAX_ITER
            solved[number[done]], ages[number[done]] = z[done], 3 * carry.age[done] + solution.iterations[done]
            carry.advance(z, done)
    # The best iterate of a step that does not converge is its last one, which the next step evaluates again.
    assert (ages >= whole.iterations).all() and ages.max() <= 3 * whole.iterations.max()
    gap = (halves(solved, torch.cat([x for x, _ in batches])) - solved).norm(dim=1)
    assert (gap <= 1e-3 * (solved.norm(dim=1) + gap)).all()


def test_broken_samples_are_replaced():
    (x, number), *rest = numbered(12)
    x[1] = torch.nan
    loop = block()
    carry = Carry(loop, [(x, number), *rest], size=4)
    z, solution = loop(carry.data[0], carry.z, return_solution=True)
    assert solution.status[1] == Status.NONFINITE and z.isfinite().all()
    carry.advance(z, solution.status != Status.MAX_ITER)
    assert 1 not in carry.data[1] and carry.data[0].isfinite().all()
    carry.advance(torch.where(carry.data[1][:, None] == 2, torch.nan, carry.z), torch.zeros(4, dtype=torch.bool))
    assert 2 not in carry.data[1] and carry.z.isfinite().all()


def test_one_operation_waits_for_the_device():
    """Of those whose result the host reads: the number of finished samples."""

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
                found.append(func)
            return func(*args, **(kwargs or {}))

    for rows in ([], [1, 3]):
        found, carry = [], Carry(lambda data: data[0], numbered(12), size=5)
        with Reads():
            carry.advance(carry.z, torch.zeros(5, dtype=torch.bool).index_fill(0, torch.tensor(rows).long(), True))
        assert found == [torch.ops.aten.nonzero.default] and carry.taken == 5 + len(rows)


def test_trees_loaders_and_epochs():
    loader = DataLoader(TensorDataset(torch.randn(6, 2), torch.arange(6)), batch_size=4)
    batches = ({"clues": x, "target": {"y": y}} for x, y in chain.from_iterable(repeat(loader)))
    carry = Carry(lambda data: (data["clues"].double(), data["target"]["y"].float()), batches, size=4, device="cpu")
    for _ in range(5):
        carry.advance(carry.z, torch.ones(4, dtype=torch.bool))
    assert carry.taken == 24 and carry.data["target"]["y"].tolist() == [2, 3, 4, 5]
    assert [leaf.dtype for leaf in carry.z] == [torch.float64, torch.float32]


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    batches = iter(numbered(40, 7))
    carry = Carry(block(), batches, size=4)
    carry.advance(carry.z + 1, torch.tensor([True, False, False, False]))
    torch.save(carry.state_dict(), tmp_path / "carry.pt")
    rest = copy.deepcopy(list(batches))
    other = Carry(block(), chain(numbered(4), rest), size=4)
    other.load_state_dict(torch.load(tmp_path / "carry.pt", weights_only=True))
    carry._batches = iter(rest)
    for step in range(4):
        for one in (carry, other):
            one.advance(one.z * 0.5, one.age >= step % 3)
        assert torch.equal(carry.z, other.z) and torch.equal(carry.age, other.age) and carry.taken == other.taken
        assert all(map(torch.equal, carry.data, other.data))
    with pytest.raises(ValueError, match="the state's z must be like this carry's"):
        other.load_state_dict(carry.state_dict() | {"z": [torch.zeros(4, 2)]})


def test_what_is_refused():
    for arguments, error, said in (
        (("broyden", numbered(4), 2), TypeError, "init must be a DEQBlock or a function of the data, got 'broyden'"),
        ((block(), torch.ones(4, 3), 2), TypeError, "batches must be an iterable of batches, got Tensor"),
        ((block(), numbered(4), 0), ValueError, "size must be at least 1, got 0"),
        ((block(), [], 2), ValueError, "batches must have at least one sample, got none"),
        ((block(), [("a", torch.ones(1))], 2), TypeError, r"a batch of \['str', \(1,\)\]"),
        ((block(), [(torch.ones(2, 3), torch.ones(1))], 2), ValueError, "equally many rows"),
        ((block(), [(torch.ones(2, 3),), (torch.ones(2, 4),)], 4), ValueError, "batches must be alike"),
        ((lambda data: data[0][:1], numbered(4), 2), ValueError, "init must return states of 2 samples"),
    ):
        with pytest.raises(error, match=said):
            Carry(*arguments)
    carry, mask = Carry(block(), numbered(4), size=4), torch.zeros(4, dtype=torch.bool)
    for z, done, error, said in (
        ((carry.z,), mask, TypeError, "z must have the structure of the states"),
        (carry.z[:3], mask, ValueError, "z must have the shapes and dtypes of the states"),
        (carry.z, mask.int(), ValueError, r"done must be a mask \(4,\) torch.bool, got \(4,\) torch.int32"),
        (carry.z, True, ValueError, "done must be a mask"),
    ):
        with pytest.raises(error, match=said):
            carry.advance(z, done)
