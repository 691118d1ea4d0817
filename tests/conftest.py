"""What all tests share: the seed of every random choice, printed so that a run can be repeated."""

import os
import random
import signal

import pytest
import torch

SEED = int(os.environ.get("KVSPAN_TEST_SEED", "20"))

# A shell hands an ignored Ctrl-C to what it runs in the background, and that would be passed on to every
# process here; tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"kvspan: seed {SEED} (KVSPAN_TEST_SEED)"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
