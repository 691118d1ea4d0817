"""Options that users of other engines know and that are not here, and what to do instead.

Knows nothing of the options that are.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from kvspan.errors import ConfigError

_NO_ADAPTERS = "there are no adapters: merge them into the weights first"
_NO_MULTIMODAL = "models here read text only: leave it out"
_NO_SPECULATION = "there is no speculative decoding: leave it out"
_NO_RAY = "ranks are processes of one machine: use --tensor-parallel-size"

INSTEAD = {
    "--allowed-local-media-path": _NO_MULTIMODAL,
    "--attention-backend": "the kernel is chosen by what it can do: leave it out",
    "--block-manager-v2": "there is one block manager: leave it out",
    "--calculate-kv-scales": "every token's scales are made as it is cached: leave it out",
    "--code-revision": "no code is run from checkpoints: leave it out",
    "--collect-detailed-traces": "spans have every request's times, and --profile-steps those of steps",
    "--compilation-config": "nothing is compiled: leave it out",
    "--config-format": "it is told from the files: leave it out",
    "--cpu-offload-gb": "weights stay where --device puts them: use a higher --tensor-parallel-size",
    "--dcp-kv-cache-interleave-size": "it is called --cp-kv-cache-interleave-size",
    "--disable-custom-all-reduce": "choose the transport with --comm",
    "--api-server-count": "one process serves HTTP: leave it out",
    "--data-parallel-rank": "replicas stand behind one server: use --data-parallel-size",
    "--disable-log-requests": "requests are not logged: leave it out",
    "--disable-uvicorn-access-log": "nothing is logged unless --access-log is given: leave it out",
    "--enable-log-requests": "use --access-log",
    "--ssl-certfile": "TLS is a reverse proxy's affair: see docs/serving.md",
    "--ssl-keyfile": "TLS is a reverse proxy's affair: see docs/serving.md",
    "--uds": "the server listens on --host and --port: leave it out, and have a reverse proxy in front",
    "--uvicorn-log-level": "use --access-log",
    "--disable-log-stats": "nothing is logged at intervals: leave it out",
    "--download-dir": "downloads go to the Hugging Face cache: set HF_HOME",
    "--enable-lora": _NO_ADAPTERS,
    "--enforce-eager": "there are no CUDA graphs, so everything is eager: leave it out",
    "--guided-decoding-backend": "there is one library that holds outputs to forms: leave it out",
    "--kv-transfer-config": "prefill and decode run in one instance: leave it out",
    "--limit-mm-per-prompt": _NO_MULTIMODAL,
    "--long-prefill-token-threshold": "use --mixed-chunk-size, for all prompts beside streams",
    "--lora-modules": _NO_ADAPTERS,
    "--max-lora-rank": _NO_ADAPTERS,
    "--max-num-partial-prefills": "prompts share steps within --max-num-batched-tokens: leave it out",
    "--max-parallel-loading-workers": "every rank loads its own part: leave it out",
    "--max-seq-len-to-capture": "there are no CUDA graphs: use --max-model-len for the context's limit",
    "--num-gpu-blocks-override": "size the cache with --kv-cache-memory",
    "--num-scheduler-steps": "one token a step: leave it out",
    "--num-speculative-tokens": _NO_SPECULATION,
    "--nnodes": _NO_RAY,
    "--optimization-level": "nothing is compiled: leave it out",
    "--quantization": "it is read from the checkpoint: leave it out",
    "--ray-workers-use-nsight": _NO_RAY,
    "--revision": "download the revision and name its directory as --model",
    "--rope-scaling": """use --hf-overrides '{"rope_scaling": {...}}'""",
    "--rope-theta": """use --hf-overrides '{"rope_theta": ...}'""",
    "--runner": "models here generate text: leave it out",
    "--scheduling-policy": "requests go by their priority, and then in order of arrival: leave it out",
    "--speculative-config": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--swap-space": "a preempted request is computed again: leave it out, or raise --kv-cache-memory",
    "--task": "models here generate text: leave it out",
    "--tokenizer-mode": "the model's own tokenizer is used: use --tokenizer to name another",
    "--tokenizer-revision": "download the revision and name its directory as --tokenizer",
    "--trust-remote-code": "no code is run from checkpoints: leave it out",
    "--worker-cls": "there is one kind of worker: leave it out",
}
"""By flag, what to do without it: the end of the sentence `--flag is not an option of kvspan: ...`."""


def refuse_unknown(flag: str, known: Sequence[str]) -> ConfigError:
    """The error for an option that is not there.

    Args:
        flag: as the user spelled it: `--a-b-c`.
        known: flags that are there.

    Returns:
        An error to raise, which says what to use instead.
    """
    if (instead := INSTEAD.get(flag.replace("--no-", "--"))) is not None:
        return ConfigError(f"{flag} is not an option of kvspan: {instead}.")
    close = get_close_matches(flag, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "--help lists those that there are."
    return ConfigError(f"Unknown option {flag}: {hint}")
