"""What HTTP costs: tokens a second of the same prompts offline and through the server.

The engine has one rank and one thread on core 0 both times; the server and a light client share core 1.

    python benchmarks/server.py --model smollm2-135m --streams 32 --tokens 128
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PROMPT = "Tell me something about the number {}, and take your time over it."
OPTIONS = ["--kv-cache-memory", "512MiB", "--num-threads", "1", "--max-model-len", "2048"]

OFFLINE = """
import json, sys, time
from kvspan import LLM, SamplingParams
model, streams, tokens, rounds = sys.argv[1], *map(int, sys.argv[2:5])
llm = LLM(model, kv_cache_memory="512MiB", num_threads=1, max_model_len=2048)
params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
found = []
for _ in range(rounds + 1):
    prompts = [{prompt!r}.format(i) for i in range(streams)]
    steps, start = llm.engine.core.stats.steps, time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    wall = time.monotonic() - start
    found.append((streams * tokens / wall, wall / (llm.engine.core.stats.steps - steps)))
print(json.dumps(max(found[1:])))
llm.shutdown()
"""


def main() -> None:
    """Runs both and prints a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    offline, offline_step = run_offline(asked)
    served, served_step = run_served(asked)
    print(f"offline  {offline:8.1f} tok/s  {offline_step * 1e3:7.2f} ms a step")
    print(f"served   {served:8.1f} tok/s  {served_step * 1e3:7.2f} ms a step")
    print(
        f"served / offline: {served / offline:.3f} of the tokens, "
        f"{served_step / offline_step:.3f} of a step"
    )


def run_offline(asked: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second, and seconds a step with its text, without a server."""
    sizes = map(str, (asked.streams, asked.tokens, asked.rounds))
    code = OFFLINE.replace("{prompt!r}", repr(PROMPT))
    command = ["taskset", "-c", "0", sys.executable, "-c", code, asked.model, *sizes]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate, step_s = json.loads(said.splitlines()[-1])
    return rate, step_s


def run_served(asked: argparse.Namespace) -> tuple[float, float]:
    """The same through HTTP; the engine's own seconds a step."""
    command = ["taskset", "-c", "0", sys.executable, "-m", "kvspan", "serve", asked.model, *OPTIONS]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        for line in server.stderr:
            if found := re.search(r"Serving on http://(\S+):(\d+)/v1", line):
                host, port = found[1], int(found[2])
                break
        move(server.pid, core=1)
        move(os.getpid(), core=1)
        rates = []
        for _ in range(asked.rounds + 1):
            before = steps(host, port)
            start = time.monotonic()
            total = asyncio.run(read_all(host, port, asked))
            rate = total / (time.monotonic() - start)
            seconds, count = (b - a for a, b in zip(before, steps(host, port), strict=True))
            rates.append((rate, seconds / count))
        server.send_signal(signal.SIGTERM)
    return max(rates[1:])


def move(pid: int, *, core: int) -> None:
    """Puts every thread of a process on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def steps(host: str, port: int) -> tuple[float, float]:
    """Seconds in steps, and steps, since the server started."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics") as reply:
        text = reply.read().decode()
    found = [
        re.search(rf"^kvspan_step_seconds_{each} (\S+)", text, re.MULTILINE) for each in ("sum", "count")
    ]
    return tuple(float(each[1]) for each in found)


async def read_all(host: str, port: int, asked: argparse.Namespace) -> int:
    """Reads all streams at once; how many tokens came."""
    return sum(await asyncio.gather(*(read(host, port, i, asked) for i in range(asked.streams))))


async def read(host: str, port: int, number: int, asked: argparse.Namespace) -> int:
    """Reads one stream over a bare socket, and counts its events."""
    body = {
        "prompt": PROMPT.format(number),
        "max_tokens": asked.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + content)
    last = b""
    while data := await reader.read(1 << 16):
        last = (last + data)[-2000:]
    writer.close()
    return int(re.search(rb'"completion_tokens":(\d+)', last)[1])


if __name__ == "__main__":
    main()
