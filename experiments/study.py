"""Every table and figure of Sun & Shi (NeurIPS 2024): the runs behind them, resumed where they stopped, and a report.

A run is what cifar_lt.py or cifar_balanced.py does for one cell of a table; it gets a process and a folder of its own.
Runs that are finished are left alone, and a run that fails does not stop the others.
"""

import sys

from nc_study.driver.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
