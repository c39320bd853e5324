"""A progress bar for a long upload."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shows one upload on the terminal; to be given to `Client.offload` as ``progress``.

    It goes away when the upload has ended.
    A terminal shows one at a time; a second one beside it shows nothing.

    >>> client.offload(f_vjp, progress=ProgressBar("layer 3")).wait().leaves
    2
    """

    def __init__(self, title: str = "offload", *, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=None)

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes have gone."""
        if not self._bar.live.is_started:
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()
