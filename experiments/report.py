"""The report on finished runs: the paper's tables and figures beside ours, with a verdict on each of its claims.

Folders are searched, with all below them, for the runs of cifar_balanced.py, cifar_lt.py and study.py. Written are
report.html (one file with everything in it), report.md, and figures/ with every figure.
"""

import sys

from nc_study.reporting.report import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
