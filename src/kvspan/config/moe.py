"""Mixtures of experts as configs write them: DeepSeek's spelling and Qwen's. Knows no tensors."""

import msgspec

from kvspan.config.reader import Reader
from kvspan.errors import ModelError

_ROUTINGS = {"noaux_tc": "sigmoid", "greedy": "softmax", "group_limited_greedy": "softmax"}
"""DeepSeek's ways to pick experts -> how each of them scores."""


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers have experts, and how tokens find theirs.

    Args:
        layers: layers that have experts; the others have one MLP.
        num_experts: routed experts of a layer.
        experts_per_token: of them a token goes to.
        intermediate_size: inner width of an expert.
        shared_intermediate_size: inner width of the experts that all tokens go to, together; 0 = none.
        shared_gate: whether a sigmoid gate weighs the shared experts.
        scoring: `softmax` or `sigmoid` of the router's logits.
        correction_bias: whether a learned bias takes part in picking experts, but not in their weight.
        num_groups: groups of neighbouring experts; 1 = no groups.
        groups_per_token: groups of which a token may pick experts.
        group_scores: a group counts as the sum of so many of its best scores.
        normalise: whether the weights of a token's experts are made to sum to 1.
        scaling_factor: factor on the weights, after that.
    """

    layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    scoring: str = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_scores: int = 1
    normalise: bool = False
    scaling_factor: float = 1.0


def parse_moe(read: Reader, *, architecture: str, num_layers: int) -> MoeConfig | None:
    """What a config says of experts, or None for a dense model.

    Args:
        read: the model's config.
        architecture: whose defaults hold for what it does not say.
        num_layers: decoder layers.

    Raises:
        ModelError: a size is missing or cannot be, or the routing is not known.
    """
    if read.has("n_routed_experts"):
        moe = _parse_deepseek(read, architecture, num_layers)
    elif read.has("num_experts") or read.has("num_local_experts"):
        moe = _parse_qwen(read, num_layers)
    else:
        return None
    _check(moe, read.where)
    return moe if moe.layers else None


def _parse_deepseek(read: Reader, architecture: str, num_layers: int) -> MoeConfig:
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    routing = read.one_of("topk_method", tuple(_ROUTINGS), default="noaux_tc" if is_v3 else "greedy")
    scoring = read.one_of("scoring_func", ("softmax", "sigmoid"), default=_ROUTINGS[routing])
    if scoring != _ROUTINGS[routing]:
        raise ModelError(
            f'{read.where}: topk_method "{routing}" with scoring_func "{scoring}" is a routing that '
            f"kvspan does not know (has {', '.join(f'{r} with {s}' for r, s in _ROUTINGS.items())})."
        )
    normalise = read.get("norm_topk_prob", bool, default=is_v3)
    if normalise and not is_v3:
        raise ModelError(
            f"{read.where}: norm_topk_prob is true, and implementations of {architecture} disagree on "
            "what that means; set it to false with --hf-overrides."
        )
    first, step = (
        read.get("first_k_dense_replace", int, default=0),
        read.positive("moe_layer_freq", default=1),
    )
    has_groups = routing != "greedy"
    num_groups = read.positive("n_group", default=1) if has_groups else 1
    inner = read.positive("moe_intermediate_size")
    return MoeConfig(
        layers=tuple(i for i in range(num_layers) if i >= first and i % step == 0),
        num_experts=read.positive("n_routed_experts"),
        experts_per_token=read.positive("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=inner * read.get("n_shared_experts", int, default=0),
        scoring=scoring,
        correction_bias=routing == "noaux_tc",
        num_groups=num_groups,
        groups_per_token=read.positive("topk_group", default=num_groups) if has_groups else 1,
        group_scores=2 if routing == "noaux_tc" else 1,
        normalise=normalise,
        scaling_factor=read.number("routed_scaling_factor", default=1.0),
    )


def _parse_qwen(read: Reader, num_layers: int) -> MoeConfig:
    step = read.positive("decoder_sparse_step", default=1)
    dense = read.get("mlp_only_layers", list, default=[])
    return MoeConfig(
        layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        num_experts=read.positive("num_experts" if read.has("num_experts") else "num_local_experts"),
        experts_per_token=read.positive("num_experts_per_tok"),
        intermediate_size=read.positive("moe_intermediate_size"),
        shared_intermediate_size=read.get("shared_expert_intermediate_size", int, default=0),
        shared_gate=read.has("shared_expert_intermediate_size"),
        normalise=read.get("norm_topk_prob", bool, default=False),
    )


def _check(moe: MoeConfig, where: str) -> None:
    """Refuses numbers by which a token would not find its experts."""
    if moe.num_experts % moe.num_groups:
        raise ModelError(f"{where}: {moe.num_groups} groups do not divide {moe.num_experts} experts.")
    if moe.groups_per_token > moe.num_groups:
        raise ModelError(
            f"{where}: a token cannot have {moe.groups_per_token} of {moe.num_groups} groups of experts."
        )
    within_reach = moe.num_experts // moe.num_groups * moe.groups_per_token
    if moe.experts_per_token > within_reach:
        raise ModelError(
            f"{where}: a token is to have {moe.experts_per_token} experts, and {within_reach} of "
            f"{moe.num_experts} are within its reach."
        )
