"""The Hugging Face hub as it is asked here: in silence. Knows the library's logger, and no model."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keeps the library from warning of each attempt: what comes of them is told in one sentence."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
