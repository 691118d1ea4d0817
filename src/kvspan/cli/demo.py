"""`kvspan demo`: a question about the US Constitution, which ships with kvspan, to SmolLM2-135M.

The document has some 6,700 tokens, and its KV cache lies over the ranks; the answer is in it.
"""

import argparse
from importlib import resources

from rich.console import Console
from rich.table import Table

from kvspan.cli.flags import add_engine_flags, engine_config
from kvspan.cli.startup import print_capacity, print_choices, stderr_console
from kvspan.cli.streaming import Streamed, stream
from kvspan.config.sizes import format_bytes
from kvspan.engine.llm import LLM
from kvspan.request import SamplingParams

DEFAULTS = {
    "model": "smollm2-135m",
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "kv_cache_memory": "256MiB",
}
QUESTION = "What does the Fourth Amendment protect the people against?"
MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--question", metavar="TEXT", default=QUESTION, help="about the document (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=MAX_TOKENS,
        help="of the answer (default: %(default)s)",
    )
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    config = engine_config(arguments, defaults=DEFAULTS)
    console = stderr_console()
    with LLM.from_config(config, told=lambda resolved: print_choices(console, resolved)) as llm:
        print_capacity(console, llm.engine.core)
        document = resources.files("kvspan").joinpath("data/constitution.txt").read_text("utf-8")
        message = f"{document}\n\nQuestion: {arguments.question}\nAnswer in one short sentence."
        prompt = llm.chat_prompt([{"role": "user", "content": message}])
        print(f"\nThe Constitution of the United States, and then: {arguments.question}\n", flush=True)
        _print_table(llm, stream(llm, prompt, params, console=console))
    return 0


def _print_table(llm: LLM, streamed: Streamed) -> None:
    """Tokens, rates, and what each rank keeps of the request."""
    prompt, output = len(streamed.result.prompt_token_ids), len(streamed.result.outputs[0].token_ids)
    table = Table("", "tokens", "seconds", "tok/s")
    table.add_row("prompt", f"{prompt:,}", f"{streamed.ttft_s:.1f}", f"{prompt / streamed.ttft_s:,.0f}")
    steps = max(output - 1, 0)  # the first token comes with the prompt
    rate = f"{steps / streamed.decode_s:,.1f}" if steps else "-"
    table.add_row("output", f"{output:,}", f"{streamed.decode_s:.1f}", rate)
    bytes_per_token = llm.engine.core.reports[0].kv_bytes_per_token
    kept = Table("DCP rank", "KV tokens", "KV bytes", caption="Before the last step, which adds one.")
    for rank, count in enumerate(streamed.kv_tokens_by_rank):
        kept.add_row(str(rank), f"{count:,}", format_bytes(count * bytes_per_token))
    total = sum(streamed.kv_tokens_by_rank)
    kept.add_row("all", f"{total:,}", format_bytes(total * bytes_per_token), end_section=True)
    out = Console(highlight=False)
    out.print()
    out.print(table)
    out.print(kept)
