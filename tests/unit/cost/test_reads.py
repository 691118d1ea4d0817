"""Bytes that a step reads, counted by hand."""

import pytest

from kvspan.config.model import parse_model_config
from kvspan.cost.reads import kv_bytes_read, weight_bytes_read
from kvspan.cost.weights import WeightDtypes, active_params, rank_weights
from kvspan.plan.models import find_model
from kvspan.testing.tiny import TINY, tiny_llama
from kvspan.topology import Topology

GQA = parse_model_config(tiny_llama(heads=8, kv_heads=2, head_dim=8), where="tiny")


@pytest.mark.parametrize(
    ("tp", "dcp", "copies"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 1, 2), (8, 4, 1)]
)
def test_each_key_is_read_once_for_each_copy(tp: int, dcp: int, copies: int) -> None:
    topology = Topology(tp_size=tp, dcp_size=dcp)
    layers, heads, keys_and_values = 2, 2, 2 * 8
    assert (
        kv_bytes_read(GQA, topology, kv_dtype_bytes=2) == layers * heads * keys_and_values * 2 * copies
    )


def test_a_row_reads_one_of_the_copies_of_pcp_coordinates() -> None:
    alone = kv_bytes_read(GQA, Topology(), kv_dtype_bytes=2)
    for topology in (Topology(pcp_size=2), Topology(pcp_size=2, dcp_size=2)):
        assert kv_bytes_read(GQA, topology, kv_dtype_bytes=2) == alone


def test_of_an_untied_embedding_a_row_for_each_token_is_read() -> None:
    read = weight_bytes_read(GQA, 1_000_000, num_rows=3, dtype_bytes=4)
    assert read == 1_000_000 - (203 - 3) * 360 * 4
    tied = parse_model_config(TINY["llama-mha-5-tied"], where="tiny")
    assert weight_bytes_read(tied, 1_000_000, num_rows=3, dtype_bytes=4) == 1_000_000


def test_experts_that_no_row_picked_are_not_read() -> None:
    config = parse_model_config(TINY["qwen3-moe"], where="tiny")
    assert config.moe is not None
    few, many = (weight_bytes_read(config, 10**9, num_rows=n, dtype_bytes=4) for n in (1, 1000))
    unread = 1 - config.moe.experts_per_token / config.moe.num_experts
    experts = (
        len(config.moe.layers) * config.moe.num_experts * 3 * config.moe.intermediate_size * 360 * 4
    )
    embedding = 999 * 360 * 4  # rows of it that the larger step reads more
    assert many - few - embedding == pytest.approx(experts * unread, rel=1e-6)


def test_a_team_reads_feed_forward_parts_and_output_once() -> None:
    model = find_model("SmolLM2-135M").config
    bytes_of_two = 2 * 2 * active_params(model)
    sizes = {"num_rows": 4, "dtype_bytes": 2, "coordinates": 2}
    assert weight_bytes_read(model, bytes_of_two, **sizes) == bytes_of_two
    shared = 2 * (30 * 3 * 576 * 1536 + 49152 * 576)
    assert weight_bytes_read(model, bytes_of_two, **sizes, as_team=True) == bytes_of_two - shared


def test_coordinates_read_experts_of_their_own_rows_and_a_team_those_of_all() -> None:
    config = parse_model_config(TINY["qwen3-moe"], where="tiny")
    alone = weight_bytes_read(config, 2 * 10**9, num_rows=2, dtype_bytes=4, coordinates=2)
    assert alone == 2 * weight_bytes_read(config, 10**9, num_rows=1, dtype_bytes=4)
    team = weight_bytes_read(config, 2 * 10**9, num_rows=2, dtype_bytes=4, coordinates=2, as_team=True)
    whole = rank_weights(config, Topology(), replicate_q=False, dtypes=WeightDtypes())
    assert alone - team > whole.head.params * 4  # two rows pick more experts than one, and fewer than 2
