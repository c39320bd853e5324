"""The trial: both trainings, the exchange with other processes, and what they show."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from residual_client.client import Client
from residual_client.connection import connect
from residual_client.demo.elsewhere import STAGE, Answer
from residual_client.demo.exchange import ask, post
from residual_client.demo.figures import Figures
from residual_client.demo.model import LENGTH, pipeline
from residual_client.demo.report import progress
from residual_client.demo.residuals import Kept, Offloaded, Residuals
from residual_client.demo.text import Corpus
from residual_client.demo.training import MICROBATCHES, SEQUENCES, Training, microbatches_of, train
from residual_client.local_server import local_server
from residual_store.errors import InvalidOption, StoreUnavailable

__all__ = ["hold_trial"]


def hold_trial(*, steps: int, url: str | None, console: Console) -> Figures:
    """Train both ways, ask other processes for one gradient, and return all figures; leaves no bundle behind.

    Raises `InvalidOption` for a store in this process's memory, and whatever the store raises.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="residual-store-demo-") as folder, _client(url, folder) as client:
        trial = _Trial(client, Path(folder), steps=steps, console=console)
        try:
            plain, offloaded = trial.trainings()
            source_free, like = trial.answers(offloaded)
        finally:
            # An interrupt from the keyboard ends the server as well, and it is the interrupt that should be seen.
            with contextlib.suppress(StoreUnavailable):
                client.store.delete_prefix(f"{trial.run}/")
        return Figures(
            store=client.store.url,
            run=trial.run,
            microbatches=MICROBATCHES,
            tokens_per_step=MICROBATCHES * SEQUENCES * LENGTH,
            parameters=sum(array.size for stage in plain.weights for array in stage.values()),
            plain=plain,
            offloaded=offloaded,
            traces=tuple(stage.traces for stage in trial.stages),
            source_free=source_free,
            like=like,
            bundles_left=trial.bundles(),
            seconds=time.perf_counter() - started,
        )


@contextlib.contextmanager
def _client(url: str | None, folder: str) -> Iterator[Client]:
    """A client of the store at ``url``, or of a server with its root in the folder."""
    if url is not None and url.startswith("memory:"):
        raise InvalidOption(
            f"another process cannot reach {url}; leave --url out, or name a server or file:///path"
        )
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(connect(url or stack.enter_context(local_server(Path(folder) / "root"))))


class _Trial:
    """What both trainings share: stages and their compiled functions, text, store, and the name of the run."""

    def __init__(self, client: Client, folder: Path, *, steps: int, console: Console) -> None:
        self.run = f"demo-{secrets.token_hex(4)}"
        self.stages = pipeline()
        self._corpus = Corpus.of_topics()
        self._client = client
        self._folder = folder
        self._steps = steps
        self._console = console

    def bundles(self) -> int:
        """How many bundles of the run the store holds, up to a page of them."""
        return len(self._client.store.list(prefix=f"{self.run}/").entries)

    def trainings(self) -> tuple[Training, Training]:
        """The plain training and the offloaded one, through the same jitted functions."""
        self.bundles()  # a store that does not answer should say so before the training
        self._console.print(f"store {self._client.store.url}, run {self.run}", soft_wrap=True)
        return self._training("plain", Kept()), self._training("offloaded", Offloaded(self._client, self.run))

    def _training(self, title: str, residuals: Residuals) -> Training:
        with progress(self._console, title=title, steps=self._steps) as report:
            return train(self.stages, self._corpus, residuals, steps=self._steps, report=report)

    def answers(self, training: Training) -> tuple[Answer, Answer]:
        """What two fresh processes make of one bundle: without the model, and with it."""
        key, microbatch = f"{self.run}/elsewhere/stage-{STAGE}", microbatches_of(self._corpus, 1)[0]
        parcel = post(self._client, self.stages, training.weights, microbatch, key=key, folder=self._folder)
        return ask(parcel, "source_free"), ask(parcel, "like")
