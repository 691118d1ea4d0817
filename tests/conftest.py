"""What all tests share: the seed of every random choice, printed so that a run can be repeated."""

import os
import random

import pytest
import torch

SEED = int(os.environ.get("KVSPAN_TEST_SEED", "20"))


def pytest_report_header() -> str:
    return f"kvspan: seed {SEED} (KVSPAN_TEST_SEED)"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
