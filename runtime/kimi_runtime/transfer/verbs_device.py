"""An opened RDMA device: its port, protection domain, queue pairs and memory regions, by pyverbs.

The only module that calls pyverbs' constructors, so that its errors are mapped here once.
"""

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from kimi_runtime.errors import CapacityError, ConfigError, TransferError
from kimi_runtime.transfer.memory import DeviceMemory
from kimi_runtime.transfer.network import RdmaSettings
from kimi_runtime.transfer.verbs_enums import e
from kimi_runtime.transfer.verbs_gids import Gid, GidKind, choose_gid
from kimi_runtime.transfer.verbs_wire import PortInfo, QueuePairInfo
from kimi_runtime.units import format_bytes

_ACK_TIMEOUT = 14
"""4.096 µs · 2^14 = 67 ms until a packet is sent again; seven times, then the peer is gone."""
_RETRIES = 7
_RNR_TIMER = 12  # 0.64 ms
_HOPS = 64
_MAX_MESSAGE_BYTES = 16 << 20
"""What a port takes is more, but then an ended batch would wait longer for what is under way."""
_KINDS = {
    e.IBV_GID_TYPE_IB: GidKind.IB,
    e.IBV_GID_TYPE_ROCE_V1: GidKind.ROCE_V1,
    e.IBV_GID_TYPE_ROCE_V2: GidKind.ROCE_V2,
}
_TO_INIT = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
_TO_RTR = (
    e.IBV_QP_STATE
    | e.IBV_QP_AV
    | e.IBV_QP_PATH_MTU
    | e.IBV_QP_DEST_QPN
    | e.IBV_QP_RQ_PSN
    | e.IBV_QP_MAX_DEST_RD_ATOMIC
    | e.IBV_QP_MIN_RNR_TIMER
)
_TO_RTS = (
    e.IBV_QP_STATE
    | e.IBV_QP_TIMEOUT
    | e.IBV_QP_RETRY_CNT
    | e.IBV_QP_RNR_RETRY
    | e.IBV_QP_SQ_PSN
    | e.IBV_QP_MAX_QP_RD_ATOMIC
)


class Access(Enum):
    """What a peer may do by a queue pair, to regions that allow it."""

    NONE = 0
    READ = int(e.IBV_ACCESS_REMOTE_READ)
    WRITE = int(e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE)


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """pyverbs' errors in the body as ours: CapacityError for too little of something."""
    try:
        yield
    except PyverbsRDMAError as exc:
        if exc.error_code in (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC):
            raise CapacityError(
                what,
                need="more locked memory or device objects",
                have="no more",
                where="the RDMA device",
                fix="raise the memory lock limit (ulimit -l) or open fewer sessions",
            ) from exc
        raise TransferError(f"{what} failed: {exc}") from exc
    except PyverbsError as exc:
        raise TransferError(f"{what} failed: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device takes."""

    send_depth: int
    cqe: int
    reads_out: int
    reads_in: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class Registration:
    """Registered memory: `base` is its address as the device counts it."""

    region: Any
    base: int

    @property
    def local_key(self) -> int:
        """For requests of our own."""
        return int(self.region.lkey)

    @property
    def remote_key(self) -> int:
        """For peers."""
        return int(self.region.rkey)

    def close(self) -> None:
        """Nobody reaches the memory by this registration any more."""
        with mapped("deregistering memory"):
            self.region.close()


class VerbsDevice:
    """The device of `settings`, or the first one with an active port; ConfigError if none is."""

    def __init__(self, settings: RdmaSettings) -> None:
        self._settings = settings
        self._context, self.name = _opened(settings)
        where = f"port {settings.port} of {self.name}"
        with mapped(f"asking {where}"):
            port = self._context.query_port(settings.port)
            device = self._context.query_device()
            self._domain = PD(self._context)
        _require_partition(self._context, settings, where)
        self._roce = port.link_layer == e.IBV_LINK_LAYER_ETHERNET
        self.gid = choose_gid(_gids(self._context, settings.port), settings.gid_index, port=where)
        self.limits = Limits(
            send_depth=min(settings.send_depth, device.max_qp_wr),
            cqe=device.max_cqe,
            reads_out=max(1, min(16, device.max_qp_init_rd_atom)),
            reads_in=max(1, min(16, device.max_qp_rd_atom)),
            message_bytes=min(port.max_msg_sz or _MAX_MESSAGE_BYTES, _MAX_MESSAGE_BYTES),
        )
        self.port = PortInfo(
            gid=self.gid.raw.hex(),
            lid=port.lid,
            mtu=int(port.active_mtu),
            reads=self.limits.reads_in,
        )

    def completion_queue(self, entries: int) -> Any:
        """A queue for `entries` completions; CapacityError for more than the device has."""
        if entries > self.limits.cqe:
            raise CapacityError(
                "a verbs session",
                need=f"{entries} completion entries",
                have=str(self.limits.cqe),
                where=self.name,
                fix="lower queue_pairs or send_depth",
            )
        with mapped("making a completion queue"):
            return CQ(self._context, entries)

    def queue_pair(self, completions: Any, *, sends: int) -> Any:
        """A reliable connection that can have `sends` requests under way; in state RESET."""
        cap = QPCap(max_send_wr=sends, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=completions, rcq=completions, cap=cap)
        with mapped("making a queue pair"):
            return QP(self._domain, init)

    def connect(
        self, pair: Any, psn: int, peer: QueuePairInfo, port: PortInfo, access: Access
    ) -> None:
        """Bring a pair from any state to RTS, connected to `peer`, which may do `access`."""
        with mapped("connecting a queue pair"):
            pair.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
            attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=self._settings.port)
            attr.qp_access_flags, attr.pkey_index = access.value, self._settings.pkey_index
            pair.modify(attr, _TO_INIT)
            attr.qp_state = e.IBV_QPS_RTR
            attr.ah_attr = self._path(port)
            attr.path_mtu = min(self.port.mtu, port.mtu)
            attr.dest_qp_num, attr.rq_psn = peer.number, peer.psn
            attr.max_dest_rd_atomic = self.limits.reads_in
            attr.min_rnr_timer = _RNR_TIMER
            pair.modify(attr, _TO_RTR)
            attr.qp_state = e.IBV_QPS_RTS
            attr.timeout, attr.retry_cnt, attr.rnr_retry = _ACK_TIMEOUT, _RETRIES, _RETRIES
            attr.sq_psn = psn
            attr.max_rd_atomic = max(1, min(self.limits.reads_out, port.reads))
            pair.modify(attr, _TO_RTS)

    def fail(self, pair: Any) -> None:
        """Put a pair in error: what is under way on it completes as flushed."""
        with mapped("stopping a queue pair"):
            pair.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def register(
        self, memory: memoryview | DeviceMemory, *, remote: bool, writable: bool
    ) -> Registration:
        """Pin memory and let the device reach it; `remote`: peers too, to write if `writable`.

        A DeviceMemory is registered by its dma-buf *from its own offset*: a buffer carved from a
        pool does not begin where its dma-buf does.
        """
        access = e.IBV_ACCESS_LOCAL_WRITE
        if remote:
            access |= e.IBV_ACCESS_REMOTE_READ
        if remote and writable:
            access |= e.IBV_ACCESS_REMOTE_WRITE
        what = f"registering {format_bytes(memory.nbytes)} with {self.name}"
        with mapped(what):
            if isinstance(memory, DeviceMemory):
                region = DmaBufMR(
                    self._domain,
                    memory.nbytes,
                    access,
                    dmabuf=memory.dmabuf,
                    offset=memory.offset,
                )
                return Registration(region, memory.offset)
            if memory.readonly:
                access = 0  # a source of writes: pages that can't be written must not be
            address = address_of(memory)
            return Registration(MR(self._domain, memory.nbytes, access, address=address), address)

    def close(self) -> None:
        """Give the device back; everything on it must be closed before."""
        with mapped(f"closing {self.name}"):
            self._domain.close()
            self._context.close()

    def _path(self, port: PortInfo) -> AHAttr:
        settings = self._settings
        route = GlobalRoute(
            dgid=GID(_gid_text(bytes.fromhex(port.gid))),
            sgid_index=self.gid.index,
            hop_limit=_HOPS,
            traffic_class=settings.traffic_class,
        )
        return AHAttr(
            dlid=port.lid,
            sl=settings.service_level,
            port_num=settings.port,
            is_global=int(self._roce or self.gid.kind is not GidKind.IB),
            gr=route,
        )


def _opened(settings: RdmaSettings) -> tuple[Any, str]:
    try:
        names = [device.name.decode() for device in get_device_list()]
    except PyverbsError:  # the kernel has no RDMA at all
        names = []
    if not names:
        raise ConfigError("transfer: verbs needs an RDMA device, and this host has none; use tcp")
    usable = [name for name in settings.devices if name in names] if settings.devices else names
    if not usable:
        wanted = " or ".join(repr(name) for name in settings.devices)
        raise ConfigError(f"there is no RDMA device {wanted}; this host has {', '.join(names)}")
    for name in usable:
        with mapped(f"opening {name}"):
            context = Context(name=name)
            there = settings.port <= context.query_device().phys_port_cnt
            if there and context.query_port(settings.port).state == e.IBV_PORT_ACTIVE:
                return context, name
            context.close()
    raise ConfigError(f"port {settings.port} is not active on {' or '.join(usable)}")


def _require_partition(context: Any, settings: RdmaSettings, where: str) -> None:
    """Raise ConfigError unless the port's table has a partition at the wanted index."""
    try:
        found = context.query_pkey(settings.port, settings.pkey_index)
    except PyverbsError:
        found = 0
    if not found:
        raise ConfigError(
            f"{where} has no partition at P_Key index {settings.pkey_index}; 0 is the default one"
        )


def _gids(context: Any, port: int) -> list[Gid]:
    with mapped("reading the GID table"):
        entries = context.query_gid_table(max_entries=256)
    found = []
    for entry in entries:
        if entry.port_num == port:
            raw = bytes.fromhex(str(context.query_gid(port, entry.gid_index)).replace(":", ""))
            found.append(Gid(entry.gid_index, _KINDS[entry.gid_type], raw))
    return found


def _gid_text(raw: bytes) -> str:
    text = raw.hex()
    return ":".join(text[at : at + 4] for at in range(0, 32, 4))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("rest", ctypes.c_byte * 256),
    )


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie, writable or not."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
