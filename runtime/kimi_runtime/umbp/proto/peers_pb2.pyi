from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LendRequest(_message.Message):
    __slots__ = ("epoch", "keys", "max_bytes", "within_ms", "tenant", "reader")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    max_bytes: int
    within_ms: int
    tenant: str
    reader: str
    def __init__(self, epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., max_bytes: _Optional[int] = ..., within_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., reader: _Optional[str] = ...) -> None: ...

class LendAnswer(_message.Message):
    __slots__ = ("epoch", "pin", "region", "page_bytes", "cut", "blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    pin: int
    region: Region
    page_bytes: int
    cut: bool
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, epoch: _Optional[int] = ..., pin: _Optional[int] = ..., region: _Optional[_Union[Region, _Mapping]] = ..., page_bytes: _Optional[int] = ..., cut: _Optional[bool] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("transport", "peer", "address", "key", "size_bytes", "epoch")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transport: str
    peer: str
    address: str
    key: int
    size_bytes: int
    epoch: int
    def __init__(self, transport: _Optional[str] = ..., peer: _Optional[str] = ..., address: _Optional[str] = ..., key: _Optional[int] = ..., size_bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("size", "extents", "tags")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    size: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    def __init__(self, size: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("first", "pages")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    first: int
    pages: int
    def __init__(self, first: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class Tag(_message.Message):
    __slots__ = ("size", "tag")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    size: int
    tag: bytes
    def __init__(self, size: _Optional[int] = ..., tag: _Optional[bytes] = ...) -> None: ...

class GiveBackRequest(_message.Message):
    __slots__ = ("epoch", "pin", "corrupt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    pin: int
    corrupt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., pin: _Optional[int] = ..., corrupt: _Optional[_Iterable[int]] = ...) -> None: ...

class GiveBackAnswer(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("owner", "epoch", "purpose", "blocks", "within_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    epoch: int
    purpose: str
    blocks: _containers.RepeatedCompositeFieldContainer[OfferedBlock]
    within_ms: int
    def __init__(self, owner: _Optional[str] = ..., epoch: _Optional[int] = ..., purpose: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[OfferedBlock, _Mapping]]] = ..., within_ms: _Optional[int] = ...) -> None: ...

class OfferedBlock(_message.Message):
    __slots__ = ("key", "size", "worth", "uses", "idle_ms", "tenant", "priority")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    size: int
    worth: float
    uses: int
    idle_ms: int
    tenant: str
    priority: int
    def __init__(self, key: _Optional[bytes] = ..., size: _Optional[int] = ..., worth: _Optional[float] = ..., uses: _Optional[int] = ..., idle_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class OfferAnswer(_message.Message):
    __slots__ = ("fates",)
    FATES_FIELD_NUMBER: _ClassVar[int]
    fates: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fates: _Optional[_Iterable[str]] = ...) -> None: ...
