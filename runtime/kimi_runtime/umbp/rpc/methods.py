"""The daemon's gRPC methods, each with the messages it takes and answers."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from kimi_runtime.umbp.proto import control_pb2 as control
from kimi_runtime.umbp.proto import peers_pb2 as peers

AUTH_KEY = "x-kimistack-auth"
"""The metadata that carries a call's signature; gRPC wants names in lower case."""

PORT_HEADER = "X-Kimistack-Grpc-Port"
"""With the feed over HTTP, an owner says at which port of the same host it answers gRPC: who knows
where a feed is needs to know nothing else, and a daemon may take any free port."""

SIGNED_AS = "GRPC"
"""What stands for HTTP's method in a signature; the target is the method's path."""

MAX_REQUEST_BYTES = 4 << 20
"""200,000 keys to evict."""

MAX_ANSWER_BYTES = 32 << 20
"""256 lent blocks of 64 MiB, scattered over pages of 4 KiB, have 20 MiB of extents at the worst."""

MAX_METADATA_BYTES = 16 << 10

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Method(Generic[Asked, Answer]):
    """`path` is `/service/Method`. `streams`: it answers more than once."""

    path: str
    asked: type[Asked]
    answer: type[Answer]
    streams: bool = False


_PEERS, _CONTROL = "/kimistack.umbp.v2.Peers/", "/kimistack.umbp.v1.Control/"

LEND = Method(_PEERS + "Lend", peers.LendRequest, peers.LendAnswer)
GIVE_BACK = Method(_PEERS + "GiveBack", peers.GiveBackRequest, peers.GiveBackAnswer)
OFFER = Method(_PEERS + "Offer", peers.OfferRequest, peers.OfferAnswer)

INSPECT = Method(_CONTROL + "Inspect", control.InspectRequest, control.InspectAnswer)
VERIFY = Method(_CONTROL + "Verify", control.VerifyRequest, control.VerifyProgress, streams=True)
EVICT = Method(_CONTROL + "Evict", control.EvictRequest, control.EvictAnswer)
CLEAR = Method(_CONTROL + "Clear", control.ClearRequest, control.ClearAnswer)
DRAIN = Method(_CONTROL + "Drain", control.DrainRequest, control.DrainAnswer)
RELOAD = Method(_CONTROL + "Reload", control.ReloadRequest, control.ReloadAnswer)
