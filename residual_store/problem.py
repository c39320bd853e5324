"""A problem: an error as the body of an ``application/problem+json`` answer (RFC 9457), and back."""

from __future__ import annotations

from collections.abc import Mapping

from residual_store.errors import ERRORS, Field, InternalError, ResidualStoreError

__all__ = ["MEDIA_TYPE", "error_from_problem", "problem_of"]

MEDIA_TYPE = "application/problem+json"


def problem_of(error: ResidualStoreError) -> dict[str, Field]:
    """The body for an error: its fields, and type, title, status, code and detail.

    >>> from residual_store.errors import NotFound
    >>> problem_of(NotFound("there is no bundle 'exp1/step-1'"))["code"]
    'not-found'
    """
    return {
        **error.fields,
        "type": f"urn:residual-store:error:{error.code}",
        "title": type(error).__name__,
        "status": error.status or 500,
        "code": error.code,
        "detail": error.detail,
    }


def error_from_problem(problem: Mapping[str, object], status: int) -> ResidualStoreError:
    """The exception that a problem+json body stands for; an unknown code becomes `InternalError`.

    >>> type(error_from_problem({"code": "busy", "detail": "later", "retry_after": 1}, 429)).__name__
    'Busy'
    """
    kind = ERRORS.get(str(problem.get("code")), InternalError)
    detail = problem.get("detail")
    known = {"type", "title", "status", "code", "detail"}
    fields: dict[str, Field] = {
        name: value
        for name, value in problem.items()
        if name not in known and (value is None or isinstance(value, str | int | float | bool))
    }
    if kind is InternalError:
        fields.setdefault("http_status", status)
    return kind(detail if isinstance(detail, str) else f"the server answered {status}", **fields)
