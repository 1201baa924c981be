"""Kill -9 at any moment: tests/kills.py kills, begins again and compares to the last bit; 53 kills in three studies."""
import json, subprocess, sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LINES = [("sgd", {}), ("lars", {}), ("sgd", {"precision": "float16"})] # the last: with the state of a loss scaler


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, more", LINES, ids=lambda v: v if isinstance(v, str) else "-".join(v.values()))
def test_R01_R05_a_study_that_is_killed_again_and_again_ends_as_if_never_killed(tmp_path, optimizer, more):
    "Every objective; in a step, around the writing of checkpoints, snapshots, histories, marks and measured rows, in a notebook's execution."
    done = subprocess.run([sys.executable, HERE/"kills.py", tmp_path, optimizer, str(len(more)), *(f"{k}={json.dumps(v)}" for k, v in more.items())], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    kills = json.loads(done.stdout.splitlines()[-1])
    assert sum(kills.values()) == (15 if more else 19) and kills["moment step"] == 4 and kills["half checkpoint"] == 1
