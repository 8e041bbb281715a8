"""How fast is the queue? streamrl's against its peers and against the floor, in one run and in turns.

    python bench/queue.py [--quick | --full] [--only NAME,…] [--json FILE]

Rows of about 10 kB pass a pipeline produce → reward → learn, each role a process of its own; then puts and gets of 1, 8
and 64 rows, one after the other. Every row that reaches the learner is counted, and a sample is compared byte by byte.
Prints rows, bytes and CPU of all processes, ratios of the same round, and the targets beside what was measured. The
first run installs the peers under ~/.cache/streamrl-bench; one that cannot be installed or started is skipped with the
reason. Run it on a machine that does nothing else; CPU per row and ratios say more than rows per second where it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This file has the name of a module of the standard library, which must be found in its stead.
HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]

if __name__ == "__main__":
    from bench.queues.command import main

    sys.exit(main(sys.argv[1:], str(__doc__)))
