"""What the machines can do: GPUs, links and nodes, as data sheets and measurements state it.

One number, one home: the router prices with these, the simulator runs on them and preflight adds
them up. Decimal units (1 GB = 10^9 bytes) as in data sheets. `achieved_*` is the best that real
kernels or transfers were published to reach; None means that nobody published it, and whoever needs
a figure then has to measure (the `sustained_*` properties fall back to the data sheet).
"""

from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import Field, PositiveFloat, PositiveInt

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.units import Bytes, Rate, Seconds

PositiveRate = Annotated[Rate, Gt(0)]


class GpuSpec(SpecModel):
    """One accelerator (or one CPU that stands in for it). FLOP rates are dense, per second."""

    name: str
    arch: str = Field(description="Compiler target, e.g. gfx950.")
    memory: Annotated[Bytes, Gt(0)]
    memory_rate: PositiveRate
    achieved_memory_rate: PositiveRate | None = None
    bf16_flops: PositiveFloat
    fp8_flops: PositiveFloat | None = Field(None, description="None: no FP8 matrix instructions.")
    mxfp4_flops: PositiveFloat | None = Field(None, description="None: MXFP4 is up-cast to bf16.")
    achieved_bf16_flops: PositiveFloat | None = None
    achieved_fp8_flops: PositiveFloat | None = None
    achieved_mxfp4_flops: PositiveFloat | None = Field(None, description="Of a fused MoE layer.")
    fp8_format: Literal["e4m3fn", "e4m3fnuz"] | None = None
    compute_units: PositiveInt
    lds: Bytes = Field(0, description="Local memory of one compute unit.")
    power_w: PositiveFloat | None = None

    @property
    def sustained_memory_rate(self) -> float:
        """Bytes per second a good kernel reads: achieved where published, else the data sheet's."""
        return self.achieved_memory_rate or self.memory_rate


class LinkSpec(SpecModel):
    """One link, one direction: payload rate, time of the smallest operation."""

    name: str
    rate: PositiveRate = Field(description="Data sheet; for a drive its reads.")
    achieved_rate: PositiveRate | None = None
    write_rate: PositiveRate | None = Field(None, description="Where writing differs from reading.")
    latency: Seconds = Field(description="Of the smallest operation, start to end.")
    full_rate_bytes: Bytes = Field(
        0, description="Size of one operation from which the achieved rate holds."
    )

    @property
    def sustained_rate(self) -> float:
        """Bytes per second of large transfers: achieved where published, else the data sheet's."""
        return self.achieved_rate or self.rate

    def seconds(self, size_bytes: int) -> float:
        """Time to move `size_bytes` alone over the link, one large operation."""
        return self.latency + size_bytes / self.sustained_rate


class NodeSpec(SpecModel):
    """One machine. Its GPUs are fully connected by `gpu_link`, one link per pair."""

    name: str
    gpu: GpuSpec
    gpus: PositiveInt
    gpu_link: LinkSpec
    nic: LinkSpec
    nics: PositiveInt
    host_link: LinkSpec = Field(description="Between a GPU and the host, one per GPU.")
    host_copy: LinkSpec = Field(description="Between processes in host memory, one core copying.")
    drive: LinkSpec
    host_memory: Bytes | None = Field(None, description="None: differs by buyer, ask the node.")

    @property
    def nic_rate_per_gpu(self) -> float:
        """Sustained network bytes per second for each GPU when all of them send."""
        return self.nic.sustained_rate * self.nics / self.gpus

    def group_rate(self, gpus: int) -> float:
        """Bytes per second, one direction, out of one GPU to `gpus - 1` others, by data sheet.

        ConfigError if the node has fewer GPUs.
        """
        if not 2 <= gpus <= self.gpus:
            raise ConfigError(
                f"a group of {gpus} GPUs in one node, but a {self.name} node has {self.gpus}; "
                f"use 2 to {self.gpus}"
            )
        return self.gpu_link.rate * (gpus - 1)


MI355X = GpuSpec(
    # Data sheet: 256 CUs at 2.4 GHz, 8192 FP8 FLOP per clock and CU. Achieved: aiter's tuned tables
    # and the fit over ATOM's published decode curves (6.1 to 6.6 TB/s, 1.3 to 1.6 PFLOP/s in MoE).
    name="MI355X",
    arch="gfx950",
    memory=288 * 10**9,  # the driver may show 288 GiB; planning with the smaller is safe
    memory_rate=8e12,
    achieved_memory_rate=6.6e12,
    bf16_flops=2.52e15,
    fp8_flops=5.03e15,
    mxfp4_flops=10.07e15,
    achieved_bf16_flops=0.96e15,
    achieved_fp8_flops=2.55e15,
    achieved_mxfp4_flops=1.6e15,
    fp8_format="e4m3fn",
    compute_units=256,
    lds=160 * 2**10,
    power_w=1400.0,
)

MI300X = GpuSpec(
    # AMD's data sheet. No scaled MFMA: MXFP4 weights are up-cast.
    name="MI300X",
    arch="gfx942",
    memory=192 * 10**9,
    memory_rate=5.3e12,
    bf16_flops=1.3074e15,
    fp8_flops=2.6149e15,
    fp8_format="e4m3fnuz",
    compute_units=304,
    lds=64 * 2**10,
    power_w=750.0,
)

MI325X = MI300X.model_copy(
    # The MI300X with HBM3E (AMD's data sheet).
    update={"name": "MI325X", "memory": 256 * 10**9, "memory_rate": 6.0e12, "power_w": 1000.0}
)

CPU = GpuSpec(
    # One core of a 2-core Xeon virtual machine with AMX, measured with torch 2.13 on one thread:
    # 7 GB/s copied (so 14 GB/s of traffic), 6.1 GB/s of weights and 0.85 TFLOP/s in bf16 matmul.
    name="cpu",
    arch="x86_64",
    memory=4 * 10**9,
    memory_rate=14e9,
    achieved_memory_rate=6.1e9,
    bf16_flops=0.85e12,
    achieved_bf16_flops=0.85e12,
    compute_units=1,
)

XGMI_MI355X = LinkSpec(
    # 153.6 GB/s in both directions together; MORI-EP dispatches at 345 GB/s over seven of them.
    name="xGMI",
    rate=76.8e9,
    achieved_rate=345e9 / 7,
    latency=1e-5,  # order of an all-reduce kernel; MORI-EP's smallest dispatch takes 31 us
)

XGMI_MI300X = LinkSpec(
    # 128 GB/s in both directions together; MORI-EP dispatches at 307 GB/s over seven of them.
    name="xGMI",
    rate=64e9,
    achieved_rate=307e9 / 7,
    latency=1e-5,
)

NIC_400G = LinkSpec(
    # MORI-IO's benchmarks: 47.75 GB/s in batches of 1 MiB reads (Thor2), 45.08 at 256 KiB;
    # a single 1 KiB read takes 6.66 us (ConnectX-7).
    name="400G NIC",
    rate=50e9,
    achieved_rate=47.75e9,
    latency=6.7e-6,
    full_rate_bytes=256 * 2**10,
)

PCIE_GEN5_X16 = LinkSpec(
    # 32 GT/s by 16 lanes by 128b/130b. The latency is that of a copy's launch, by order.
    name="PCIe 5.0 x16",
    rate=63e9,
    latency=1e-5,
)

NVME = LinkSpec(
    # UMBP's SSD tier: 4 MiB records, O_DIRECT, no checksum: 6002 MB/s read, 2004 MB/s written.
    # The latency is the order of a 4 KiB read; both differ by drive, so the daemon measures them.
    name="NVMe",
    rate=6.0e9,
    write_rate=2.0e9,
    latency=1e-4,
)

SHM = LinkSpec(
    # Measured: one core copies 7 GB/s between buffers that no cache holds; a call over the Unix
    # socket that names the pages takes 74 us.
    name="shared memory",
    rate=7.0e9,
    latency=74e-6,
)

LOOPBACK = LinkSpec(
    # Measured: a copy inside one process; what it costs to start one is a Python call.
    name="loopback",
    rate=7.0e9,
    latency=1e-6,
)

MI355X_NODE = NodeSpec(
    name="MI355X",
    gpu=MI355X,
    gpus=8,
    gpu_link=XGMI_MI355X,
    nic=NIC_400G,
    nics=8,
    host_link=PCIE_GEN5_X16,
    host_copy=SHM,
    drive=NVME,
)

MI300X_NODE = MI355X_NODE.model_copy(
    update={"name": "MI300X", "gpu": MI300X, "gpu_link": XGMI_MI300X}
)

MI325X_NODE = MI300X_NODE.model_copy(update={"name": "MI325X", "gpu": MI325X})

CPU_NODE = NodeSpec(
    name="cpu",
    gpu=CPU,
    gpus=1,
    gpu_link=LOOPBACK,
    nic=LOOPBACK,
    nics=1,
    host_link=SHM,
    host_copy=SHM,
    drive=NVME,
)

NODES: dict[str, NodeSpec] = {
    node.name: node for node in (MI355X_NODE, MI300X_NODE, MI325X_NODE, CPU_NODE)
}
"""By the name of the GPU in them."""
