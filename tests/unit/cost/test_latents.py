"""Where expanding latents begins to pay: multiplications counted on both sides of the border."""

from itertools import product

import pytest

from kvspan.config.mla import MlaConfig
from kvspan.cost.latents import NEVER, least_rows_to_expand

R1 = {"kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}


def mla(**sizes: int) -> MlaConfig:
    return MlaConfig(q_lora_rank=None, score_factor=1.0, **sizes)


def absorbed(m: MlaConfig, rows: int) -> int:
    return rows * (m.kv_lora_rank + m.rope_dim + m.kv_lora_rank)


def expanded(m: MlaConfig, rows: int) -> int:
    once = m.kv_lora_rank * (m.nope_dim + m.value_dim)
    return once + rows * (m.nope_dim + m.rope_dim + m.value_dim)


def test_known_models_expand_prompts_and_never_single_tokens() -> None:
    assert least_rows_to_expand(mla(**R1)) == 171


@pytest.mark.parametrize(
    ("lora", "nope", "rope", "value"), [*product([8, 24, 512], [12, 128], [8, 64], [20, 128])]
)
def test_the_border_is_where_it_begins_to_pay(lora: int, nope: int, rope: int, value: int) -> None:
    sizes = mla(kv_lora_rank=lora, nope_dim=nope, rope_dim=rope, value_dim=value)
    least = least_rows_to_expand(sizes)
    if least == NEVER:
        assert all(absorbed(sizes, n) <= expanded(sizes, n) for n in (1, 10**6))
        return
    assert expanded(sizes, least) < absorbed(sizes, least)
    assert expanded(sizes, least - 1) >= absorbed(sizes, least - 1)
