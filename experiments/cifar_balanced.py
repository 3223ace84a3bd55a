"""Balanced CIFAR (Table 1 of Sun & Shi, NeurIPS 2024): an explicit ResNet-18 compared with its deep-equilibrium
twin."""

import sys

from nc_study.cli import main

if __name__ == "__main__":
    sys.exit(main("cifar_balanced", __doc__))
