"""Trace files as they are found: every kind of dirt, and one sentence for what cannot be read."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import ConfigError
from kvspan.trace.mooncake import ReadOptions, read_trace, write_trace
from kvspan.trace.row import TraceRow

PUBLIC = [  # the first rows of the Mooncake conversation trace, and one made up
    TraceRow(0, 6758, 500, tuple(range(14))),
    TraceRow(0, 7322, 490, (0, *range(14, 28))),
    TraceRow(3000, 1, 1, (2**40,)),
]
GOOD = b'{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [%s]}' % (
    b", ".join(b"%d" % i for i in range(14))
)
MALFORMED = b'{"timestamp": 0, "input_length": 17448, "output_length":2748 610, "hash_ids": [0]}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_the_published_form_is_read_and_written_unchanged(path: Path) -> None:
    path.write_bytes(GOOD + b"\n")
    trace = read_trace(path)
    assert trace.rows == (PUBLIC[0],)
    assert trace.block_tokens == 512
    again = path.with_name("again.jsonl")
    write_trace(trace.rows, again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    write_trace(PUBLIC, tmp_path / name)
    assert read_trace(tmp_path / name).rows == tuple(PUBLIC)
    first = (tmp_path / name).read_bytes()
    write_trace(PUBLIC, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


DIRT = {
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD + b"\r\n" + GOOD + b"\r\n",
    "blank lines": b"\n\n" + GOOD + b"\n  \n\n",
    "no last newline": GOOD,
    "compressed, whatever its name": gzip.compress(GOOD + b"\n"),
    "byte order mark inside gzip": gzip.compress(b"\xef\xbb\xbf" + GOOD + b"\r\n"),
    "further keys": GOOD[:-1] + b', "chat_id": 7, "type": "text"}',
}


@pytest.mark.parametrize("body", DIRT.values(), ids=DIRT)
def test_dirt_is_read(body: bytes, path: Path) -> None:
    path.write_bytes(body)
    assert set(read_trace(path).rows) == {PUBLIC[0]}


def test_ids_keep_their_64_bits(path: Path) -> None:
    ids = (1, 1 + 2**32, 2**64 - 1)
    write_trace([TraceRow(0, 1025, 1, ids)], path)
    assert read_trace(path).rows[0].hash_ids == ids


def test_rows_are_sorted_by_time_and_stay_in_order_otherwise(path: Path) -> None:
    write_trace([TraceRow(t, n, 1) for t, n in ((5, 1), (2, 2), (5, 3), (2, 4), (9, 5))], path)
    trace = read_trace(path)
    assert [row.input_length for row in trace.rows] == [2, 4, 1, 3, 5]
    assert trace.num_unsorted == 2


def test_seconds_become_milliseconds(path: Path) -> None:
    path.write_text('{"timestamp": 1.25, "input_length": 3, "output_length": 2}')
    assert read_trace(path, ReadOptions(timestamp_unit="s")).rows == (TraceRow(1250, 3, 2),)
    assert read_trace(path).rows == (TraceRow(1.25, 3, 2),)


@pytest.mark.parametrize("ids", ["", ', "hash_ids": []', ', "hash_ids": null'])
def test_a_row_without_ids_is_a_row(ids: str, path: Path) -> None:
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 2' + ids + "}")
    assert read_trace(path).rows == (TraceRow(0, 3, 2),)


def test_a_line_that_is_no_json_is_named(path: Path) -> None:
    path.write_bytes(b"\n".join([GOOD] * 12 + [MALFORMED, GOOD]))
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 13: .*--skip-bad"):
        read_trace(path)
    trace = read_trace(path, ReadOptions(skip_bad=True))
    assert (len(trace.rows), trace.num_skipped) == (13, 1)


BAD = {
    "too few ids": ('{"timestamp":0,"input_length":1025,"output_length":1,"hash_ids":[0,1]}', "has 2"),
    "too many ids": ('{"timestamp":0,"input_length":20,"output_length":1,"hash_ids":[0,1]}', "has 2"),
    "blocks of 16": ('{"timestamp":0,"input_length":20,"output_length":1,"hash_ids":[0,1]}', "size 16"),
    "no output_length": ('{"timestamp":0,"input_length":20,"hash_ids":[0]}', "output_length"),
    "no input": ('{"timestamp":0,"input_length":0,"output_length":1}', "input_length is 0"),
    "negative": ('{"timestamp":0,"input_length":3,"output_length":-1}', "output_length is -1"),
    "absurd": ('{"timestamp":0,"input_length":99999999999,"output_length":1}', "2147483647"),
    "text": ('{"timestamp":0,"input_length":"3","output_length":1}', "input_length"),
    "half a token": ('{"timestamp":0,"input_length":3.5,"output_length":1}', "input_length"),
    "endless time": ('{"timestamp":1e999,"input_length":3,"output_length":1}', "out of range"),
    "NaN": ('{"timestamp":NaN,"input_length":3,"output_length":1}', "malformed"),
    "negative id": ('{"timestamp":0,"input_length":3,"output_length":1,"hash_ids":[-1]}', "-1"),
    "long": (
        '{"timestamp":0,"input_length":3,"output_length":1,"hash_ids":[99999999999999999999]}',
        "2^64",
    ),
    "a list": ("[0, 3, 1]", "object"),
    "cut off": ('{"timestamp":0,"input_le', "truncated"),
    "deep": ("[" * 100_000, "row of a trace"),
    "not UTF-8": ("\udcff\udcfe", "row of a trace"),
}


@pytest.mark.parametrize(("line", "says"), BAD.values(), ids=BAD)
def test_a_bad_line_is_refused_or_skipped(line: str, says: str, path: Path) -> None:
    path.write_bytes(GOOD + b"\n\n" + line.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"line 3: ") as refused:
        read_trace(path)
    assert says in str(refused.value)
    assert read_trace(path, ReadOptions(skip_bad=True)).num_skipped == 1


def test_fewer_ids_are_read_where_they_are_allowed(path: Path) -> None:
    path.write_text(BAD["too few ids"][0])
    allowed = ReadOptions(allow_prefix_hashes=True)
    assert read_trace(path, allowed).rows[0].hash_ids == (0, 1)
    path.write_text(BAD["too many ids"][0])
    with pytest.raises(ConfigError, match="has 2"):
        read_trace(path, allowed)


@pytest.mark.parametrize("body", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_trace_without_rows_is_refused(body: bytes, path: Path) -> None:
    path.write_bytes(body)
    with pytest.raises(ConfigError, match="has no rows"):
        read_trace(path)


def test_what_cannot_be_read_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    path.write_bytes(gzip.compress(GOOD)[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(gzip.compress(GOOD)[:20] + b"x" * 50)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(PUBLIC, tmp_path / "missing" / "trace.jsonl")


@pytest.mark.parametrize("options", [{"block_tokens": 0}, {"timestamp_unit": "h"}])
def test_options_that_are_none_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--t"):
        ReadOptions(**options)  # type: ignore[arg-type]


ROWS = st.builds(
    lambda t, n, m, ids: TraceRow(t, n, m, tuple(ids[: -(-n // 512)])),
    st.floats(-1e12, 1e12),
    st.integers(1, 5 * 512),
    st.integers(1, 2**31 - 1),
    st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5),
)


@given(rows=st.lists(ROWS, min_size=1))
def test_any_rows_survive_a_file(rows: list[TraceRow], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.jsonl"
    write_trace(rows, path)
    assert list(read_trace(path).rows) == sorted(rows, key=lambda row: row.timestamp_ms)
    assert json.loads(path.read_text().splitlines()[0])["hash_ids"] == list(rows[0].hash_ids)
