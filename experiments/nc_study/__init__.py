"""Library that the neural-collapse studies share: data, models, training, results and figures."""

import os

# Before torch is imported. CPU threads that spin while they wait for each other block the cores if another program
# wants them too: a batch then took 4 to 15 times as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import runs  # noqa: E402, F401  # first: it says which packages are missing
