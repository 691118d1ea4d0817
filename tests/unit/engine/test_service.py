"""The engine's process, spoken to over its socket."""

import os
import socket
import subprocess
import sys

from kvspan.engine.messages import Begin, End, encode
from kvspan.worker.messages import LENGTH


def test_told_to_end_before_it_has_begun_it_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    lifeline, lifeline_end = os.pipe()
    orders = (encode(Begin({"model": "nowhere"}, 0, False)), encode(End()))
    ours.sendall(b"".join(LENGTH.pack(len(body)) + body for body in orders))
    descriptors = (theirs.fileno(), lifeline)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "kvspan.engine.service", *map(str, descriptors)],
            pass_fds=descriptors,
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        for end in (ours, theirs):
            end.close()
        os.close(lifeline)
        os.close(lifeline_end)
    assert (ended.returncode, ended.stderr) == (0, b"")
