"""The client: offload a VJP object, restore it, or apply its stored backward."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jax.tree_util import tree_leaves

from residual_client import transforms
from residual_client.backward import Backward, Calls
from residual_client.depot import Depot
from residual_client.explain import explain
from residual_client.explanation import Explanation
from residual_client.handle import Handle, Local
from residual_client.holding import Holding
from residual_client.jax_compat import trace_state_clean
from residual_client.offload import Terms, manifest_of
from residual_client.program_cache import ProgramCache
from residual_client.refusals import about
from residual_client.restore import (
    check_program,
    check_widths,
    not_traced,
    place_anywhere,
    placements_like,
    rebuild,
)
from residual_client.room import WhenFull
from residual_client.sharding import Attempts, spread_of, with_attempt
from residual_client.staging import Staging
from residual_client.transfer import check_precision, check_readable
from residual_client.transfers import Transfers
from residual_client.upload import Progress
from residual_client.vjp import check_vjp, residuals_of
from residual_store.bundle import Bundle
from residual_store.closing import ClosedAtExit
from residual_store.errors import LeafUnavailable, StoreUnavailable
from residual_store.key import check_key
from residual_store.manifest import UserValue
from residual_store.store import Durability, IfExists, Store

__all__ = ["Client"]


class Client(ClosedAtExit):
    """JAX in front of a store; safe to use from several threads.

    >>> with Client(open_store("memory://")) as client:
    ...     y, f_vjp = jax.vjp(jnp.sin, jnp.ones(2))
    ...     client.offload(f_vjp).wait().leaves
    1
    """

    def __init__(self, store: Store, *, staging: Staging | None = None, when_full: WhenFull = "wait") -> None:
        self.store = store
        self._staging = staging or Staging(window_bytes=store.settings.staging_bytes)
        self._programs = ProgramCache(store)
        self._calls = Calls(store)
        self._attempts = Attempts(store.settings)
        self._transfers = Transfers(
            store,
            staging=self._staging,
            programs=self._programs,
            attempts=self._attempts,
            when_full=when_full,
        )
        self._scratch = f"scratch/{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._has_scratch = False
        self.depot = Depot(store, prefix=f"{self._scratch}/offloaded")

    def __repr__(self) -> str:
        return f"Client({self.store.url!r})"

    def flush(self) -> None:
        """Wait until all that was offloaded is stored.

        Raises the first failure of an upload since the last flush, with the others as its notes, and `TransferStalled`,
        which names key and phase, if nothing moves for `stall_seconds`.

        >>> client.flush()
        """
        self._transfers.flush()

    def close(self) -> None:
        """Wait for named bundles, delete this client's scratch bundles and release the store.

        Raises what kept a bundle from being stored, if nobody was told of it yet; a forked process does nothing.
        """
        self.depot.close()
        with contextlib.ExitStack() as stack:
            if self._transfers.is_here:
                stack.callback(self.store.close)
                stack.callback(self._delete_scratch)
                self._transfers.close()

    def _delete_scratch(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            if self._has_scratch or self.depot.is_used:
                self.store.delete_prefix(f"{self._scratch}/")

    # Offload

    def offload(
        self,
        vjp: Any,
        key: str | None = None,
        *,
        durability: Durability | None = None,
        ttl: float | None = None,
        if_exists: IfExists = "error",
        args: Sequence[Any] | None = None,
        user: Mapping[str, UserValue] | None = None,
        progress: Progress | None = None,
    ) -> Handle:
        """Take the residuals of a VJP object, and store them in the background; what is stored are the bytes of this moment.

        It returns when these are safe from whatever is done to arrays and buffers afterwards, and `Handle.wait` returns
        when they are stored.
        If `max_inflight_bytes` are on their way already, it waits or raises `Busy`, as the client was told.

        Without ``key`` it is a scratch bundle: in host memory, restorable in this process only, and gone when its
        handle is.
        With one it can be restored anywhere, ``durability``, ``ttl`` (seconds) and ``if_exists`` as in `Store.put`.
        ``args``, as in `restore`, records digests of the arguments that are not saved, so that a restore with other
        values, such as updated weights, is refused.
        ``user`` is a small map of labels.
        ``progress`` is called in another thread with how many of how many bytes have gone, such as `ProgressBar`.

        Raises TypeError for what is no VJP object, `LeafUnavailable` for a leaf that was deleted or is being traced,
        `InvalidKey` and `InvalidOption`.
        Whatever `Store.put` raises is raised by `Handle.wait`, by the next call that needs the bundle, and by `flush`.

        >>> y, f_vjp = jax.vjp(layer, W, x, saveable_args=(False, True))
        >>> client.offload(f_vjp, "exp1/step-12/layer-3").wait().durability
        'host'
        """
        self._transfers.begin()
        settings, number, scratch = self.store.settings, next(self._numbers), key is None
        if key is None:
            key = f"{self._scratch}/{number}"
            durability, ttl = durability or "host", settings.scratch_ttl_seconds if ttl is None else ttl
        terms = Terms(key=check_key(key, settings), durability=durability, ttl=ttl, if_exists=if_exists)
        terms.check(settings)
        known = check_vjp(vjp, self._programs.linearized)
        residuals = residuals_of(vjp, known, longest_path=settings.max_path_chars)
        spread = spread_of(residuals, None if scratch else key)
        user = with_attempt(user, spread)
        with self._attempts.begun(key, spread, residuals) as offload:
            check_readable(residuals)
            program = None if scratch else self._programs.of(vjp, known)
            manifest = offload.named(
                manifest_of(vjp, known, residuals, program, key=key, settings=settings, args=args, user=user)
            )
            check_precision([(leaf.path, leaf.dtype) for leaf in manifest.leaves])
            holding = Holding.of(residuals, None if spread is None else spread.part)
            offload.upload = self._transfers.take(
                manifest, holding, program, terms, named=not scratch, progress=progress
            )
        handle = Handle(
            key=key,
            fingerprint=manifest.fingerprint,
            scratch=scratch,
            local=Local.of(vjp, offload.upload, number=number, created=manifest.created),
            known_digest=offload.name,
        )
        if scratch:
            self._has_scratch = True
            weakref.finalize(handle, self._transfers.forget, offload.upload).atexit = False
        return self._transfers.noted(handle)

    def explain(
        self,
        vjp: Any,
        *,
        forward: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        run: str | None = None,
    ) -> Explanation:
        """What an offload of this VJP object would send, and where each leaf comes from; see `residual_client.explain`.

        With ``run``, the first segment of the key, the store is asked which large leaves that run holds already; digests
        are sent, and those leaves stay for ``dedup_seconds`` at least.

        >>> print(client.explain(f_vjp).summary.partition(": ")[2])
        2 leaves, 80 B as arrays, 8 B to send
        """
        held = None if run is None else partial(self.store.held, run)
        return explain(
            vjp, forward=forward, args=args, settings=self.store.settings, staging=self._staging, held=held
        )

    # Restore

    def restore(
        self,
        source: Handle | str,
        *,
        args: Sequence[Any] | None = None,
        like: Any = None,
        as_numpy: bool = False,
        wait: float = 0.0,
    ) -> Any:
        """The VJP object again, with the leaves as they were.

        ``source`` is a handle or a key.
        ``args`` follows the arguments of the forward call, one entry each, None for one that needs nothing; it fills
        only what is missing. Without ``args``, what is missing stays a ``NotSaveable()`` for you to fill.
        ``like`` is the VJP object of the same function, real or abstract, such as
        ``jax.eval_shape(forward, *args)[1]``; it is needed unless this process has traced the program itself.
        Leaves go to where those of ``like`` are, if it is real, and else to a mesh like the one that they were on.
        With ``as_numpy`` they are host arrays, whatever devices they were on; PRNG keys stay arrays of JAX.
        ``wait`` is how many seconds to wait for a bundle that another process is about to store.

        Raises `NotFound`, `ProgramMismatch` with the first difference, `ArgumentMismatch` naming the leaf, and others
        below `GradientRefused` wherever going on could give a wrong gradient.

        >>> f_vjp = client.restore(handle, args=(W, None))
        """
        key, bundle = self._get(source, wait)
        treedef, placements = self._treedef(source, key, bundle, like)
        return rebuild(
            bundle, treedef, placements, key=key, args=args, staging=self._staging, as_numpy=as_numpy
        )

    def _get(self, source: Handle | str, wait: float) -> tuple[str, Bundle]:
        if not trace_state_clean():
            raise LeafUnavailable(
                "a bundle was asked for while JAX traces a function, which would bake its values into the program; "
                "get it outside of jax.jit and pass the VJP object in"
            )
        return self._transfers.bundle(source, wait)

    def _treedef(self, source: Handle | str, key: str, bundle: Bundle, like: Any) -> tuple[Any, Any]:
        if like is not None:
            program = self._programs.of(like, check_vjp(like))
            leaves = tree_leaves(like)
            check_program(bundle.manifest, program, leaves, key=key, store=self.store)
            return program.treedef, placements_like(leaves, bundle.manifest.leaves)
        treedef = self._known(source, bundle)
        if treedef is None:
            raise not_traced(bundle.manifest, key)
        local = source.local if isinstance(source, Handle) else None
        return treedef, None if local is None else local.placements

    def _known(self, source: Handle | str, bundle: Bundle) -> Any:
        """The treedef of a VJP object that this process has had, or None."""
        if isinstance(source, Handle) and source.local is not None:
            return source.local.treedef
        known = self._programs.known(bundle.manifest.fingerprint)
        return None if known is None else known.treedef

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Fetch bundles in the background, in this order, so that their restore finds them here.

        It does so for at most `prefetch_bytes`, and what is beyond them is fetched when it is restored.
        After each restore of a handle, those that were offloaded before it are fetched in this way by themselves, the newest
        first.

        >>> client.prefetch([handle])
        """
        self._transfers.prefetch(handles)

    def delete(self, source: Handle | str) -> None:
        """Delete a bundle, with a handle not one that stands in its place; one that is not stored yet will not be.

        >>> client.delete(handle)
        """
        self._transfers.delete(source)

    # Functions with the store inside

    fwd_and_bwd = transforms.fwd_and_bwd
    offloaded = transforms.offloaded

    # The source-free backward

    def backward(self, source: Handle | str, *, wait: float = 0.0) -> Backward:
        """The stored backward of a bundle, which needs no model source.

        Raises `ProgramUnavailable` with the reason if the bundle has none, and `DataLoss`, `ProgramMismatch`,
        `PrecisionMismatch` or `MeshMismatch` if it cannot be trusted or cannot run here.

        >>> dW, dx = client.backward("exp1/step-12/layer-3")(y_bar, args=(W, None))
        """
        key, bundle = self._get(source, wait)
        with about(key):
            check_widths(bundle.manifest)
        stored = source.wait if isinstance(source, Handle) and source.local is not None else None
        call = self._calls.of(key, bundle.manifest, stored=stored)
        with about(key):
            leaves = place_anywhere(bundle, staging=self._staging)
            return Backward(key, bundle.manifest, leaves, call, treedef=self._known(source, bundle))
