"""Shards: arrays as the blocks that lie on single devices, each block once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from residual_client.transfer import Residual, is_key
from residual_store.blocks import Start

__all__ = ["Shards", "block_start", "data_of", "distinct_shards"]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One array of this ``shape`` as blocks by their start; ``path`` is that of its leaf."""

    path: str
    shape: tuple[int, ...]
    blocks: Mapping[Start, Any]

    @classmethod
    def of(cls, residual: Residual) -> Self:
        """Those of a leaf that this process can address as a whole; of typed PRNG keys their data."""
        data = data_of(residual.value)
        return cls(path=residual.path, shape=tuple(data.shape), blocks=distinct_shards(data))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(int(block.nbytes) for block in self.blocks.values())


def data_of(value: Any) -> Any:
    """The array that holds the values: of typed PRNG keys their data."""
    return jax.random.key_data(value) if is_key(value) else value


def distinct_shards(value: Any) -> dict[Start, Any]:
    """The single-device arrays of a value that this process can address, by their start, each block once."""
    if not isinstance(value, jax.Array) or value.sharding.num_devices == 1:
        return {(0,) * value.ndim: value}
    return {block_start(shard.index): shard.data for shard in reversed(value.addressable_shards)}


def block_start(index: tuple[slice, ...]) -> Start:
    """Where the block of an array with this index starts."""
    return tuple(one.start or 0 for one in index)
