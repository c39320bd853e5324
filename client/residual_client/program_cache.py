"""The programs that a process has traced: each lowered once, stored once, and known by treedef and by fingerprint."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.tree_util import tree_flatten

from residual_client.jax_compat import TreeDef, is_fresh, linearized, trace_context
from residual_client.linearization import Linearized
from residual_client.program import Program, lower
from residual_store.bundle import digest_of
from residual_store.store import Store

__all__ = ["EagerForwardWarning", "ProgramCache", "keep"]

type Identity = tuple[TreeDef, tuple[Any, ...], tuple[Any, ...]]

_KEPT = 128


class EagerForwardWarning(UserWarning):
    """The forward runs outside of `jax.jit`, so its backward is traced and lowered again at every call."""


class ProgramCache:
    """A bounded cache in front of `residual_client.program.lower`.

    A jitted forward returns the same treedef at every step, so it is lowered once.
    An eager one returns a new treedef at every call; that is found by its fingerprint, after the work was done.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._by_identity: OrderedDict[Identity, Program] = OrderedDict()
        self._by_fingerprint: OrderedDict[str, Program] = OrderedDict()
        self._linearized: OrderedDict[int, tuple[Any, TreeDef, Linearized]] = OrderedDict()
        self._stored: set[str] = set()
        self._warned: set[str] = set()

    def linearized(self, vjp: Any) -> Linearized:
        """What a VJP object knows of its function; found again for one with the very same function, as of a jitted forward."""
        # Not the function itself, whose references `is_fresh` counts.
        function = vjp.fun.args
        with self._lock:
            found = self._linearized.get(id(function))
            if found is None or found[0] is not function or found[1] != vjp.in_tree:
                found = function, vjp.in_tree, linearized(vjp)
                keep(self._linearized, id(function), found)
            return found[2]

    def of(self, vjp: Any, known: Linearized) -> Program:
        """The program of a VJP object, whose leaves may be abstract."""
        fresh = is_fresh(vjp)
        key = _identity(vjp)
        with self._lock:
            program = self._by_identity.get(key)
            if program is None:
                lowered = lower(vjp, known, longest_path=self._store.settings.max_path_chars)
                program = self._note(key, lowered, fresh)
            self._by_identity.move_to_end(key)
            return program

    def _note(self, key: Identity, program: Program, fresh: bool) -> Program:
        twin = self.known(program.fingerprint)
        if twin is not None:
            program = replace(program, lowered=twin.lowered)
            if fresh:
                self._warn(program.function)
        keep(self._by_identity, key, program)
        if program.fingerprint is not None:
            keep(self._by_fingerprint, program.fingerprint, program)
        return program

    def _warn(self, function: str) -> None:
        if function not in self._warned:
            self._warned.add(function)
            warnings.warn(
                f"the forward of {function} was traced again for the same backward, which costs a lowering at "
                "every call; jit the forward: jax.jit(lambda *args: jax.vjp(f, *args))",
                EagerForwardWarning,
                skip_file_prefixes=(str(Path(__file__).parent),),
            )

    def known(self, fingerprint: str | None) -> Program | None:
        """The program with this fingerprint, if this process has traced it."""
        return self._by_fingerprint.get(fingerprint) if fingerprint is not None else None

    def store(self, program: Program, *, again: bool = False) -> bool:
        """Store the exported backward unless this process has done so already; false if the store does not have it then."""
        fingerprint, exported = program.fingerprint, program.lowered.exported
        if fingerprint is None or exported is None:
            return False
        if again or fingerprint not in self._stored:
            self._store.put_program(fingerprint, exported)
            self._stored.add(fingerprint)
        # The first program under a fingerprint stays, whoever has put it there.
        return not again or digest_of(self._store.get_program(fingerprint)) == digest_of(exported)


def _identity(vjp: Any) -> Identity:
    """What the program of a VJP object depends on.

    Its treedef; the abstract values of its leaves, as a mapped one has the treedef of the one that it came from; and the
    settings of JAX, under which its rules are traced now.
    """
    leaves, treedef = tree_flatten(vjp)
    avals = tuple((leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))) for leaf in leaves)
    return treedef, avals, trace_context()


def keep[K, V](cache: OrderedDict[K, V], key: K, value: V) -> None:
    """Put into a cache, which lets go of what was put in long ago."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _KEPT:
        cache.popitem(last=False)
