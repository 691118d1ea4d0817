"""One rank: its part of the model, its part of the cache, and what a step does to them.

A worker obeys and decides nothing: what it computes, and which collectives it makes, follows from the
step alone, so its neighbours do the same by construction.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvspan.attention.backends.registry import choose_kernel
from kvspan.attention.contract import Need
from kvspan.cache.table import RankTable
from kvspan.comm.group import World
from kvspan.config.resolved import Resolved
from kvspan.layers.linear import Storage
from kvspan.loading.apply import apply
from kvspan.loading.resolve import resolve
from kvspan.models.base import Model, RankContext
from kvspan.models.registry import build_model
from kvspan.sampling.sampler import Sampler, SamplingRow
from kvspan.step import RankReport, Row, Sampled, Step, StepResult
from kvspan.worker.batch import Mirrors, build_batch

LOGIT_ROWS = 256
"""Rows whose logits are made at once: bounds the memory of prompt log-probabilities."""
