import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.hardware import (
    CPU_NODE,
    MI300X,
    MI300X_NODE,
    MI325X,
    MI355X,
    MI355X_NODE,
    NIC_400G,
    NODES,
    NVME,
    SHM,
)
from kimi_runtime.spec.published import K3, K26
from kimi_runtime.spec.sizes import kv_bytes_per_token, state_bytes


def test_mi355xs_matrix_rates_follow_from_its_clock():
    fp8 = 256 * 2.4e9 * 8192
    assert MI355X.fp8_flops == pytest.approx(fp8, rel=0.002)
    assert MI355X.bf16_flops * 2 == pytest.approx(fp8, rel=0.002)
    assert MI355X.mxfp4_flops == pytest.approx(2 * fp8, rel=0.002)


def test_what_is_achieved_is_never_more_than_the_data_sheet():
    for node in NODES.values():
        gpu = node.gpu
        pairs = [
            (gpu.achieved_memory_rate, gpu.memory_rate),
            (gpu.achieved_bf16_flops, gpu.bf16_flops),
            (gpu.achieved_fp8_flops, gpu.fp8_flops),
            (gpu.achieved_mxfp4_flops, gpu.mxfp4_flops),
            *((link.achieved_rate, link.rate) for link in (node.gpu_link, node.nic, node.drive)),
        ]
        assert all(peak and achieved <= peak for achieved, peak in pairs if achieved), node.name


def test_only_gfx950_multiplies_mxfp4_itself():
    assert MI355X.mxfp4_flops is not None
    assert MI300X.mxfp4_flops is MI325X.mxfp4_flops is None
    assert (MI355X.fp8_format, MI300X.fp8_format) == ("e4m3fn", "e4m3fnuz")


def test_memory_sizes_are_the_data_sheets():
    assert [gpu.memory for gpu in (MI300X, MI325X, MI355X)] == [
        192 * 10**9,
        256 * 10**9,
        288 * 10**9,
    ]


def test_a_group_of_gpus_uses_a_link_per_peer():
    assert MI355X_NODE.group_rate(4) == pytest.approx(230e9, rel=0.003)
    assert MI355X_NODE.group_rate(8) == pytest.approx(538e9, rel=0.003)
    with pytest.raises(ConfigError, match=r"group of 9 GPUs .* has 8"):
        MI355X_NODE.group_rate(9)
    with pytest.raises(ConfigError, match=r"group of 2 GPUs .* has 1"):
        CPU_NODE.group_rate(2)


def test_hand_offs_take_the_published_time():
    # 259 MB of K2.6 in 5.2 ms and 158 MB of K3 in 3.2 ms, both at the data sheet's 50 GB/s.
    link = NIC_400G.model_copy(update={"achieved_rate": None, "latency": 0.0})
    assert link.seconds(7373 * kv_bytes_per_token(K26, "fp8")) == pytest.approx(5.2e-3, rel=0.01)
    k3 = 7373 * kv_bytes_per_token(K3, "fp8") + state_bytes(K3) // 8
    assert link.seconds(k3) == pytest.approx(3.2e-3, rel=0.02)


def test_a_link_costs_its_latency_even_for_nothing():
    assert NIC_400G.seconds(0) == NIC_400G.latency
    assert SHM.seconds(7 * 10**9) == pytest.approx(1.0, rel=0.001)


def test_each_gpu_has_a_nic_of_its_own():
    assert MI355X_NODE.nic_rate_per_gpu == NIC_400G.sustained_rate
    assert MI300X_NODE.gpu is MI300X


def test_a_drive_writes_slower_than_it_reads():
    assert NVME.write_rate < NVME.rate
