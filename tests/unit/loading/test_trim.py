"""What was freed between blocks that stay is the system's again."""

import sys

import psutil
import pytest

from kvspan.loading.trim import give_back


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc alone can be asked")
def test_freed_blocks_below_one_that_stays_are_given_back() -> None:
    blocks = [bytes(20_000) + b"x" for _ in range(4_000)]  # 80 MB, not mapped one by one
    stays = blocks[-1]
    before = psutil.Process().memory_info().rss
    blocks.clear()
    give_back()
    assert before - psutil.Process().memory_info().rss > 60_000_000
    assert stays[-1:] == b"x"
