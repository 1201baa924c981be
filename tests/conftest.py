"""One thread per test process: the numbers then do not depend on the machine's number of cores."""
import os, signal, sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1" # of every process that a test starts, too

import pytest, torch

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
torch.set_num_threads(1)
# Under nohup or behind an & a shell ignores SIGINT, and every child inherits that: the tests of an interrupt need it back.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)


def need(what: str, lacking: str) -> None:
    "Skip, because this machine lacks something; fail instead where CL_NSCL_REQUIRE=slurm,... says that it must be there."
    if not lacking: return
    if what in os.environ.get("CL_NSCL_REQUIRE", "").split(","): pytest.fail(f"{what} is required here: {lacking}")
    pytest.skip(lacking, allow_module_level=True)


def pytest_collection_modifyitems(items):
    "Each file runs in one process (--dist loadfile); files that make something for all their tests come first, since they are long."
    shared = lambda item: [d for defs in item._fixtureinfo.name2fixturedefs.values() for d in defs if d.scope in ("module", "session") and d.baseid.endswith(".py")]
    long = {item.path for item in items if item.get_closest_marker("slow") or shared(item)}
    items.sort(key=lambda item: item.path not in long)


def pytest_runtest_logreport(report):
    "Name a failure at once: a run that is cut off before its summary has named its failures."
    if report.failed: print(f"\nFAILED {report.nodeid} ({report.when})", file=sys.__stderr__, flush=True)


@pytest.fixture
def root(): return ROOT
