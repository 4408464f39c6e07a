"""The router: the front door and the planner."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_operator.api.base import ApiModel, Name, Rule, StringMap, Text, implies, presettable
from kimi_operator.api.model import SecretKeyRef
from kimi_operator.api.pods import Placement, Resources
from kimi_operator.api.rdma import Port
from kimi_runtime.units import Bytes, Seconds


class RouterService(ApiModel):
    """The Service in front of the router."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="As in a Service."
    )
    port: Port = Field(80, description="Port of the Service.")
    annotations: StringMap | None = Field(None, description="Annotations of the Service.")


class Gateway(ApiModel):
    """An HTTPRoute of the Gateway API to the router."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(None, description="Its namespace; none: the deployment's.")
    hostnames: Annotated[tuple[Name, ...], Field(max_length=16)] = Field(
        (), description="Host names the route serves; none: all of the Gateway's."
    )
    timeout: Seconds | None = Field(None, description="Request timeout of the route.")


class Canary(ApiModel):
    """A small generation through prefill and decode that proves a revision serves."""

    prompt: Text = Field("Say OK.", description="The prompt.")
    max_tokens: PositiveInt = Field(8, description="Tokens it generates.")
    interval: Annotated[Seconds, Gt(0)] = Field(30.0, description="Time between two of them.")
    timeout: Annotated[Seconds, Gt(0)] = Field(60.0, description="Longer counts as failed.")


class Explain(ApiModel):
    """What the policy `cost` writes of each decision, for `kimistack explain` in a router's pod."""

    max_bytes: Annotated[Bytes, Ge(0)] = Field(
        64 * 2**20, description="Of the newest decisions, kept by each router; 0B: none is written."
    )


class Router(ApiModel):
    """The router replicas. They share nothing: workers' reports and feeds tell each of all."""

    replicas: NonNegativeInt = presettable(
        2, "Router pods; one process with `kimistack up` whatever it says."
    )
    image: Name | None = Field(None, description="None: the deployment's image.")
    port: Port = Field(8000, description="Where it listens.")
    policy: Literal["longest_prefix", "least_load", "cost"] = Field(
        "longest_prefix",
        description="How prefill and decode worker are chosen, both by one plan. `cost` prices "
        "plans in seconds, of the request and of others, and learns how fast workers are.",
    )
    session_admission: Literal["Enabled", "Disabled"] | None = Field(
        None,
        description="Whether a new session waits until there is KV memory for it, so that sessions "
        "do not evict each other; none: with the policy `cost`, where no UMBP pool keeps what "
        "workers evict.",
    )
    explain: Explain = Field(
        Explain(), description="Why requests went where they went; with the policy `cost`."
    )
    thinking: bool = presettable(
        True, "Whether a request that does not say so thinks before it answers."
    )
    api_keys_secret_ref: SecretKeyRef | None = Field(
        None, description="API keys, one a line; none: no key is asked for."
    )
    default_max_tokens: PositiveInt = presettable(
        4096, "Output tokens of a request that does not say how many."
    )
    max_in_flight: PositiveInt = Field(256, description="Beyond this a request gets 429.")
    max_body: Annotated[Bytes, Gt(0)] = Field(32 * 2**20, description="Largest request body.")
    request_timeout: Annotated[Seconds, Gt(0)] = Field(
        600.0, description="Longest time of a request."
    )
    nofile: Annotated[int, Field(ge=1024, le=1048576)] = Field(
        65536, description="Open files (streams) of one router process."
    )
    service: RouterService = Field(RouterService(), description="Its Service.")
    gateway: Gateway | None = Field(None, description="Its route at a Gateway.")
    canary: Canary = Field(Canary(), description="The generation that proves it serves.")
    resources: Resources = Field(Resources(), description="CPU and memory of a router pod.")
    placement: Placement = Field(Placement(), description="Which nodes.")

    rules: ClassVar = (
        Rule(
            "gateway routes to a Service of type ClusterIP",
            lambda m: m.gateway is None or m.service.type == "ClusterIP",
            implies(
                "has(self.gateway) && has(self.service) && has(self.service.type)",
                "self.service.type == 'ClusterIP'",
            ),
            field="service.type",
        ),
    )
