"""The C++ extension; see `csrc/bindings*.cpp`."""

from collections.abc import Sequence
from enum import Enum

class Isa(Enum):
    """Instruction sets that there may be kernels for."""

    portable = 0
    avx2 = 1
    avx512 = 2

class Dtype(Enum):
    """Elements of a cache, and codes of 8 bits."""

    f32 = 0
    bf16 = 1
    f16 = 2
    i8 = 3
    e4m3 = 4

def available(isa: Isa, /) -> bool:
    """Whether this build has the instruction set's kernels and this processor runs them."""

def spin(isa: Isa, dtype: Dtype, rounds: int, /) -> float:
    """Operations made in registers alone, the way attention for `dtype` makes them."""

def prefer_huge_pages(memory: int, size: int, /) -> None:
    """A wish about memory that has not been touched; `size` in bytes."""

def attend(
    isa: Isa,
    dtype: Dtype,
    stored: Dtype,
    threads: int,
    scale: float,
    query: int,
    query_row: int,
    query_head: int,
    keys: int,
    key_block: int,
    key_head: int,
    key_slot: int,
    key_scales: int,
    key_scale_block: int,
    key_scale_head: int,
    key_scale_slot: int,
    values: int,
    value_block: int,
    value_head: int,
    value_slot: int,
    value_scales: int,
    value_scale_block: int,
    value_scale_head: int,
    value_scale_slot: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    first_part: int,
    sequences: int,
    row_starts: int,
    table_starts: int,
    tables: int,
    first: int,
    last: int,
    out: int,
    lse: int,
    /,
) -> None:
    """Paged attention; addresses are of memory that lives through the call, strides in elements."""

def store(
    dtype: Dtype,
    stored: Dtype,
    threads: int,
    rows: int,
    row_stride: int,
    head_stride: int,
    heads: int,
    first_part: int,
    second_part: int,
    count: int,
    blocks: int,
    offsets: int,
    data: int,
    block: int,
    head: int,
    slot: int,
    scales: int,
    scale_block: int,
    scale_head: int,
    scale_slot: int,
    /,
) -> None:
    """See `csrc/store.h`; addresses are of memory that lives through the call, strides in elements."""

class ShmGroup:
    """A group of processes that share memory; see `csrc/exchange.h`. Addresses live until `finish`."""

    def __init__(
        self, file: int, offset: int, rank: int, size: int, slot_bytes: int, host_ranks: int, /
    ) -> None: ...
    @staticmethod
    def region_bytes(size: int, slot_bytes: int, /) -> int:
        """Bytes of the file that a group takes."""

    def share_bytes(self) -> int:
        """Bytes that one reader has of a slot when each reader finds something else."""

    def start_all_gather(self, mine: int, sizes: Sequence[int], out: int, /) -> None:
        """`sizes` are bytes of each rank."""

    def start_all_to_all(
        self, parts: Sequence[int], sent: Sequence[int], arriving: Sequence[int], out: int, /
    ) -> None:
        """`sent` and `arriving` are bytes for and of each rank."""

    def start_all_reduce(self, dtype: Dtype, mine: int, count: int, out: int, /) -> None:
        """`count` is elements; `out` may be `mine`."""

    def start_reduce_scatter(self, dtype: Dtype, mine: int, sizes: Sequence[int], out: int, /) -> None:
        """`sizes` are elements for each rank."""

    def start_merge_scatter(
        self,
        dtype: Dtype,
        partial: int,
        partial_row: int,
        lse: int,
        lse_row: int,
        head_dim: int,
        pieces: Sequence[int],
        out: int,
        /,
    ) -> None:
        """Strides are in elements. A piece is five numbers.

        They are the address of its row numbers or 0, its first row, rows, first column and columns.
        """

    def finish(self, timeout_s: float, members: Sequence[int], /) -> None:
        """Waits; a `TimeoutError` names the one of the group's world ranks that has not come in time."""

class LinearLayer:
    """A linear layer in bf16; see `csrc/linear.h`. What is given as an address outlives it."""

    def __init__(
        self, isa: Isa, weight: int, outputs: int, inputs: int, bias: int, gated: bool, /
    ) -> None:
        """`weight` is in panels; `bias` 0 = none; `gated` = silu of a first half times a second."""

    def __call__(
        self, threads: int, input: int, rows: int, input_stride: int, out: int, wide: bool, /
    ) -> None:
        """`wide` = the output is float32."""

    def part(self, first_output: int, outputs: int, first_input: int, inputs: int, /) -> LinearLayer:
        """Some outputs from the first of a panel on, of some inputs from an even one on; not gated."""

    def rows(self, threads: int, numbers: int, count: int, first: int, out: int, /) -> None:
        """Rows of the weight, zeros for numbers outside [first, first + outputs)."""

def rms_norm(
    isa: Isa,
    dtype: Dtype,
    threads: int,
    x: int,
    rows: int,
    row_stride: int,
    head_stride: int,
    heads: int,
    more: int,
    size: int,
    weight: int,
    eps: float,
    out: int,
    /,
) -> None:
    """See `csrc/rows.h`; `more` 0 = nothing is added."""

def silu_mul(
    isa: Isa,
    dtype: Dtype,
    threads: int,
    gate_up: int,
    rows: int,
    stride: int,
    size: int,
    out: int,
    /,
) -> None:
    """See `csrc/rows.h`."""

def rotate(
    isa: Isa,
    dtype: Dtype,
    threads: int,
    x: int,
    rows: int,
    row_stride: int,
    head_stride: int,
    heads: int,
    plain: int,
    dim: int,
    interleaved: bool,
    cos: int,
    sin: int,
    out: int,
    /,
) -> None:
    """See `csrc/rows.h`; of each head `plain` elements are copied and `dim` turned."""

def head_sums(
    isa: Isa,
    dtype: Dtype,
    threads: int,
    x: int,
    rows: int,
    row_stride: int,
    head_stride: int,
    heads: int,
    inputs: int,
    outputs: int,
    weight: int,
    weight_head_stride: int,
    weight_row_stride: int,
    out: int,
    /,
) -> None:
    """Sums of a matrix's rows, by head; see `csrc/heads.h`."""

def head_dots(
    isa: Isa,
    dtype: Dtype,
    threads: int,
    x: int,
    rows: int,
    row_stride: int,
    head_stride: int,
    heads: int,
    inputs: int,
    outputs: int,
    weight: int,
    weight_head_stride: int,
    weight_row_stride: int,
    out: int,
    /,
) -> None:
    """Dot products with a matrix's rows, by head; see `csrc/heads.h`."""

def side_by_side(threads: int, parts: Sequence[tuple[int, int, int]], rows: int, out: int, /) -> None:
    """See `csrc/rows.h`; a part is its address, and bytes of a row and from one row to the next."""

def best(
    threads: int, logits: int, rows: int, stride: int, size: int, values: int, places: int, /
) -> None:
    """See `csrc/best.h`."""

class DrawWeights:
    """What tokens are drawn by, see `csrc/draw.h`."""

    def __init__(
        self,
        logits: int,
        rows: int,
        stride: int,
        size: int,
        greatest: int,
        temperature: int,
        least: int,
        /,
    ) -> None: ...
    def totals(self, threads: int, sums: int, /) -> None:
        """The sum of each row."""

    def octaves(self, threads: int, sums: int, counts: int, /) -> None:
        """Sums and counts of each row's octaves."""

    def collect(self, threads: int, last: int, first: int, places: int, weights: int, /) -> None:
        """Places and weights of a row's first octaves."""

    def pick(self, threads: int, goals: int, places: int, /) -> None:
        """Where the running sum passes a goal."""

class Work(Enum):
    """What the time of a call counts as."""

    attention = 0
    cache = 1
    linear = 2
    rows = 3
    exchange = 4

class Tape:
    """Calls that are kept, to be made again; see `csrc/tape.h`. All that they are given outlives it."""

    def __init__(self, inputs: Sequence[tuple[int, int]], /) -> None:
        """`inputs` are addresses and bytes of what a step brings."""

    def record(self) -> None:
        """Calls of this thread are kept from here on."""

    def stop(self) -> None:
        """And no longer."""

    def is_whole(self) -> bool:
        """Whether every call read what a step brings from the inputs."""

    def num_calls(self) -> int:
        """Calls that are kept."""

    def play(self, threads: int, /) -> None:
        """Makes all calls in order."""

    def play_timed(self, threads: int, /) -> list[tuple[Work, float, float]]:
        """The same; of each what it counts as, start and end in seconds of the steady clock."""
