"""What pods may do, who may reach them, and what is observed of them."""

from typing import Literal

from pydantic import Field

from kimi_operator.api.base import ApiModel, Name


class Security(ApiModel):
    """Privilege is explicit: a profile that does not cover what the spec needs is refused."""

    profile: Literal["Restricted", "RDMA", "Privileged"] = Field(
        "Restricted",
        description="Restricted: no capability. RDMA: IPC_LOCK and what RDMA needs. Privileged: "
        "host devices and host IPC.",
    )
    service_account_name: Name | None = Field(
        None, description="Of the engine pods; none: one without any right."
    )
    seccomp: Literal["RuntimeDefault", "Unconfined"] = Field(
        "RuntimeDefault", description="Seccomp profile of the engine pods."
    )
    tls_secret_name: Name | None = Field(
        None,
        description="Secret of type kubernetes.io/tls, with ca.crt, by which the KV pool's daemons "
        "encrypt their HTTP and gRPC (cert-manager writes one). The certificate is made out to "
        "NAME-umbp.NAMESPACE.svc (of this deployment), for servers and for clients. None: these "
        "calls are signed, not encrypted. In either case so are calls of routers to engines, KV on "
        "its way between nodes is not encrypted, and the router serves its clients plain HTTP.",
    )
    network_policy: Literal["Enabled", "Disabled"] = Field(
        "Enabled", description="Enabled: only the router is reached from outside the deployment."
    )


class Observability(ApiModel):
    """What is written for monitoring. Auto: where the cluster serves that kind of object."""

    pod_monitor: Literal["Auto", "Disabled"] = Field(
        "Auto", description="A PodMonitor for the Prometheus operator."
    )
    rules_object: Literal["Auto", "Disabled"] = Field(
        "Auto", alias="rules", description="A PrometheusRule with alerts."
    )
    dashboard: Literal["Auto", "Disabled"] = Field(
        "Auto", description="A ConfigMap with a Grafana dashboard."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Of every process."
    )
