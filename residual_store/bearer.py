"""The bearer: a token as a client sends it."""

from __future__ import annotations

import re

from residual_store.errors import InvalidOption

__all__ = ["check_token"]


def check_token(token: str | None) -> str | None:
    """The token without white space around it, as a file has at its end; raises `InvalidOption`, which does not show it.

    >>> check_token("secret\\n")
    'secret'
    """
    if token is None:
        return None
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token.strip()):
        raise InvalidOption(
            "the token is empty or has characters that no header can carry; pass its text alone",
            option="token",
        )
    return token.strip()
