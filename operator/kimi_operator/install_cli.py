"""The commands `kimistack install` and `kimistack uninstall`.

What speaks to a cluster is loaded by the commands alone: the rest of `kimistack` runs without the
extra `operator`.
"""

import asyncio
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from kimi_operator.desired.install import Install, all_objects, as_yaml, crd_objects
from kimi_runtime.errors import ConfigError

app = typer.Typer()
REPOSITORY = "kimistack/operator"


class Scope(StrEnum):
    """Where the operator looks."""

    NAMESPACE = "Namespace"
    CLUSTER = "Cluster"


Kubeconfig = Annotated[
    Path | None,
    typer.Option(envvar="KUBECONFIG", help="Without it: the pod's own, or ~/.kube/config."),
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Of the operator itself.")]
ScopeOption = Annotated[Scope, typer.Option(help="Where it looks.")]
Watch = Annotated[
    list[str] | None,
    typer.Option(help="A namespace it looks at, with scope Namespace; may be given several times."),
]


@app.command()
def install(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the YAML and write nothing.")
    ] = False,
    only_crds: Annotated[
        bool, typer.Option("--only-crds", help="The CustomResourceDefinitions alone.")
    ] = False,
    namespace: Namespace = "kimistack",
    scope: ScopeOption = Scope.NAMESPACE,
    watch: Watch = None,
    image: Annotated[
        str | None, typer.Option(help="The operator's image; default: kimistack/operator:VERSION.")
    ] = None,
    pull_policy: Annotated[str, typer.Option(help="IfNotPresent, Always or Never.")] = "",
    pod_monitor: Annotated[
        bool, typer.Option("--pod-monitor", help="Add a PodMonitor for its metrics.")
    ] = False,
    node_access: Annotated[
        bool, typer.Option(help="Let it read nodes, to say which of them fit.")
    ] = True,
    user_roles: Annotated[
        bool, typer.Option(help="Add our resources to the roles view, edit and admin.")
    ] = True,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Install the operator by server-side apply, or print what would be applied."""
    if pull_policy not in ("", "IfNotPresent", "Always", "Never"):
        raise ConfigError("--pull-policy is IfNotPresent, Always or Never")
    wanted = Install(
        image=image or f"{REPOSITORY}:{_version()}",
        namespace=namespace,
        scope=scope.value,
        namespaces=_watched(scope, watch),
        version=_version(),
        image_pull_policy=pull_policy or "IfNotPresent",  # type: ignore[arg-type]
        pod_monitor=pod_monitor,
        node_access=node_access,
        user_roles=user_roles,
    )
    objects = crd_objects() if only_crds else all_objects(wanted)
    if dry_run:
        typer.echo(as_yaml(objects), nl=False)
        return

    from kimi_operator.installing import cluster, kubeconfig_path, put

    config = kubeconfig_path(kubeconfig)

    async def run() -> None:
        async with cluster(config) as kube:
            await put(kube, objects, typer.echo)

    asyncio.run(run())


@app.command()
def uninstall(
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether it may go; exit code 2 if not.")
    ] = False,
    namespace: Namespace = "kimistack",
    scope: ScopeOption = Scope.NAMESPACE,
    watch: Watch = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Take the operator out once no KimiDeployment is left. CRDs and the namespace stay."""
    from kimi_operator.installing import check_unused, cluster, kubeconfig_path, take_out

    there = Install(
        image="",
        namespace=namespace,
        scope=scope.value,
        namespaces=_watched(scope, watch),
        pod_monitor=True,
    )

    config = kubeconfig_path(kubeconfig)

    async def run() -> None:
        async with cluster(config) as kube:
            if check:
                await check_unused(kube, there)
            else:
                await take_out(kube, there, typer.echo)

    asyncio.run(run())


def _watched(scope: Scope, watch: list[str] | None) -> tuple[str, ...]:
    if watch and scope is Scope.CLUSTER:
        raise ConfigError("--watch names namespaces, but scope Cluster looks at all of them")
    return tuple(watch or ())


def _version() -> str:
    try:
        return version("kimistack")
    except PackageNotFoundError:
        return "0.3.0"
