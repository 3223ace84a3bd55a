"""The library that the neural-collapse studies share: data, models, training, results and figures."""

import os

# Before torch is imported. CPU threads that spin while they wait for one another lose their turn where other programs
# share the cores, and a batch takes several times as long; sleeping costs nothing that can be measured here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
