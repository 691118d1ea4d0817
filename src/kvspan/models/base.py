"""What every model is given and what it must offer. Knows no loader and no scheduler."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from kvspan.attention.contract import Kernel, KeyIndex
from kvspan.attention.kv_store import CacheFormat, CacheStore
from kvspan.attention.prefill import GatherPlan
from kvspan.attention.putting import Writes
from kvspan.attention.rows import RowGroups
from kvspan.comm.group import Group
from kvspan.layers.linear import Storage
from kvspan.layers.logits import Logits
from kvspan.layers.parameter import Target
from kvspan.layers.rotary import Rotation
from kvspan.topology import Topology


@dataclass(frozen=True, slots=True)
class Asking:
    """Rows of one reach whose queries go to the keys.

    Args:
        rows: which of this rank's rows they are.
        sizes: rows of each rank of the reach's group.
        keys: which of this rank's keys each of all those rows sees.
    """

    rows: slice | Tensor
    sizes: tuple[int, ...]
    keys: KeyIndex


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step as tensors, the same on all ranks but for what lives where.

    Args:
        token_ids: [R] int64, of the rows that this rank's PCP coordinate works on. Idle rows come last:
            they have no token, see no key, and make decode steps of a team alike (`worker.share`).
        positions: [R] int64, place of each token in its sequence.
        attending: which of them this rank attends for, n in all; the others have another rank for a
            home. What comes below counts those.
        row_sizes: rows of each PCP coordinate whose keys are gathered; of n they are the first.
        writes: which of the rows whose keys come here this rank stores, and where.
        asking: rows whose queries go to the keys: those that are spread, and those that are local.
        asking_rows: which they are, spread ones before local ones.
        gathered: rows whose keys come to them, and what they see.
        team: rows that each PCP coordinate brings where they multiply them as a team (`layers.team`);
            empty = each works alone.
    """

    token_ids: Tensor
    positions: Tensor
    attending: slice | Tensor
    row_sizes: tuple[int, ...]
    writes: Writes
    asking: tuple["Asking", "Asking"]
    asking_rows: slice | Tensor
    gathered: GatherPlan
    team: tuple[int, ...]

    def by_reach(self, asking: Tensor) -> tuple[Tensor, Tensor]:
        """[rows that ask, ...] -> those that are spread, and those that are local."""
        num_local = sum(self.asking[1].sizes)  # nobody else's are among them
        num_spread = len(asking) - num_local
        return asking[:num_spread], asking[num_spread:]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a model is built with on one rank.

    Args:
        topology: the grid of ranks.
        rank: this rank in the world.
        tp: ranks that share FFN, embedding and head.
        dcp: ranks that share sequences.
        row_groups: who works on other rows, and who on the same.
        exchange: how partial results meet, `a2a` or `ag_rs`.
        replicate_q: whether each rank projects all queries of its DCP group, or a part, gathered.
        expert_parallel: whether a rank keeps whole experts, or a part of each.
        kernel: attention over this rank's shard.
        storage: dtype of weights and activations, and the device of everything.
        cache: how keys and values are kept.
        workspace_tokens: cached latents of a rank that are expanded to keys and values at once.
        together_tokens: latents from which on PCP coordinates expand them together.
    """

    topology: Topology
    rank: int
    tp: Group
    dcp: Group
    row_groups: RowGroups
    exchange: str
    replicate_q: bool
    expert_parallel: bool
    kernel: Kernel
    storage: Storage
    cache: CacheFormat
    workspace_tokens: int
    together_tokens: int


class Model(Protocol):
    """A decoder, or the part of it that one rank keeps."""

    def rotation(self, positions: Tensor) -> Rotation:
        """Angles of a step's rows, which all layers turn them by: positions are [R] int64."""
        ...

    def forward(self, batch: Batch, rotation: Rotation) -> Tensor:
        """Runs the rows of a step.

        Args:
            batch: the step.
            rotation: of its positions.

        Returns:
            [R, hidden_size], the final hidden states, whole on every rank.
        """
        ...

    def logits(self, hidden: Tensor, team: Sequence[int] = ()) -> Logits:
        """Logits of some rows, shared out over ranks.

        Args:
            hidden: [n, hidden_size].
            team: how many rows each PCP coordinate brings to have all of theirs made; empty = these.

        Returns:
            [n, vocab_size] float32, or of everybody's rows in order of the coordinates.
        """
        ...

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint name -> where it goes on this rank. Complete: other names are errors."""
        ...

    def ignored_weights(self) -> frozenset[str]:
        """Checkpoint names that may be there and are not needed."""
        ...

    def settle(self) -> None:
        """The weights are loaded and will not change: brings them in the form that is fastest.

        What `parameters_by_name` gave before may be gone after it.
        """
        ...

    def kv_stores(self) -> list[CacheStore]:
        """The cache of each layer, to be allocated once its size is known."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Its layers by dotted name, to watch them."""
        ...

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Every parameter, by the dotted name that targets use."""
        ...
