"""Training steps of the study's two networks, NC1-NC4 as a share of an epoch, and the paper's hours.

    pytest benchmarks/test_study_step.py --full --record FILE

The step is the study's own, on drawn images, with the batch's augmentation.
"""

import pytest
import torch
from harness.study_step import measure, settings_of

STEPS, SECONDS = 50, 60


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("width", "batch"), [(16, 32), (64, 128)])
def test_study_step(board, width, batch):
    settings = settings_of(width, batch, board.device, threads=torch.get_num_threads())
    for row in measure(settings, STEPS, SECONDS):
        board.add(row)
