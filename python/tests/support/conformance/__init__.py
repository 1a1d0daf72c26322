"""PyTorch's own samples of its operators and modules, on ranks and on one device.

subjects.py  what is called: op_db, module_db
sample.py    one call of them
tagged.py    and each operator that has its rule from a tag, with recorded arguments
check.py     one case: a sample with some of its tensors cut
sweep.py     all cases of a subject on the ranks of a mesh, with a watchdog
coverage.py  docs/coverage.md, made from what the sweep recorded
programs.py  random programs; steps.py their lines
faults.py    subjects that fail, to test the sweep
__main__.py  make conformance
"""

import os

# Seconds that a rank waits for another one; give more on a busy machine.
WAIT = float(os.environ.get("CONFORMANCE_WAIT", "5"))
