import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kimi_runtime.kernels.sort_experts import sort_experts


def rows_by_block(plan):
    """[(expert of the block, its slots without padding)]"""
    slots = plan.expert_ids.numel()
    blocks = plan.sorted_slots.view(-1, plan.tile_m).tolist()
    kept = [[slot for slot in block if slot < slots] for block in blocks]
    return list(zip(plan.block_experts.tolist(), kept, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-2, 6), min_size=2, max_size=2), max_size=20),
    tile_m=st.sampled_from([1, 4, 16]),
)
def test_every_slot_is_in_one_block_of_its_expert(ids, tile_m):
    experts = 5
    expert_ids = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    blocks = rows_by_block(sort_experts(expert_ids, experts, tile_m))
    flat = [id_ if 0 <= id_ < experts else -1 for pair in ids for id_ in pair]
    placed = [(slot, expert) for expert, slots in blocks for slot in slots]
    assert sorted(placed) == list(enumerate(flat))
    for expert in {*flat} - {-1}:  # within an expert slots keep their order: plans are stable
        mine = [slot for owner, slots in blocks if owner == expert for slot in slots]
        assert mine == sorted(mine)


def test_experts_without_tokens_take_no_block():
    plan = sort_experts(torch.tensor([[3], [3], [0]]), experts=896, tile_m=16)
    assert [block for block in rows_by_block(plan) if block[0] >= 0] == [(0, [2]), (3, [0, 1])]


def test_the_size_of_a_plan_depends_on_shapes_alone():
    one = sort_experts(torch.zeros(17, 8, dtype=torch.int32), 384, 16)
    all_ = sort_experts(torch.arange(17 * 8).view(17, 8), 384, 16)
    none = sort_experts(torch.full((17, 8), -1), 384, 16)
    assert one.sorted_slots.shape == all_.sorted_slots.shape == none.sorted_slots.shape
    assert (none.block_experts == -1).all()


def test_no_tokens_need_no_blocks():
    plan = sort_experts(torch.empty(0, 8, dtype=torch.int32), 384, 16)
    assert plan.sorted_slots.numel() == plan.block_experts.numel() == 0


def test_senseless_sizes_are_refused():
    with pytest.raises(ValueError, match="in tiles of 0"):
        sort_experts(torch.zeros(1, 1, dtype=torch.int32), 4, 0)
