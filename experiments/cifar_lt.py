"""Long-tailed CIFAR (Table 2 of Sun & Shi, NeurIPS 2024): an explicit ResNet-18 compared with its equilibrium twin."""

import sys

from nc_study.cli import main

if __name__ == "__main__":
    sys.exit(main("cifar_lt", __doc__))
