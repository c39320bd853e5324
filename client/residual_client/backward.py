"""The source-free backward: the exported program of a bundle, applied without the model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure

from residual_client.jax_compat import TreeDef, trace_state_clean
from residual_client.meshes import moved, named
from residual_client.program_cache import keep
from residual_client.refusals import about
from residual_client.transfer import abstract
from residual_client.trees import build, describe, difference
from residual_client.vjp import check_arguments, in_tree_of
from residual_store.bundle import digest_of
from residual_store.dtypes import DTYPES, FLOAT0
from residual_store.errors import (
    ArgumentMismatch,
    CotangentMismatch,
    MeshMismatch,
    NotFound,
    ProgramMismatch,
    ProgramUnavailable,
)
from residual_store.leaf import Aval
from residual_store.manifest import Manifest
from residual_store.store import Store

__all__ = ["Backward", "Calls"]

type Call = Callable[[list[Any], list[Any], list[Any]], Sequence[Any]]


class Backward:
    """A stored backward pass with its residuals: a function of the cotangent, like the VJP object that was stored.

    It runs the very program that `jax.jit` would compile out of the VJP object, so its bits are those of the jitted
    backward.

    >>> backward = client.backward("exp1/step-12/layer-3")
    >>> dW, dx = backward(y_bar, args=(W, None))
    """

    def __init__(
        self, key: str, manifest: Manifest, leaves: list[Any], call: Call, *, treedef: TreeDef | None
    ) -> None:
        self.key = key
        self._in_tree = None if treedef is None else in_tree_of(treedef)
        self._manifest = manifest
        self._leaves = leaves
        self._call = call

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself: leaves, arguments and what must be restored."""
        return self._manifest

    def __repr__(self) -> str:
        return f"Backward({self.key!r}, {self._manifest.function}, {len(self._leaves)} leaves)"

    def __call__(self, cotangent: Any, /, *, args: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The gradients, a tuple with one tree for each argument of the forward.

        ``cotangent`` has the tree, shapes and dtypes of the forward's output.
        ``args`` has one entry for each argument, None for one that needs nothing; its trees are those of the gradients.
        The gradient of an argument of a custom type whose entry is None is a tuple of its children.

        Raises `ArgumentMismatch` or `CotangentMismatch`, which name the leaf.
        """
        manifest = self._manifest
        with about(self.key):
            restored, cotangents = self._checked(cotangent, args)
        leaves = moved(self._leaves, live=[*restored, *cotangents])
        if trace_state_clean():
            self._leaves = leaves
        gradients = self._applied(leaves, restored, cotangents)
        trees = {index: tree_structure(arg) for index, arg in enumerate(args or ()) if arg is not None}
        result: tuple[Any, ...] = build(manifest.in_tree, gradients, like=trees)
        return result

    def _applied(self, *operands: list[Any]) -> Sequence[Any]:
        try:
            return self._call(*operands)
        except ValueError as error:
            shardings = [leaf.sharding for leaf in self._manifest.leaves if leaf.sharding is not None]
            if len({(one.axis_names, one.axis_sizes) for one in shardings}) < 2:
                raise
            raise MeshMismatch(
                f"{self.key!r}: its leaves are on {named(shardings)}, and JAX runs this stored program on one mesh only; "
                "restore it with like= from the source",
                key=self.key,
            ) from error

    def _checked(self, cotangent: Any, args: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        manifest = self._manifest
        values = check_arguments(args, manifest.arguments, manifest.in_tree, treedef=self._in_tree)
        needed = [index for index, argument in enumerate(manifest.arguments) if argument.must_be_restored]
        restored = [self._restored(values, index) for index in needed]
        return restored, _check_cotangent(cotangent, manifest)

    def _restored(self, values: dict[int, Any], index: int) -> Any:
        if index not in values:
            path = self._manifest.arguments[index].path
            raise ArgumentMismatch(
                f"{path} was marked not saveable, so its value is not in the bundle; pass it in args",
                leaf=path,
            )
        return values[index]


def _check_cotangent(cotangent: Any, manifest: Manifest) -> list[Any]:
    leaves, treedef = tree_flatten_with_path(cotangent)
    if text := difference(manifest.out_tree, describe(treedef), root="cotangent"):
        raise CotangentMismatch(f"the cotangent must have the tree of the function's output, but {text}")
    return [
        _check_cotangent_leaf(value, wanted, "cotangent" + keystr(path))
        for (path, value), wanted in zip(leaves, manifest.cotangents, strict=True)
    ]


def _check_cotangent_leaf(value: Any, wanted: Aval, path: str) -> Any:
    # As in JAX: the cotangent of an integer output says nothing, so anything of its shape will do.
    if wanted.dtype == FLOAT0 and np.shape(value) == wanted.shape:
        return np.zeros(wanted.shape, DTYPES[FLOAT0])
    try:
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        given = abstract(array)
    except (TypeError, ValueError) as error:
        raise CotangentMismatch(f"{path} is a {type(value).__name__}: {error}", leaf=path) from error
    if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
        raise CotangentMismatch(f"{path} is {given}, and the function's output there was {wanted}", leaf=path)
    return array


def _meshes(manifest: Manifest) -> str:
    return " and ".join(
        dict.fromkeys(str(leaf.sharding) for leaf in manifest.leaves if leaf.sharding is not None)
    )


class Calls:
    """Programs that were loaded from a store, by fingerprint, so that each is loaded once while it is in use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: str, manifest: Manifest, *, stored: Callable[[], object] | None = None) -> Call:
        """The program of a bundle; raises `ProgramUnavailable` with the reason if there is none, and `DataLoss`.

        ``stored`` waits until the bundle is stored, which may have been served from memory, and its program with it.
        """
        fingerprint = manifest.fingerprint
        if fingerprint is None or manifest.no_program is not None:
            raise ProgramUnavailable(f"{key!r} has no source-free backward: {manifest.no_program}", key=key)
        call = self._calls.get(fingerprint)
        if call is None:
            if stored is not None:
                stored()
            try:
                program = self._store.get_program(fingerprint)
            except NotFound as error:
                raise ProgramUnavailable(
                    f"the program of {key!r} is not in the store: {error}", key=key
                ) from error
            call = _load(program, manifest, key)
        with self._lock:
            keep(self._calls, fingerprint, call)
        return call


def _load(program: bytes, manifest: Manifest, key: str) -> Call:
    """The callable of an exported backward, once it is sure that it is the one of this bundle and can run here.

    Raises `ProgramMismatch`, `MeshMismatch` or `ProgramUnavailable`.
    """
    if digest_of(program) != manifest.program:
        raise ProgramMismatch(
            f"the program stored under the fingerprint of {key!r} is not the one that the bundle was stored with; "
            "it was neither read nor run; somebody has put it there first, so restore the bundle with like= from the source"
        )
    try:
        exported = export.deserialize(bytearray(program))
    except Exception as error:
        raise ProgramUnavailable(
            f"this jax {jax.__version__} cannot read the program of {key!r}, which jax "
            f"{manifest.versions.get('jax', '?')} exported: {type(error).__name__}: {error}"
        ) from error
    platform = export.default_export_platform()
    if platform not in exported.platforms:
        raise ProgramUnavailable(
            f"the program of {key!r} was exported for {', '.join(exported.platforms)} and this process runs on {platform}"
        )
    if exported.nr_devices not in (1, jax.device_count()):
        raise MeshMismatch(
            f"the program of {key!r} needs {exported.nr_devices} devices, as on {_meshes(manifest)}, and this process "
            f"has {jax.device_count()}"
        )
    call: Call = jax.jit(exported.call)
    return call
