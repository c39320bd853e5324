"""Adjoint requests: adjoints that another process computes, where each request is a bundle and so is its answer.

A request lies at ``<key>/request/<number>`` and holds the two arguments of the adjoint; its answer lies at
``<key>/answer/<number>-<token>`` and holds the floating-point leaves of the gradient, or an error as a label.
The token is a random text of the request: numbers start anew with each process, and an answer may come late.
Whoever deletes the request has claimed it.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jax.tree_util import tree_flatten

from residual_client.jax_compat import TreeDef
from residual_client.pending import Pending
from residual_client.simulator import check_wide, is_floating, matching_leaves, name_of
from residual_client.transfer import abstract
from residual_client.trees import argument_paths, build, describe
from residual_store.bundle import Bundle
from residual_store.errors import AlreadyExists, InvalidOption, NotFound, ResidualStoreError
from residual_store.leaf import Leaf
from residual_store.manifest import Argument, Manifest, UserValue
from residual_store.stat import digest_of_manifest
from residual_store.store import Store

__all__ = ["AdjointRequests", "HasStore", "serve_adjoints"]

_LONGEST_ERROR = 2000
_LOOK_SECONDS = 1.0


class HasStore(Protocol):
    """A client, of which only the store is used here."""

    @property
    def store(self) -> Store: ...


class AdjointRequests:
    """Puts requests below ``key``, which one function must have for itself; each lives for ``seconds``."""

    def __init__(self, store: Store, key: str, *, seconds: float) -> None:
        self._store = store
        self._key = key
        self._seconds = seconds
        self._numbers = itertools.count()

    def __call__(self, x: Any, y_bar: Any) -> Pending:
        token = secrets.token_hex(8)
        place, digest = self._put(_request(x, y_bar, {"ttl": self._seconds, "token": token}))
        asked = _Asked(place, digest, _answer_key(self._key, place, token))
        return _Requested(self._store, asked, tree_flatten(x), self._seconds)

    def _put(self, request: Bundle) -> tuple[str, str]:
        """Key and digest of a request, under the next number that no other process, alive or not, has taken."""
        while True:
            place = _request_key(self._key, next(self._numbers))
            with contextlib.suppress(AlreadyExists):
                return place, self._store.put(place, request, ttl=self._seconds).digest


@dataclass(frozen=True)
class _Asked:
    """Where a request is, by its digest, and where its answer will be."""

    request: str
    digest: str
    answer: str


class _Requested:
    """An adjoint that somebody else computes, as `Pending`."""

    def __init__(self, store: Store, asked: _Asked, x: tuple[list[Any], TreeDef], seconds: float) -> None:
        self._store = store
        self._asked = asked
        self._x = x
        self._ends = time.monotonic() + seconds
        self._arrived: Bundle | None = None
        self._arriving = threading.Lock()

    def result(self, timeout: float | None = None) -> Any:
        # One thread takes the answer, for all that wait for it.
        with self._arriving:
            if self._arrived is None:
                patience = max(self._ends - time.monotonic(), 0.0)
                self._arrived = self._await(patience if timeout is None else min(timeout, patience))
                self._delete(self._asked.answer)
        error = self._arrived.manifest.user.get("error")
        if error is not None:
            raise RuntimeError(
                f"the adjoint failed in the process that served {self._asked.request!r}: {error}"
            )
        leaves, treedef = self._x
        arrays = (self._arrived.array(leaf.index) for leaf in self._arrived.manifest.leaves)
        return treedef.unflatten([next(arrays) if is_floating(leaf) else None for leaf in leaves])

    def _await(self, seconds: float) -> Bundle:
        try:
            return self._store.get(self._asked.answer, wait=seconds)
        except NotFound as error:
            raise TimeoutError(
                f"nobody has answered {self._asked.request!r} in {seconds:.1f} seconds; does serve_adjoints run on {self._store.url}?"
            ) from error

    def cancel(self) -> bool:
        if self._arrived is None:
            self._delete(self._asked.request, self._asked.digest)
            self._delete(self._asked.answer)
        return self._arrived is None

    def _delete(self, key: str, digest: str | None = None) -> None:
        """Delete a bundle that would end with its lease anyway."""
        with contextlib.suppress(ResidualStoreError):
            self._store.delete(key, digest=digest)


def serve_adjoints(
    client: HasStore,
    adjoint: Callable[[Any, Any], Any],
    key: str,
    *,
    most: int | None = None,
    idle_seconds: float | None = None,
) -> int:
    """Compute the adjoints that ``eager_adjoint(..., client=..., key=key)`` asks for in other processes.

    Several workers may serve one key, each one request at a time.
    Returns how many were served: after ``most`` of them, or when none has come for ``idle_seconds`` seconds; None is for ever.
    ``x`` comes as numpy arrays in Python's own containers; a custom pytree type comes as a tuple.
    An error of ``adjoint`` goes to the process that asked, and serving goes on.

    Raises whatever the store raises.

    >>> serve_adjoints(client, lambda x, y_bar: 2 * x * y_bar, "exp1/adjoints", idle_seconds=0.1)
    0
    """
    served, requests = 0, _claimed(client.store, key, idle_seconds)
    while served != most and (claimed := next(requests, None)) is not None:
        place, request = claimed
        labels = request.manifest.user
        answer = _answer(adjoint, request)
        client.store.put(_answer_key(key, place, str(labels["token"])), answer, ttl=float(labels["ttl"]))
        served += 1
    return served


def _claimed(store: Store, key: str, idle_seconds: float | None) -> Iterator[tuple[str, Bundle]]:
    """Place and bundle of each request, as it comes, that nobody else has claimed."""
    following, since = 0, time.monotonic()
    while True:
        waiting = store.list(prefix=f"{key}/request/", limit=1).entries
        place = waiting[0].key if waiting else _request_key(key, following)
        try:
            # After a claim by somebody else the next one may have another number, so look again now and then.
            request = store.get(place, wait=min(_LOOK_SECONDS, idle_seconds or _LOOK_SECONDS))
            _check_is_request(place, request)
            store.delete(place, digest=digest_of_manifest(request.manifest))
        except NotFound:
            if idle_seconds is not None and time.monotonic() - since > idle_seconds:
                return
            continue
        yield place, request
        following, since = int(_last(place)) + 1, time.monotonic()


def _request_key(key: str, number: int) -> str:
    return f"{key}/request/{number:012}"


def _check_is_request(place: str, bundle: Bundle) -> None:
    if not {"ttl", "token"} <= bundle.manifest.user.keys():
        raise InvalidOption(
            f"the bundle {place!r} is no request for an adjoint; give the adjoints a key that nothing else is below",
            option="key",
        )


def _answer_key(key: str, request: str, token: str) -> str:
    return f"{key}/answer/{_last(request)}-{token}"


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _request(x: Any, y_bar: Any, user: Mapping[str, UserValue]) -> Bundle:
    hosts, treedef = tree_flatten((x, y_bar))
    paths = argument_paths(treedef)
    named = list(zip(paths, map(abstract, hosts), strict=True))
    manifest = Manifest(
        leaves=tuple(
            Leaf(index=index, channel="args_res", path=path, dtype=aval.dtype, shape=aval.shape)
            for index, (path, aval) in enumerate(named)
        ),
        arguments=tuple(Argument(path=path, state="saved", aval=aval) for path, aval in named),
        in_tree=tuple(describe(treedef)),
        created=time.time(),
        user=user,
    )
    return Bundle.encoded(manifest, hosts, identities=list(map(id, hosts)))


def _answer(adjoint: Callable[[Any, Any], Any], request: Bundle) -> Bundle:
    manifest = request.manifest
    try:
        x, y_bar = build(manifest.in_tree, [request.array(leaf.index) for leaf in manifest.leaves])
        what = f"the gradient of {name_of(adjoint)}"
        leaves = matching_leaves(adjoint(x, y_bar), x, what)
        check_wide(leaves, x, what)
        return Bundle.of_arrays({str(index): leaf for index, leaf in enumerate(leaves)})
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
        return Bundle.of_arrays({}, user={"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
