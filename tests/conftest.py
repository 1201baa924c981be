"""One thread per test process: the numbers then do not depend on the machine's number of cores."""
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1" # of every process that a test starts, too

import pytest, torch

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
torch.set_num_threads(1)


@pytest.fixture
def root(): return ROOT
