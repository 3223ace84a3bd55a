"""A study under torchrun: all processes at work on one run after the other, or each on runs of its own."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from .. import distributed
from ..cli import run_study
from ..config import StudyError, parse
from .plan import Task
from .scheduler import Scheduler, record_failure

LONGEST_RUN = timedelta(days=30)


def run_together(tasks: list[Task]) -> dict[Task, str]:
    """All processes work on each run in turn; the runs that failed, and why.

    What stops a run alone is an error that all processes share. A process that breaks down ends the study; the same
    command goes on with it, and takes that run last.
    """
    failed = {}
    tasks = distributed.from_first(lambda: sorted(tasks, key=lambda task: task.run.failure.exists()))
    for number, task in enumerate(tasks, 1):
        if distributed.from_first(lambda task=task: task.run.finished):  # type: ignore[misc]
            continue
        print(f"\n[{number} of {len(tasks)}] {task.name}", flush=True)
        try:
            run_study(parse(task.cell.study, None, task.arguments))
            distributed.from_first(lambda task=task: task.run.failure.unlink(missing_ok=True))  # type: ignore[misc]
        except StudyError as error:
            failed[task] = reason = str(error)
            distributed.from_first(lambda task=task, reason=reason: record_failure(task, reason))  # type: ignore[misc]
            print(f"{task.name}: FAILED, {reason}", flush=True)
        except Exception as error:
            record_failure(task, f"{type(error).__name__}: {error}")
            raise
    return failed


def run_spread(tasks: list[Task], jobs: int) -> dict[Task, str]:
    """Every process runs its share of the tasks, `jobs` at a time, on the GPUs of its own; what failed anywhere."""
    dist.init_process_group("gloo", timeout=LONGEST_RUN)
    rank, size = dist.get_rank(), dist.get_world_size()
    first_device = int(os.environ.get("LOCAL_RANK", 0)) * jobs
    scheduler = Scheduler(jobs, first_device, shown=tasks if rank == 0 else [])
    scheduler.run(tasks[rank::size])
    failures: list[dict[int, str]] = [{} for _ in range(size)]
    dist.all_gather_object(failures, {tasks.index(task): reason for task, reason in scheduler.failed.items()})
    dist.destroy_process_group()
    return {tasks[number]: reason for some in failures for number, reason in some.items()}
