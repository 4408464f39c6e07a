"""The programs `kubectl-kimi` and `kubectl_complete-kimi`, and the command `kimistack kimi`.

What speaks to a cluster is loaded only once one of them runs.
"""

import sys

import typer

app = typer.Typer()
EXTRA = ("kopf", "kubernetes")
RUNTIME = (
    *("fastapi", "google", "grpc", "jsonschema", "llguidance"),
    *("msgspec", "numpy", "tiktoken", "uvicorn", "xxhash"),
)
"""What the operator's image leaves out."""


def lacks_extra(exc: ModuleNotFoundError) -> str | None:
    """What to say where a part of the project is not installed; None for another module."""
    package = (exc.name or "").partition(".")[0]
    if package in RUNTIME:
        return (
            f"there is no {package} here, which the runtime's commands need and the operator's "
            "image leaves out; use the runtime's image, or install it with: pip install kimistack"
        )
    if package not in EXTRA:
        return None
    return (
        f"there is no {package} here, which speaks to clusters; install it with: pip install "
        "'kimistack[operator]' (in a clone: pip install -e '.[operator]')"
    )


@app.command(
    name="kimi",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def kimi(ctx: typer.Context) -> None:
    """See and steer KimiDeployments of a cluster: the same as `kubectl kimi`."""
    main(ctx.args)


def main(arguments: list[str] | None = None) -> None:
    """Run `kubectl kimi`."""
    try:
        from kimi_operator.kubectl.cli import main as run
    except ModuleNotFoundError as exc:
        text = lacks_extra(exc)
        if text is None:
            raise
        typer.echo(f"kubectl kimi: {text}", err=True)
        sys.exit(2)
    run(arguments)


def complete() -> None:
    """Run `kubectl_complete-kimi`."""
    try:
        from kimi_operator.kubectl.cli import complete as run
    except ModuleNotFoundError:
        return  # a completion has nowhere to complain
    run()
