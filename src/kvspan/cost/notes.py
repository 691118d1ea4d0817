"""What start-up says beside its choices: of the layout, of flags that do nothing, of requests' defaults.

Pure: sentences out of values.
"""

from collections.abc import Mapping

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.cost.span import ELASTIC, STATIC
from kvspan.topology import LayoutMode, Topology


def layout_sentence(model: ModelConfig, topology: Topology, mode: LayoutMode, *, dcp_mode: str) -> str:
    """What a rank keeps of the KV cache.

    Args:
        model: sizes.
        topology: a legal layout.
        mode: what DCP does in it.
        dcp_mode: whether short requests stay at home.
    """
    kept, all_heads = topology.kv_heads(0, model.heads).size, model.num_kv_heads
    share = "the whole" if topology.dcp_size == 1 else f"1/{topology.dcp_size}"
    keeps = f"each rank keeps {kept} of {all_heads} KV heads for {share} of"
    if dcp_mode == ELASTIC:
        return f"{mode}, elastic: {keeps} a sequence that spans ranks, and for all of one at home there."
    return f"{mode}: {keeps} every sequence."


def notes(asked: EngineConfig, model: ModelConfig, topology: Topology, executor: str) -> tuple[str, ...]:
    """What of the checkpoint is not loaded, and flags that were given and change nothing.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        executor: that was chosen.
    """
    alone = "every sequence is whole on its rank (--decode-context-parallel-size is 1)"
    unshared = topology.dcp_size == 1
    idle = (
        (unshared and asked.dcp_comm_backend != "auto", "--dcp-comm-backend", alone),
        (unshared and asked.dcp_q_replicate != "auto", "--dcp-q-replicate", alone),
        (
            unshared and asked.cp_kv_cache_interleave_size is not None,
            "--cp-kv-cache-interleave-size",
            alone,
        ),
        (unshared and asked.prefill_strategy != "auto", "--prefill-strategy", alone),
        (
            asked.dcp_mode == STATIC and asked.dcp_span_threshold is not None,
            "--dcp-span-threshold",
            "every request spans its DCP group (--dcp-mode is static)",
        ),
        (
            unshared and asked.cp_workspace_tokens is not None and model.mla is None,
            "--cp-workspace-tokens",
            f"the model caches keys and values as they are, and {alone}",
        ),
        (
            asked.enable_expert_parallel and model.moe is None,
            "--enable-expert-parallel",
            "the model has no experts",
        ),
        (
            asked.comm != "auto" and executor == "inprocess",
            "--comm",
            "ranks are threads of one process",
        ),
        (
            asked.kv_cache_memory is not None and asked.gpu_memory_utilization is not None,
            "--gpu-memory-utilization",
            "--kv-cache-memory says how large the KV cache is",
        ),
    )
    towers = f"only the text model ({model.tensor_prefix}*) is loaded: other towers are skipped."
    skipped = (towers,) if model.tensor_prefix else ()
    return skipped + tuple(f"{flag} has no effect: {why}." for applies, flag, why in idle if applies)


def sampling_note(defaults: Mapping[str, int | float]) -> tuple[str, ...]:
    """What requests are sampled with that do not say it, if that is not what it would be."""
    if not defaults:
        return ()
    said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return (
        f"requests that do not say otherwise have {said}, of the generation_config.json "
        "(--generation-config vllm leaves it out).",
    )
