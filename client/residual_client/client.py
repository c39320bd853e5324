"""The client: offload a VJP object, restore it, or apply its stored backward."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.tree_util import tree_leaves, tree_structure

from residual_client.backward import Backward, Call, load_program
from residual_client.explain import explain
from residual_client.explanation import Explanation
from residual_client.handle import Handle, Local
from residual_client.jax_compat import release_dead_arrays, trace_state_clean
from residual_client.offload import bundle_of
from residual_client.program_cache import ProgramCache
from residual_client.refusals import about
from residual_client.restore import check_program, check_widths, place_anywhere, placements_like, rebuild
from residual_client.sharding import Attempts, own_pieces
from residual_client.staging import Staging
from residual_client.transfer import abstract, check_precision, placement_of, start_copies
from residual_client.vjp import check_vjp, residuals_of
from residual_store.bundle import Bundle
from residual_store.closing import ClosedAtExit
from residual_store.errors import (
    BundleReplaced,
    DataLoss,
    LeafUnavailable,
    NotFound,
    ProgramUnavailable,
    StoreUnavailable,
)
from residual_store.manifest import Manifest, UserValue
from residual_store.parts import attempt_of
from residual_store.settings import Settings
from residual_store.stat import digest_of_manifest
from residual_store.store import Durability, IfExists, Store, open_store

__all__ = ["Client", "connect"]


def connect(url: str | None = None, *, token: str | None = None, settings: Settings | None = None) -> Client:
    """A client of the store at ``url``.

    ``http://``, ``https://`` and ``unix://`` reach a server; ``memory://``, ``file:///path`` and any other tensorstore
    URL open the engine in this process.
    The defaults are ``$RESIDUAL_STORE_URL``, else ``memory://``, and ``$RESIDUAL_STORE_TOKEN``.

    >>> connect("memory://").store.url
    'memory://'
    """
    url = url or os.environ.get("RESIDUAL_STORE_URL") or "memory://"
    if token is None and url.partition("://")[0] in ("http", "https", "unix"):
        token = os.environ.get("RESIDUAL_STORE_TOKEN")
    return Client(open_store(url, token=token, settings=settings))


class Client(ClosedAtExit):
    """JAX in front of a store; safe to use from several threads.

    >>> with connect("memory://") as client:
    ...     y, f_vjp = jax.vjp(jnp.sin, jnp.ones(2))
    ...     client.offload(f_vjp).wait().leaves
    1
    """

    def __init__(self, store: Store, *, staging: Staging | None = None) -> None:
        self.store = store
        self._staging = staging or Staging(window_bytes=store.settings.staging_bytes)
        self._programs = ProgramCache(store)
        self._attempts = Attempts(store.settings)
        self._calls: dict[str, Call] = {}
        self._scratch = f"scratch/{secrets.token_hex(8)}"
        self._scratch_numbers = itertools.count()
        self._has_scratch = False
        self._dead: deque[str] = deque()

    def __repr__(self) -> str:
        return f"Client({self.store.url!r})"

    def close(self) -> None:
        """Delete this client's scratch bundles and release the store; a server that is gone forgets them by their lease."""
        try:
            with contextlib.suppress(StoreUnavailable):
                if self._has_scratch:
                    self.store.delete_prefix(f"{self._scratch}/")
        finally:
            self.store.close()

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
    ) -> Handle:
        """Store the residuals of a VJP object; what is stored are the bytes of this moment.

        Without ``key`` it is a scratch bundle: in host memory, restorable in this process only, and gone when its
        handle is.
        With one it can be restored anywhere, ``durability``, ``ttl`` (seconds) and ``if_exists`` as in `Store.put`.
        ``args``, as in `restore`, records digests of the arguments that are not saved, so that a restore with other
        values, such as updated weights, is refused.
        ``user`` is a small map of labels.

        Raises TypeError for what is no VJP object, `LeafUnavailable` for a leaf that was deleted or is being traced,
        and whatever `Store.put` raises.

        >>> y, f_vjp = jax.vjp(layer, W, x, saveable_args=(False, True))
        >>> client.offload(f_vjp, "exp1/step-12/layer-3").wait().durability
        'host'
        """
        self._forget_dead()
        settings = self.store.settings
        known = check_vjp(vjp)
        residuals = residuals_of(vjp, known, longest_path=settings.max_path_chars)
        check_precision([(residual.path, abstract(residual.value).dtype) for residual in residuals])
        part, user = self._attempts.part_of(residuals, key, user)
        copies = (start_copies if part is None else own_pieces)(residuals, self._staging)
        program = None if key is None else self._programs.of(vjp, known)
        if program is not None:
            self._programs.store(program)
        scratch = key is None
        if key is None:
            key = f"{self._scratch}/{next(self._scratch_numbers)}"
            durability, ttl = durability or "host", settings.scratch_ttl_seconds if ttl is None else ttl
        bundle = bundle_of(
            vjp, known, residuals, copies, program, key=key, settings=settings, args=args, user=user
        )
        receipt = self.store.put(key, bundle, durability=durability, ttl=ttl, if_exists=if_exists, part=part)
        if program is not None and not receipt.has_program:
            # The store has forgotten it, as a server in memory does when it starts anew.
            receipt = replace(receipt, has_program=self._programs.store(program, again=True))
        handle = Handle(
            key=key,
            digest=attempt_of(bundle.manifest) or receipt.digest,
            fingerprint=program.fingerprint if program is not None else None,
            scratch=scratch,
            receipt=receipt,
            local=Local(tree_structure(vjp), [placement_of(leaf) for leaf in tree_leaves(vjp)]),
        )
        if scratch:
            self._has_scratch = True
            weakref.finalize(handle, self._dead.append, key)
        return handle

    def _forget_dead(self) -> None:
        """Let go of what nobody refers to: memory under dead arrays, and scratch bundles whose handles are gone.

        A finalizer must not talk to a server itself.
        """
        release_dead_arrays()
        while self._dead:
            try:
                self.store.delete(self._dead.popleft())
            except NotFound:
                continue

    def explain(
        self, vjp: Any, *, forward: Callable[..., Any] | None = None, args: Sequence[Any] = ()
    ) -> Explanation:
        """What an offload of this VJP object would send, and where each leaf comes from; see `residual_client.explain`.

        >>> print(client.explain(f_vjp).summary.partition(": ")[2])
        2 leaves, 80 B as arrays, 8 B to send
        """
        return explain(vjp, forward=forward, args=args, settings=self.store.settings, staging=self._staging)

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
        """Key and bundle of a handle or key; raises `BundleReplaced` if the bundle is not that of the handle."""
        self._forget_dead()
        if not trace_state_clean():
            raise LeafUnavailable(
                "a bundle was asked for while JAX traces a function, which would bake its values into the program; "
                "get it outside of jax.jit and pass the VJP object in"
            )
        key = source.key if isinstance(source, Handle) else source
        bundle = self._attempts.get(self.store, source, wait=wait)
        if bundle.manifest.key not in (None, key):
            raise DataLoss(f"the store answered {key!r} with the bundle of {bundle.manifest.key!r}", key=key)
        names = (digest_of_manifest(bundle.manifest), attempt_of(bundle.manifest))
        if isinstance(source, Handle) and source.digest not in names:
            raise BundleReplaced(
                f"the bundle {key!r} was replaced after this handle was made; use the key if the new one is wanted",
                key=key,
            )
        return key, bundle

    def _treedef(self, source: Handle | str, key: str, bundle: Bundle, like: Any) -> tuple[Any, Any]:
        if like is not None:
            program = self._programs.of(like, check_vjp(like))
            leaves = tree_leaves(like)
            check_program(bundle.manifest, program, leaves, key=key, store=self.store)
            return program.treedef, placements_like(leaves, bundle.manifest.leaves)
        if isinstance(source, Handle) and source.local is not None:
            return source.local.treedef, source.local.placements
        known = self._programs.known(bundle.manifest.fingerprint)
        if known is None:
            raise ProgramUnavailable(
                f"this process has not traced the program of {key!r} ({bundle.manifest.function}); pass "
                "like=jax.eval_shape(forward, *args)[1] with the same forward, or use client.backward, "
                "which needs no source",
                key=key,
            )
        return known.treedef, None

    def delete(self, source: Handle | str) -> None:
        """Delete a bundle; one that is gone already is no error.

        >>> client.delete(handle)
        """
        with contextlib.suppress(NotFound):
            self.store.delete(source.key if isinstance(source, Handle) else source)

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
        call = self._call(key, bundle.manifest)
        with about(key):
            return Backward(key, bundle.manifest, place_anywhere(bundle, staging=self._staging), call)

    def _call(self, key: str, manifest: Manifest) -> Call:
        fingerprint = manifest.fingerprint
        if fingerprint is None or manifest.no_program is not None:
            raise ProgramUnavailable(f"{key!r} has no source-free backward: {manifest.no_program}", key=key)
        if fingerprint not in self._calls:
            try:
                program = self.store.get_program(fingerprint)
            except NotFound as error:
                raise ProgramUnavailable(
                    f"the program of {key!r} is not in the store: {error}", key=key
                ) from error
            self._calls[fingerprint] = load_program(program, manifest, key)
        return self._calls[fingerprint]
