"""Machine and versions in every result, and a table of solver times at the end of a run."""

import platform
import subprocess

import pytest
import torch
from harness.gate_plugin import Gate, add_options

import deqfast
from deqfast import _extension

ROWS: list[dict] = []


def pytest_addoption(parser):
    add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(Gate(config), "deqfast-gate")


@pytest.fixture(scope="session")
def gate(request):
    """Judges by the baselines."""
    return request.config.pluginmanager.get_plugin("deqfast-gate")


def pytest_benchmark_update_machine_info(config, machine_info):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine_info["deqfast"] = {
        "version": deqfast.__version__,
        "commit": commit or None,
        "cpp_build": _extension.cpp_module.build_info() if _extension.cpp_module else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


@pytest.fixture
def record():
    """Add a row to the table printed last."""
    return ROWS.append


def pytest_terminal_summary(terminalreporter):
    if not ROWS:
        return
    write = terminalreporter.write_line
    write("")
    write("Solver time per iteration in ms, f subtracted, least of the rounds; floor = bytes at the measured copy rate")
    write(f"{'case':<34}{'provider':<10}{'ms/iter':>9}{'floor':>8}{'x floor':>9}{'x torchdeq':>12}"
          f"{'evals':>7}{'residual':>11}")  # fmt: skip
    for row in ROWS:
        peer = next((r["ms"] for r in ROWS if r["case"] == row["peer"] and r["provider"] == "torchdeq"), None)
        gain = f"{peer / row['ms']:.1f}" if peer and row["provider"] != "torchdeq" else ""
        floor, share = (f"{row['floor']:.2f}", f"{row['ms'] / row['floor']:.2f}") if row["floor"] else ("", "")
        write(f"{row['case']:<34}{row['provider']:<10}{row['ms']:>9.2f}{floor:>8}{share:>9}{gain:>12}"
              f"{row['evaluations']:>7}{row['residual']:>11.1e}")  # fmt: skip
