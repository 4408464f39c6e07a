from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Count(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("hottest",)
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    hottest: int
    def __init__(self, hottest: _Optional[int] = ...) -> None: ...

class InspectAnswer(_message.Message):
    __slots__ = ("name", "epoch", "phase", "awaited", "tiers", "tenants", "hottest", "peers", "funnel", "clients", "pins", "reservations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FUNNEL_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    phase: str
    awaited: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    hottest: _containers.RepeatedCompositeFieldContainer[HotBlock]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    funnel: Funnel
    clients: int
    pins: int
    reservations: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[str] = ..., awaited: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., hottest: _Optional[_Iterable[_Union[HotBlock, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., funnel: _Optional[_Union[Funnel, _Mapping]] = ..., clients: _Optional[int] = ..., pins: _Optional[int] = ..., reservations: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "blocks", "used_bytes", "evictable_bytes", "capacity_bytes", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    used_bytes: int
    evictable_bytes: int
    capacity_bytes: int
    state: str
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "used_bytes", "evictable_bytes", "share_bytes", "quota_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    evictable_bytes: int
    share_bytes: int
    quota_bytes: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., share_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class HotBlock(_message.Message):
    __slots__ = ("key", "tenant", "uses", "size", "idle_s", "pinned")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    tenant: str
    uses: int
    size: int
    idle_s: float
    pinned: bool
    def __init__(self, key: _Optional[bytes] = ..., tenant: _Optional[str] = ..., uses: _Optional[int] = ..., size: _Optional[int] = ..., idle_s: _Optional[float] = ..., pinned: _Optional[bool] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "url", "feed", "standing", "known_blocks", "fetched_bytes", "blocks", "quarantines")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    feed: str
    standing: str
    known_blocks: int
    fetched_bytes: int
    blocks: _containers.RepeatedCompositeFieldContainer[Count]
    quarantines: int
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., feed: _Optional[str] = ..., standing: _Optional[str] = ..., known_blocks: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., quarantines: _Optional[int] = ...) -> None: ...

class Funnel(_message.Message):
    __slots__ = ("looked_up", "hits", "lost", "open")
    LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    looked_up: int
    hits: _containers.RepeatedCompositeFieldContainer[Count]
    lost: _containers.RepeatedCompositeFieldContainer[Count]
    open: int
    def __init__(self, looked_up: _Optional[int] = ..., hits: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., open: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("tiers", "bytes_per_s")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    bytes_per_s: int
    def __init__(self, tiers: _Optional[_Iterable[str]] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("tier", "checked_blocks", "checked_bytes", "total_blocks", "damaged", "done")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    checked_blocks: int
    checked_bytes: int
    total_blocks: int
    damaged: _containers.RepeatedScalarFieldContainer[bytes]
    done: bool
    def __init__(self, tier: _Optional[str] = ..., checked_blocks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., total_blocks: _Optional[int] = ..., damaged: _Optional[_Iterable[bytes]] = ..., done: _Optional[bool] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tenant", "keys", "all", "until_free_bytes", "memory_only", "epoch")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: Keys
    all: bool
    until_free_bytes: int
    memory_only: bool
    epoch: int
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., all: _Optional[bool] = ..., until_free_bytes: _Optional[int] = ..., memory_only: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictAnswer(_message.Message):
    __slots__ = ("blocks", "bytes", "ssd_blocks", "pinned_blocks", "free_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    ssd_blocks: int
    pinned_blocks: int
    free_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("epoch", "up_to")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    up_to: int
    def __init__(self, epoch: _Optional[int] = ..., up_to: _Optional[int] = ...) -> None: ...

class ClearAnswer(_message.Message):
    __slots__ = ("epoch", "up_to", "blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    up_to: int
    blocks: int
    def __init__(self, epoch: _Optional[int] = ..., up_to: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("within_ms", "epoch")
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    within_ms: int
    epoch: int
    def __init__(self, within_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class DrainAnswer(_message.Message):
    __slots__ = ("blocks", "moved_bytes", "ssd_blocks", "pins_left")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_LEFT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Count]
    moved_bytes: int
    ssd_blocks: int
    pins_left: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., moved_bytes: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., pins_left: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadAnswer(_message.Message):
    __slots__ = ("changed", "needs_restart", "refused")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    NEEDS_RESTART_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedScalarFieldContainer[str]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    refused: str
    def __init__(self, changed: _Optional[_Iterable[str]] = ..., needs_restart: _Optional[_Iterable[str]] = ..., refused: _Optional[str] = ...) -> None: ...
