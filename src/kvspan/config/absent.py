"""Options that users of other engines know and that are not here, and what to do instead.

Knows nothing of the options that are.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from kvspan.errors import ConfigError

_NO_ADAPTERS = "there are no adapters: merge them into the weights first"
_NO_MULTIMODAL = "models here read text only: leave it out"
_NO_SPECULATION = "there is no speculative decoding: leave it out"
_NO_STAGES = "there are no pipeline stages: use --tensor-parallel-size"
_NO_PLUGINS = "no code of others is run in the engine: leave it out"
_NO_GRAPHS = "there are no CUDA graphs: leave it out"
_NO_OFFLOADING = "the cache stays where ranks compute: leave it out, or raise --kv-cache-memory"
_NO_DISAGGREGATION = "prefill and decode run in one instance: leave it out"
_ONE_MACHINE = "ranks are processes of one machine: use --tensor-parallel-size"
_ONE_SERVER = "replicas stand behind one server: use --data-parallel-size"
_EXPERTS = "experts lie where the layout puts them: leave it out, or use --enable-expert-parallel"
_ALL_LAYERS = "all layers lie where --device says: leave it out"
_CORS = "name the pages that may call the server with --allowed-origins"
_REQUESTS_SAY = "requests say it, as max_tokens: leave it out"
_TEXT_ONLY = "models here read text and generate text: leave it out"

INSTEAD = {
    "--additional-config": _NO_PLUGINS,
    "--alias": "use --served-model-name",
    "--all2all-backend": _EXPERTS,
    "--allow-credentials": _CORS,
    "--allowed-headers": _CORS,
    "--allowed-local-media-path": _NO_MULTIMODAL,
    "--allowed-methods": _CORS,
    "--api-server-count": "one process serves HTTP: leave it out",
    "--attention-backend": "the kernel is chosen by what it can do: leave it out",
    "--attn-cp-size": "use --prefill-context-parallel-size",
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES",
    "--batch-size": "use --max-num-batched-tokens",
    "--block-manager-v2": "there is one block manager: leave it out",
    "--cache-type-k": "use --kv-cache-dtype, for keys and values",
    "--cache-type-v": "use --kv-cache-dtype, for keys and values",
    "--calculate-kv-scales": "every token's scales are made as it is cached: leave it out",
    "--chat-template-content-format": "it is told from the template: leave it out",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--code-revision": "no code is run from checkpoints: leave it out",
    "--collect-detailed-traces": "spans have every request's times, and --profile-steps those of steps",
    "--compilation-config": "nothing is compiled: leave it out",
    "--config-format": "it is told from the files: leave it out",
    "--cont-batching": "requests always join steps under way: leave it out",
    "--context-length": "use --max-model-len",
    "--convert": _TEXT_ONLY,
    "--cpu-offload-gb": "weights stay where --device puts them: use a higher --tensor-parallel-size",
    "--ctx-size": "use --max-model-len, for each request",
    "--cuda-graph-max-bs": _NO_GRAPHS,
    "--cuda-graph-sizes": _NO_GRAPHS,
    "--cudagraph-capture-sizes": _NO_GRAPHS,
    "--data-parallel-address": _ONE_SERVER,
    "--data-parallel-backend": _ONE_SERVER,
    "--data-parallel-external-lb": _ONE_SERVER,
    "--data-parallel-hybrid-lb": _ONE_SERVER,
    "--data-parallel-rank": _ONE_SERVER,
    "--data-parallel-rpc-port": _ONE_SERVER,
    "--data-parallel-size-local": _ONE_SERVER,
    "--data-parallel-start-rank": _ONE_SERVER,
    "--dcp-kv-cache-interleave-size": "it is called --cp-kv-cache-interleave-size",
    "--disable-cascade-attn": "the kernel is chosen by what it can do: leave it out",
    "--disable-cuda-graph": _NO_GRAPHS,
    "--disable-custom-all-reduce": "choose the transport with --comm",
    "--disable-hybrid-kv-cache-manager": "all layers have one kind of cache: leave it out",
    "--disable-log-requests": "requests are not logged: leave it out",
    "--disable-log-stats": "nothing is logged at intervals: leave it out",
    "--disable-overlap-schedule": "no step is scheduled ahead of results: leave it out",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--disable-uvicorn-access-log": "nothing is logged unless --access-log is given: leave it out",
    "--disaggregation-mode": _NO_DISAGGREGATION,
    "--dist-init-addr": _ONE_MACHINE,
    "--download-dir": "downloads go to the Hugging Face cache: set HF_HOME",
    "--dp": "use --data-parallel-size",
    "--dp-size": "use --data-parallel-size",
    "--enable-dbo": "a step is one batch, and is not cut in two that overlap: leave it out",
    "--enable-dp-attention": "use --decode-context-parallel-size, which shares out the cache",
    "--enable-eplb": _EXPERTS,
    "--enable-hierarchical-cache": _NO_OFFLOADING,
    "--enable-log-requests": "use --access-log",
    "--enable-lora": _NO_ADAPTERS,
    "--enable-metrics": "/metrics is always there: leave it out",
    "--enable-mixed-chunk": "prompts share steps with decodes: leave it out, or see --mixed-chunk-size",
    "--enable-prompt-embeds": _TEXT_ONLY,
    "--enable-torch-compile": "nothing is compiled: leave it out",
    "--enforce-eager": "there are no CUDA graphs, so everything is eager: leave it out",
    "--ep": "use --enable-expert-parallel",
    "--ep-size": "use --enable-expert-parallel",
    "--eplb-config": _EXPERTS,
    "--expert-placement-strategy": _EXPERTS,
    "--flash-attn": "the kernel is chosen by what it can do: leave it out",
    "--fully-sharded-loras": _NO_ADAPTERS,
    "--gpu-layers": _ALL_LAYERS,
    "--grammar-backend": "there is one library that holds outputs to forms: leave it out",
    "--guided-decoding-backend": "there is one library that holds outputs to forms: leave it out",
    "--headless": "ranks are processes of one machine, behind one server: leave it out",
    "--hf-config-path": "it is read beside the weights: change keys of it with --hf-overrides",
    "--hf-repo": "name the hub id as --model",
    "--hf-token": "set HF_TOKEN",
    "--hicache-ratio": _NO_OFFLOADING,
    "--hicache-size": _NO_OFFLOADING,
    "--jinja": "chat templates are Jinja: leave it out",
    "--json-model-override-args": "use --hf-overrides",
    "--kv-offloading-backend": _NO_OFFLOADING,
    "--kv-offloading-size": _NO_OFFLOADING,
    "--kv-transfer-config": _NO_DISAGGREGATION,
    "--limit-mm-per-prompt": _NO_MULTIMODAL,
    "--log-level": "nothing is logged at levels: see --access-log",
    "--logits-processors": _NO_PLUGINS,
    "--long-prefill-token-threshold": "use --mixed-chunk-size, for all prompts beside streams",
    "--lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--lora-paths": _NO_ADAPTERS,
    "--master-addr": _ONE_MACHINE,
    "--master-port": _ONE_MACHINE,
    "--max-cpu-loras": _NO_ADAPTERS,
    "--max-cudagraph-capture-size": _NO_GRAPHS,
    "--max-lora-rank": _NO_ADAPTERS,
    "--max-loras": _NO_ADAPTERS,
    "--max-num-partial-prefills": "prompts share steps within --max-num-batched-tokens: leave it out",
    "--max-parallel-loading-workers": "every rank loads its own part: leave it out",
    "--max-running-requests": "use --max-num-seqs",
    "--max-seq-len-to-capture": "there are no CUDA graphs: use --max-model-len for the context's limit",
    "--max-total-tokens": "size the cache with --kv-cache-memory",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--middleware": _NO_PLUGINS,
    "--mlock": "weights are read into memory and stay there: leave it out",
    "--mm-processor-kwargs": _NO_MULTIMODAL,
    "--mmap": "weights are read into memory and stay there: leave it out",
    "--mmproj": _TEXT_ONLY,
    "--model-draft": _NO_SPECULATION,
    "--model-impl": "models are kvspan's own: leave it out",
    "--model-loader-extra-config": "every rank reads its own part of the files: leave it out",
    "--model-path": "use --model",
    "--moe-a2a-backend": _EXPERTS,
    "--n-gpu-layers": _ALL_LAYERS,
    "--n-predict": _REQUESTS_SAY,
    "--nnodes": _ONE_MACHINE,
    "--node-rank": _ONE_MACHINE,
    "--num-gpu-blocks-override": "size the cache with --kv-cache-memory",
    "--num-redundant-experts": _EXPERTS,
    "--num-scheduler-steps": "one token a step: leave it out",
    "--num-speculative-tokens": _NO_SPECULATION,
    "--optimization-level": "nothing is compiled: leave it out",
    "--override-generation-config": "name a directory with your own file with --generation-config",
    "--page-size": "use --block-size",
    "--parallel": "use --max-num-seqs",
    "--pp": _NO_STAGES,
    "--pp-size": _NO_STAGES,
    "--predict": _REQUESTS_SAY,
    "--prefix-caching-hash-algo": "blocks are known by one kind of hash: leave it out",
    "--quantization": "it is read from the checkpoint: leave it out",
    "--random-seed": "use --seed",
    "--ray-workers-use-nsight": _ONE_MACHINE,
    "--revision": "download the revision and name its directory as --model",
    "--rope-scaling": """use --hf-overrides '{"rope_scaling": {...}}'""",
    "--rope-theta": """use --hf-overrides '{"rope_theta": ...}'""",
    "--runner": "models here generate text: leave it out",
    "--sampling-backend": "there is one sampler: leave it out",
    "--schedule-policy": "requests go by their priority, and then in order of arrival: leave it out",
    "--scheduler-cls": _NO_PLUGINS,
    "--scheduling-policy": "requests go by their priority, and then in order of arrival: leave it out",
    "--shutdown-timeout": "use --drain-timeout",
    "--skip-tokenizer-init": "a prompt may be token ids all the same: leave it out",
    "--speculative-algorithm": _NO_SPECULATION,
    "--speculative-config": _NO_SPECULATION,
    "--speculative-draft-model-path": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--split-mode": "use --tensor-parallel-size",
    "--ssl-certfile": "TLS is a reverse proxy's affair: see docs/serving.md",
    "--ssl-keyfile": "TLS is a reverse proxy's affair: see docs/serving.md",
    "--stream-interval": "tokens are sent as they come: leave it out",
    "--structured-outputs-config": "there is one library that holds outputs to forms: leave it out",
    "--swap-space": "a preempted request is computed again: leave it out, or raise --kv-cache-memory",
    "--task": "models here generate text: leave it out",
    "--tensor-split": "ranks get equal parts: use --tensor-parallel-size",
    "--threads": "use --num-threads",
    "--threads-batch": "use --num-threads, for prompts too",
    "--tokenizer-mode": "the model's own tokenizer is used: use --tokenizer to name another",
    "--tokenizer-path": "use --tokenizer",
    "--tokenizer-revision": "download the revision and name its directory as --tokenizer",
    "--tool-parser-plugin": "use --tool-call-parser with a style that is there",
    "--tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "--trust-remote-code": "no code is run from checkpoints: leave it out",
    "--ubatch-size": "use --max-num-batched-tokens",
    "--uds": "the server listens on --host and --port: leave it out, and have a reverse proxy in front",
    "--uvicorn-log-level": "use --access-log",
    "--watchdog-timeout": "use --step-timeout",
    "--worker-cls": "there is one kind of worker: leave it out",
    "--worker-extension-cls": _NO_PLUGINS,
}
"""By flag, what to do without it: the end of the sentence `--flag is not an option of kvspan: ...`."""


SHORT = {
    "-O": INSTEAD["--optimization-level"],
    "-a": INSTEAD["--alias"],
    "-b": INSTEAD["--batch-size"],
    "-c": INSTEAD["--ctx-size"],
    "-cb": INSTEAD["--cont-batching"],
    "-cc": INSTEAD["--compilation-config"],
    "-ctk": INSTEAD["--cache-type-k"],
    "-ctv": INSTEAD["--cache-type-v"],
    "-dpa": _ONE_SERVER,
    "-dpb": _ONE_SERVER,
    "-dpl": _ONE_SERVER,
    "-dpn": _ONE_SERVER,
    "-dpp": _ONE_SERVER,
    "-dpr": _ONE_SERVER,
    "-ep": INSTEAD["--ep"],
    "-fa": INSTEAD["--flash-attn"],
    "-m": INSTEAD["--model-path"],
    "-md": _NO_SPECULATION,
    "-n": _REQUESTS_SAY,
    "-ngl": _ALL_LAYERS,
    "-np": INSTEAD["--parallel"],
    "-pp": _NO_STAGES,
    "-q": INSTEAD["--quantization"],
    "-r": _ONE_MACHINE,
    "-s": INSTEAD["--random-seed"],
    "-sc": _NO_SPECULATION,
    "-sm": INSTEAD["--split-mode"],
    "-t": INSTEAD["--threads"],
    "-tb": INSTEAD["--threads-batch"],
    "-ts": INSTEAD["--tensor-split"],
    "-ub": INSTEAD["--ubatch-size"],
}
"""The same by the short forms that other engines have."""


def refuse_unknown(flag: str, known: Sequence[str]) -> ConfigError:
    """The error for an option that is not there.

    Args:
        flag: as the user spelled it: `--a-b-c`.
        known: flags that are there.

    Returns:
        An error to raise, which says what to use instead.
    """
    if (instead := _instead(flag)) is not None:
        return ConfigError(f"{flag} is not an option of kvspan: {instead}.")
    close = get_close_matches(flag, known, n=1) if len(flag) > len("-x") else []
    hint = f"did you mean {close[0]}?" if close else "--help lists those that there are."
    return ConfigError(f"Unknown option {flag}: {hint}")


def _instead(flag: str) -> str | None:
    """What to do without a flag, if others know it; `-O3` and `-O.level` are `-O` with its value."""
    if flag.startswith("--"):
        return INSTEAD.get(flag) or INSTEAD.get(flag.replace("--no-", "--"))
    return SHORT.get("-O" if flag.startswith("-O") else flag)
