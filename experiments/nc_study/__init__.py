"""The library that the neural-collapse studies share: data, models, training, results and figures."""

import os

# Before torch is imported. CPU threads that spin while they wait for one another keep the cores from doing work as soon
# as another program wants one too: a batch then took 4 to 15 times as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
