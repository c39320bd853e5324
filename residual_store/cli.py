"""The `residual-store` command: serve, demo, bench, and a look into a store.

``serve`` needs the extra ``server``, ``demo`` and ``bench`` the extra ``client``; the others need neither.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console

from residual_store.errors import InvalidOption, MissingExtra, ResidualStoreError
from residual_store.settings import Settings
from residual_store.store import Stat, Store, open_store
from residual_store.tables import bundle_table, leaf_table, summary

__all__ = ["app", "main"]

app = typer.Typer(
    name="residual-store",
    help="Residuals of JAX's VJP objects, off the accelerator and back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[
    str, typer.Option("--url", envvar="RESIDUAL_STORE_URL", help="A server, or a store such as file:///path.")
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="RESIDUAL_STORE_TOKEN", help="Token for a server.", show_envvar=True),
]

_SERVER = "http://127.0.0.1:8731"


def main() -> None:
    """Run the command; an error of this project ends it with one line and exit status 1."""
    try:
        app()
    except ResidualStoreError as error:
        Console(stderr=True, highlight=False).print(
            f"[red]{error.code}:[/red] {_escaped(str(error))}", soft_wrap=True
        )
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"residual-store {importlib.metadata.version('residual-store')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def serve(
    root: Annotated[
        str | None,
        typer.Option(help="Directory or tensorstore URL for durable bundles; without it, memory only."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; any but loopback needs --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 takes a free one.")] = 8731,
    uds: Annotated[Path | None, typer.Option(help="Serve on this unix socket instead.")] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with one \\[\\[token]] table for each token: name, sha256, runs, access."
        ),
    ] = None,
    host_bytes: Annotated[
        int | None, typer.Option(help="Memory for bundles and bodies in flight, in bytes.")
    ] = None,
) -> None:
    """Serve a store over HTTP until SIGTERM; prints the URL once it listens."""
    server = _extra("server", "residual_server")
    server.serve(
        root=root,
        host=host,
        port=port,
        uds=uds,
        tokens=server.Tokens.read(tokens) if tokens is not None else None,
        settings=Settings.from_environment(host_bytes=host_bytes),
        ready=lambda url: print(f"residual-store listens on {url}", flush=True),
    )


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    url: Annotated[str | None, typer.Option(help="A store to use instead of a server of its own.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Train a small language model with its residuals offloaded, and compare every bit with plain training."""
    raise typer.Exit(_extra("client", "residual_client.demo").run(steps=steps, url=url, json_file=json_file))


@app.command()
def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure other stores as well, those that are installed.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and smaller arrays.")] = False,
    url: Annotated[str | None, typer.Option(help="A server to measure instead of one of its own.")] = None,
) -> None:
    """Measure the store against the limits of this machine."""
    _extra("client", "residual_client.bench").run(json_file=json_file, peers=peers, quick=quick, url=url)


@app.command(name="ls")
def list_bundles(
    prefix: Annotated[str, typer.Argument(help="Only keys that start with this.")] = "",
    url: Url = _SERVER,
    token: Token = None,
) -> None:
    """List bundles in key order."""
    with _existing(url, token) as store:
        _console().print(bundle_table(_all(store, prefix)))


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="Key of a bundle.")], url: Url = _SERVER, token: Token = None
) -> None:
    """Show what a bundle holds, and what must be given back before its backward pass."""
    with _existing(url, token) as store:
        stat, manifest = store.stat(key), store.manifest(key)
    console = _console()
    console.print(summary(stat, manifest), highlight=False, soft_wrap=True)
    console.print(leaf_table(manifest))


@app.command()
def rm(
    key: Annotated[str, typer.Argument(help="Key of a bundle, or a prefix with --prefix.")],
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Delete all bundles whose key starts with KEY.")
    ] = False,
    url: Url = _SERVER,
    token: Token = None,
) -> None:
    """Delete a bundle, or all under a prefix."""
    with _existing(url, token) as store:
        if prefix:
            typer.echo(f"deleted {store.delete_prefix(key)} bundles")
        else:
            store.delete(key)
            typer.echo(f"deleted {key}")


def _existing(url: str, token: str | None) -> Store:
    """The store at a URL; looking at one must not make it."""
    folder = Path(unquote(urlsplit(url).path))
    if url.startswith("file://") and not folder.is_dir():
        raise InvalidOption(f"there is no directory {folder}, so there is no store at {url}")
    return open_store(url, token=token or None)


def _all(store: Store, prefix: str) -> Iterator[Stat]:
    after: str | None = ""
    while after is not None:
        page = store.list(prefix=prefix, after=after)
        yield from page.entries
        after = page.next


def _extra(extra: str, module: str) -> Any:
    """A module of an outer package, loaded only when its command runs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra.of(extra, part=f"residual-store {extra}", missing=error.name) from error


def _console() -> Console:
    """As wide as the terminal, or wide enough for whole rows where the output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=240)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
