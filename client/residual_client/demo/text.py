"""The text: Python's own documentation, as it comes with every CPython, cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Self

import numpy as np
import numpy.typing as npt

__all__ = ["Corpus", "Microbatch"]

type Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Character codes, and at each place the code that follows; both [sequence, place]."""

    tokens: Codes
    targets: Codes


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A text as codes: indices into its sorted ``characters``."""

    characters: str
    codes: Codes

    @classmethod
    def of_topics(cls) -> Self:
        """The help topics of `pydoc`, about half a million characters of English.

        >>> len(Corpus.of_topics().characters) < 200
        True
        """
        text = "\n".join(topics[name] for name in sorted(topics))
        characters, codes = np.unique(np.array(list(text)), return_inverse=True)
        return cls(characters="".join(characters), codes=codes.astype(np.int32))

    def microbatches(self, step: int, *, count: int, sequences: int, length: int) -> list[Microbatch]:
        """The microbatches of a step, the same whenever they are asked for."""
        random = np.random.default_rng(step)
        starts = random.integers(len(self.codes) - length, size=(count, sequences, 1))
        windows = self.codes[starts + np.arange(length + 1)]
        return [Microbatch(tokens=window[:, :-1], targets=window[:, 1:]) for window in windows]
