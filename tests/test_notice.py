"""One warning, forward and backward each, of samples that have no answer."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from harness.counters import count

from deqfast import Broyden, DEQBlock, Implicit, LinearCell, Picard, Solution


def block(**options):
    torch.manual_seed(0)
    return DEQBlock(LinearCell(6), **options)


class TestAtOnce:
    @pytest.mark.filterwarnings("error")
    def test_each_status_once_for_a_block_and_its_copies(self):
        layer, x = block(solver=Picard(rtol=1e-6, max_iter=2)), torch.randn(5, 6)
        with pytest.warns(
            UserWarning, match="forward solve, 5 of 5 samples ended with MAX_ITER: .*warn=False silences"
        ):
            layer(x)
        for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            each(x)
        x[1] = torch.nan
        with pytest.warns(UserWarning, match="forward solve, 1 of 5 samples ended with NONFINITE: look") as warned:
            layer(x, z0=torch.zeros(5, 6))
        assert "MAX_ITER" not in str(warned[0].message)

    def test_once_forward_and_once_backward_where_the_block_is_called(self):
        layer = torch.nn.Sequential(block(solver=Picard(rtol=1e-6, max_iter=2), adjoint=Implicit(Picard(max_iter=1))))
        with pytest.warns(UserWarning) as warned:
            for _ in range(2):
                layer(torch.randn(5, 6)).sum().backward()
        assert [warning.filename for warning in warned] == [__file__, __file__]
        assert "in a backward solve, 5 of 5 samples ended with MAX_ITER" in str(warned[1].message)

    @pytest.mark.filterwarnings("error")
    def test_not_where_all_is_well_or_silence_is_wanted(self):
        block()(torch.randn(5, 6))
        block()(torch.zeros(0, 6))
        short = Picard(rtol=1e-6, max_iter=2)
        block(solver=short, adjoint=Implicit(short), warn=False)(torch.randn(5, 6)).sum().backward()


class Device:
    """Stand-in for a slow GPU: copies that the host does not wait for, and events, arrive only in `catch_up`."""

    def __init__(self, monkeypatch):
        self.copies, self.events = [], []
        copy_ = torch.Tensor.copy_

        def queued(target, source, non_blocking=False):
            if not non_blocking:
                return copy_(target, source)
            self.copies.append(lambda: copy_(target, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", queued)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr("deqfast.api.notice.is_late", lambda status: True)
        monkeypatch.setattr(Solution, "counts", None)

    def record_event(self):
        self.events.append(Event())
        return self.events[-1]

    def catch_up(self):
        for arrive in self.copies:
            arrive()
        for event in self.events:
            event.is_done = True
        self.copies, self.events = [], []


class Event:
    """One that can be asked and not waited for, nor copied."""

    def __init__(self):
        self.is_done, self.lock = False, threading.Lock()

    def query(self):
        return self.is_done


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces a GPU")
class TestLate:
    """On a GPU: one call late, or later where that has not arrived, so that nothing waits."""

    @pytest.fixture
    def lagging(self, monkeypatch):
        return Device(monkeypatch)

    def test_one_call_late(self, lagging, recwarn):
        layer, x = block(solver=Broyden(rtol=1e-6, max_iter=30)), torch.randn(5, 6)
        broken = x.clone()
        broken[1:3] = torch.nan
        start = torch.zeros(5, 6)
        layer(x)  # well
        lagging.catch_up()
        layer(broken, z0=start)  # judges the call before, and sends its own
        for _ in range(3):
            layer(x)
        assert len(lagging.copies) == 1  # what is on its way is waited for by no further one
        assert not recwarn.list
        lagging.catch_up()
        with pytest.warns(UserWarning, match="in a forward solve, 2 of 5 samples ended with NONFINITE"):
            layer(x)
        recwarn.clear()
        layer(broken, z0=start)
        lagging.catch_up()
        layer(x)
        assert not recwarn.list  # said before

    def test_nothing_waits(self, lagging):
        def waits(warn):
            layer, x = block(warn=warn), torch.randn(5, 6)
            return count(lambda f: layer(x).sum().backward(), lambda: None, "cpu").host_waits

        assert waits(True) == waits(False)
