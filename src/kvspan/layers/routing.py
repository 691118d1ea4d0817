"""Which experts a row goes to, and how much of each. Knows no experts' weights and no groups of ranks.

    logits ─ scores ─ + bias ─ best groups of experts ─ best experts ─ their scores as weights

What decides is computed in float64 and rounded once, or is one operation on float32, so that the native
kernel and torch find the same experts and the same weights; of equal ones the first is the better.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvspan.config.moe import MoeConfig
from kvspan.layers.linear import Storage
from kvspan.layers.matmul import Arena, PackedProduct, packed_bytes
from kvspan.layers.parameter import Target, whole
from kvspan.native import extension, native_path

_SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
_TINY = 1e-20
"""Added to a sum of weights before it divides them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where rows go.

    Args:
        experts: [R, k] int64, distinct in a row, the best first.
        weights: [R, k] float32, of each expert's output.
    """

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Finds each row's experts, in float32; every rank finds the same.

    Args:
        moe: how.
        hidden_size: width of a row.
    """

    def __init__(self, moe: MoeConfig, hidden_size: int, *, storage: Storage) -> None:
        super().__init__()
        self.moe = moe
        self.weight = storage.empty(moe.num_experts, hidden_size)
        # The bias moves picks by less than bfloat16 resolves, and checkpoints have it in float32.
        exact = Storage(torch.float32, storage.device)
        self.bias = exact.empty(moe.num_experts) if moe.correction_bias else None
        self._packed: PackedProduct | None = None

    def pack(self, memory: Arena, *, isa: str) -> None:
        """See `Packable.pack`."""
        if not self.packed_bytes:
            return
        taken = memory.take(self.packed_bytes)
        self._packed = PackedProduct(self.weight, None, memory=taken, isa=isa)
        del self.weight

    @property
    def packed_bytes(self) -> int:
        """See `Packable.packed_bytes`."""
        return packed_bytes(self.weight)

    def forward(self, x: Tensor) -> Routing:
        """[R, hidden_size] -> where each row goes."""
        packed = self._packed
        logits = F.linear(x.float(), self.weight.float()) if packed is None else packed.wide(x)  # [R, E]
        is_native = native_path().isa is not None and logits.device.type == "cpu"
        return (native_routing if is_native else torch_routing)(self.moe, logits, self.bias)

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets; every rank keeps the whole router."""
        targets = {f"{theirs}weight": whole(f"{ours}weight", self.weight.shape)}
        if self.bias is not None:
            targets[f"{theirs}e_score_correction_bias"] = whole(f"{ours}bias", self.bias.shape)
        return targets


def torch_routing(moe: MoeConfig, logits: Tensor, bias: Tensor | None) -> Routing:
    """Where rows go, in torch's operators: any device.

    Args:
        moe: how experts are found.
        logits: [R, E] float32, of the router.
        bias: [E] float32, by which experts are ranked, but not weighed.
    """
    scores = _SCORING[moe.scoring](logits.double()).float()  # [R, E]
    ranked = scores if bias is None else scores + bias
    experts = _best(_within_groups(moe, ranked), moe.experts_per_token)
    weights = scores.gather(1, experts).double()
    if moe.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return Routing(experts, (weights * moe.scaling_factor).float())


def _within_groups(moe: MoeConfig, ranked: Tensor) -> Tensor:
    """[R, E]: the same scores, -inf in groups that are not among a row's best."""
    size = moe.num_experts // moe.num_groups
    grouped = ranked.view(len(ranked), moe.num_groups, size)  # [R, G, E / G]
    counted = grouped.topk(min(moe.group_scores, size), dim=-1).values
    best = _best(counted.sum(dim=-1, dtype=torch.float64), moe.groups_per_token)
    out_of_reach = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
    out_of_reach.scatter_(1, best, value=False)
    return grouped.masked_fill(out_of_reach[..., None], -torch.inf).view(ranked.shape)


def _best(values: Tensor, count: int) -> Tensor:
    """[R, n] -> [R, count]: which of a row's values are greatest; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def native_routing(moe: MoeConfig, logits: Tensor, bias: Tensor | None) -> Routing:
    """The same by the native kernel, on a CPU."""
    logits = logits.contiguous()
    shape = (len(logits), moe.experts_per_token)
    experts, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
    extension().find_experts(
        torch.get_num_threads(),
        logits.data_ptr(),
        len(logits),
        moe.num_experts,
        0 if bias is None else bias.data_ptr(),
        moe.scoring == "sigmoid",
        moe.num_groups,
        moe.groups_per_token,
        moe.group_scores,
        moe.experts_per_token,
        moe.normalise,
        moe.scaling_factor,
        experts.data_ptr(),
        weights.data_ptr(),
    )
    return Routing(experts, weights)
