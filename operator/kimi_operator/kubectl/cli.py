"""`kubectl kimi …`, which is also `kimistack kimi …`: what people ask of a running deployment.

kubectl finds the program `kubectl-kimi` on the PATH and calls it with the words after `kimi`. Exit
status 0 done, 1 not so (status: not Ready; drain --wait: not in time), 2 a wrong flag or name, 3 a
cluster that does not answer or refuses.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from kimi_operator.clock import now_s, unix_s
from kimi_operator.kube import Kube
from kimi_operator.kubectl import actions
from kimi_operator.kubectl import signals as load
from kimi_operator.kubectl import unblock as unblocking
from kimi_operator.kubectl.access import Access
from kimi_operator.kubectl.display import show_status, show_top
from kimi_operator.kubectl.flags import Context, Kubeconfig, Namespace, Output, OutputOption
from kimi_operator.kubectl.report import Told, report_of
from kimi_operator.kubectl.sight import (
    Sight,
    deployments,
    look,
    look_at_readable,
    the_deployment,
)
from kimi_operator.kubectl.top import top_of
from kimi_operator.observed import Manifest
from kimi_runtime.errors import KimistackError
from kimi_runtime.units import parse_seconds

T = TypeVar("T")
POLL_S = 2.0
app = typer.Typer(
    name="kimi",
    help="See and steer KimiDeployments of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Name = Annotated[str | None, typer.Argument(help="The KimiDeployment; not needed if there is one.")]


@app.callback()
def _flags(
    ctx: typer.Context,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    ctx.obj = Access(kubeconfig, context, namespace)


def _access(
    ctx: typer.Context, kubeconfig: str | None, context: str | None, namespace: str | None
) -> Access:
    """Flags behind the command go before those in front of it."""
    outer = ctx.obj if isinstance(ctx.obj, Access) else Access()
    return replace(
        outer,
        kubeconfig=kubeconfig or outer.kubeconfig,
        context=context or outer.context,
        namespace=namespace or outer.namespace,
    )


def _seen(access: Access, name: str | None, then: Callable[[Kube, Sight], Awaitable[T]]) -> T:
    """Look at the deployment meant, and do something with it."""

    async def run(kube: Kube, namespace: str) -> T:
        resource = await the_deployment(kube, namespace, name)
        return await then(kube, await look(kube, resource))

    return access.run(run)


def _heard(access: Access, name: str | None) -> tuple[Sight, load.Heard]:
    """The deployment meant, and what its routers say."""

    async def run(kube: Kube, sight: Sight) -> tuple[Sight, load.Heard]:
        return sight, await load.heard(kube, sight)

    return _seen(access, name, run)


def _printed(told: Told) -> None:
    typer.echo(json.dumps(told.model_dump(mode="json", by_alias=True), indent=1))


@app.command()
def status(
    ctx: typer.Context,
    name: Name = None,
    output: OutputOption = Output.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show conditions, instances, revisions and what to do. Exit code 1 while it is not Ready."""
    sight, known = _heard(_access(ctx, kubeconfig, context, namespace), name)
    report = report_of(load.with_loads(sight, known), known)
    if output is Output.JSON:
        _printed(report)
    else:
        show_status(report, Console(), unix_s())
    if not report.ready:
        raise typer.Exit(1)


@app.command()
def top(
    ctx: typer.Context,
    name: Name = None,
    output: OutputOption = Output.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show what every worker has to do now, and how the deployment does."""
    report = top_of(*_heard(_access(ctx, kubeconfig, context, namespace), name))
    if output is Output.JSON:
        _printed(report)
    else:
        show_top(report, Console())


@app.command()
def pause(
    ctx: typer.Context,
    name: Name = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Have a rollout stop after the step under way."""
    access = _access(ctx, kubeconfig, context, namespace)
    _seen(access, name, lambda kube, sight: actions.pause(kube, _of(sight), typer.echo))


@app.command()
def resume(
    ctx: typer.Context,
    name: Name = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Have a paused rollout go on."""
    access = _access(ctx, kubeconfig, context, namespace)
    _seen(access, name, lambda kube, sight: actions.resume(kube, _of(sight), typer.echo))


@app.command()
def undo(
    ctx: typer.Context,
    name: Name = None,
    to_revision: Annotated[
        str | None, typer.Option(help="A kept revision, as status lists them.")
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="Take an undo back: run what the spec asks for.")
    ] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Go back to the revision before this one, or to a named one."""
    access = _access(ctx, kubeconfig, context, namespace)
    if forward and to_revision:
        raise typer.BadParameter("--forward takes no --to-revision")

    async def run(kube: Kube, sight: Sight) -> None:
        if forward:
            await actions.forward(kube, _of(sight), typer.echo)
        else:
            await actions.undo(kube, sight, to_revision, typer.echo)

    _seen(access, name, run)


@app.command()
def drain(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The KimiDeployment.")],
    instances: Annotated[
        list[str] | None, typer.Argument(help="E.g. decode-1a2b3c-0, or the name of its pod.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="All its instances on this node; cordon it first.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even if a role then has nothing that serves.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Keep what was asked to drain and has not gone.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once they are gone; show how it goes.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="With --wait: give up after this.")] = "30m",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Drain instances: requests finish, the pods go, and new ones take their place."""
    if bool(instances) == bool(node):
        raise typer.BadParameter("name instances, or a node by --node")
    within_s = _duration_s(timeout)

    async def run(kube: Kube, sight: Sight) -> bool:
        targets = actions.drain_targets(sight, instances or (), node)
        if cancel:
            await actions.cancel_drain(kube, targets, typer.echo)
            return True
        await actions.ask_to_drain(kube, sight, targets, force=force, tell=typer.echo)
        uids = frozenset(target.stateful_set["metadata"]["uid"] for target in targets)
        return await _drained(kube, sight, uids, within_s) if wait else True

    if not _seen(_access(ctx, kubeconfig, context, namespace), name, run):
        typer.echo(f"not drained within {timeout}; it goes on by itself", err=True)
        raise typer.Exit(1)


def _duration_s(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as exc:
        raise typer.BadParameter(f"--timeout: {exc}") from exc


async def _drained(kube: Kube, sight: Sight, uids: frozenset[str], within_s: float) -> bool:
    """Until the StatefulSets are gone; says so whenever something changed."""
    deadline_s, said = now_s() + within_s, ""
    while True:
        seen = await look(kube, _of(sight))
        left, text = actions.drain_progress(
            load.with_loads(seen, await load.heard(kube, seen)), uids
        )
        if text != said:
            typer.echo(text)
            said = text
        if not left:
            return True
        if now_s() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)


@app.command()
def unblock(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The KimiDeployment.")],
    force: Annotated[
        bool, typer.Option("--force", help="Even while an operator is at work.")
    ] = False,
    operator_namespace: Annotated[
        str, typer.Option(help="Where to look for the operator's Lease if not everywhere.")
    ] = "kimistack",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Let a deletion end that waits for an operator which is gone."""

    async def run(kube: Kube, sight: Sight) -> None:
        where = (operator_namespace, _of(sight)["metadata"]["namespace"])
        operators = await unblocking.live_operators(kube, where, unix_s())
        everything = await look_at_readable(kube, _of(sight))
        await unblocking.unblock(kube, everything, operators, force=force, tell=typer.echo)

    _seen(_access(ctx, kubeconfig, context, namespace), name, run)


def _of(sight: Sight) -> Manifest:
    assert sight.resource is not None
    return sight.resource


def complete() -> None:
    """What kubectl calls as `kubectl_complete-kimi`: one candidate a line, then `:4` (no files)."""
    words = sys.argv[1:]
    try:
        for candidate in candidates(words):
            typer.echo(candidate)
    except KimistackError:
        pass  # no cluster: nothing to offer, and a completion has nowhere to complain
    typer.echo(":4")


def candidates(words: Sequence[str]) -> list[str]:
    """Commands for the first word, deployments for the others."""
    begun = words[-1] if words else ""
    if len(words) <= 1:
        commands = sorted(c.callback.__name__ for c in app.registered_commands if c.callback)
        return [name for name in commands if name.startswith(begun)]

    async def names(kube: Kube, namespace: str) -> list[str]:
        return sorted(d["metadata"]["name"] for d in await deployments(kube, namespace))

    return [name for name in _completing(words).run(names) if name.startswith(begun)]


def _completing(words: Sequence[str]) -> Access:
    """The flags among the words of a command line that is being typed."""
    pairs = dict(pairwise(words))
    return Access(
        pairs.get("--kubeconfig") or os.environ.get("KUBECONFIG"),
        pairs.get("--context"),
        pairs.get("-n") or pairs.get("--namespace"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kubectl kimi`. A KimistackError is one line on stderr and its exit code."""
    try:
        app(None if arguments is None else list(arguments), prog_name="kubectl kimi")
    except KimistackError as exc:
        typer.echo(f"kubectl kimi: {' '.join(str(exc).split())}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
