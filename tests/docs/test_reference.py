"""The reference pages name everything that there is, and nothing that there is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import typer.main

from residual_server import create_app
from residual_store import Bundle, Settings, cli
from residual_store.dtypes import DTYPES
from residual_store.engine.local import LocalStore
from residual_store.errors import ERRORS
from residual_store.key import check_key
from residual_store.leaf import Aval, Leaf, MeshSharding
from residual_store.manifest import Argument, Manifest
from residual_store.tables import in_units
from tests.docs.pages import PAGES, ROOT, page, sections, table
from tests.servers import Server

APP = create_app(LocalStore.in_memory(settings=Settings()))


def _code(text: str) -> str:
    return f"`{text}`"


# Modules


def test_every_module_stands_on_the_page_of_the_architecture() -> None:
    """A newcomer finds what each one is for."""
    text = page("docs/architecture.md")
    folders = ("residual_store", "residual_store/engine", "server/residual_server", "client/residual_client")
    modules = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).glob("[a-z]*.py")]
    assert len(modules) > 100
    assert [module for module in modules if f"(../{module})" not in text] == []


# Settings and options


def test_every_setting_is_documented_as_it_is() -> None:
    """Name, default, unit and reason of each setting stand in docs/settings.md as in the code, in the same order."""
    wanted = []
    for setting in fields(Settings):
        default, unit = setting.default, setting.metadata["unit"]
        assert isinstance(default, int | float)
        shown = _code(f"{default:_}")
        if unit == "bytes" and default >= 1024:
            shown += f" ({in_units(default)})"
        name, variable = _code(setting.name), _code(f"RESIDUAL_STORE_{setting.name.upper()}")
        wanted.append([name, variable, shown, unit, setting.metadata["reason"]])
    assert table(sections(page("docs/settings.md"), 2)["The table"]) == wanted


def _commands() -> dict[str, Any]:
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def test_every_command_is_documented() -> None:
    """docs/settings.md has a section for each command of `residual-store` and for no other."""
    documented = [heading for heading in sections(page("docs/settings.md")) if "residual-store" in heading]
    assert documented == [f"residual-store {name}" for name in _commands()]


@pytest.mark.parametrize("name", _commands())
def test_every_option_of_a_command_is_documented(name: str) -> None:
    """Each option and argument of a command stands in its table with its default, and no other does."""
    rows = table(sections(page("docs/settings.md"))[f"residual-store {name}"])
    documented = {option: default for option, default, _ in rows}
    wanted = {}
    for parameter in _commands()[name].params:
        shown = parameter.opts[0] if parameter.opts[0].startswith("--") else parameter.name.upper()
        default = parameter.default if parameter.default not in (None, False, "") else None
        wanted[_code(shown)] = "" if default is None or parameter.required else _code(str(default))
    assert documented == wanted
    assert all(meaning for *_, meaning in rows)


# Errors


def test_every_error_is_documented() -> None:
    """docs/errors.md has one row for each error, with its class, code and status, what it means and what to do."""
    rows = table(page("docs/errors.md"))
    documented = {code: (name, status) for name, code, status, _, _ in rows}
    assert documented == {
        _code(code): (_code(kind.__name__), str(kind.status or "-")) for code, kind in ERRORS.items()
    }
    assert all(meaning and advice for *_, meaning, advice in rows)


# Routes


def _operations() -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, operations in APP.openapi()["paths"].items()
        for method, operation in operations.items()
    }


def _route_sections() -> dict[str, str]:
    return {
        heading: text
        for heading, text in sections(page("docs/http.md")).items()
        if re.match(r"[A-Z]+ /", heading)
    }


def test_every_route_is_documented() -> None:
    """docs/http.md has a section for each method and path, and for no other."""
    built_in = {f"GET {path}" for path in (APP.openapi_url, APP.docs_url, APP.redoc_url)}
    assert set(_route_sections()) == set(_operations()) | built_in


@pytest.mark.parametrize("name", _operations())
def test_every_parameter_of_a_route_is_documented(name: str) -> None:
    """Each parameter stands in the table of its route with its place and default, and no other does."""
    documented = {
        (parameter, place): default for parameter, place, default, _ in table(_route_sections()[name])
    }
    wanted = {}
    for parameter in _operations()[name].get("parameters", []):
        default = parameter["schema"].get("default")
        key = (_code(parameter["name"]), parameter["in"])
        wanted[key] = "required" if parameter["required"] else _code(str(default)) if default else ""
    assert documented == wanted


@pytest.mark.parametrize("name", _operations())
def test_every_status_of_a_route_is_documented(name: str) -> None:
    """The section of a route names its good statuses, and only error codes that exist, each with its status."""
    text = _route_sections()[name]
    good = {status for status in _operations()[name]["responses"] if status != "default"}
    assert good <= set(re.findall(r"\b[23]\d\d\b", text))
    for status, code in re.findall(r"(\d{3}) `([a-z-]+)`", text):
        assert str(ERRORS[code].status) == status


def test_every_get_route_answers_head(memory_server: Server) -> None:
    """As docs/http.md says, HEAD works wherever GET does."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", memory_server.port, timeout=30)
    for name in _route_sections():
        method, _, path = name.partition(" ")
        if method == "GET":
            connection.request("HEAD", path.format(key="docs/none", index=0, fingerprint="0" * 64))
            answer = connection.getresponse()
            assert not answer.read()
            assert answer.status in (200, 404), name
    connection.close()


def test_every_metric_is_documented() -> None:
    """The section of /metrics names each metric that the server exposes, and no other."""
    from prometheus_client.parser import text_string_to_metric_families

    from residual_server.metrics import Metrics

    with LocalStore.in_memory(settings=Settings()) as store:
        metrics = Metrics(store)
        metrics.requests.labels("GET", "200").inc()
        text, _ = metrics.render()
    samples = {
        sample.name
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    named = set(re.findall(r"`(residual_store_\w+)`", _route_sections()["GET /metrics"]))
    assert named == samples


# The format


@pytest.mark.parametrize(
    "kind", [Manifest, Leaf, Argument, Aval, MeshSharding], ids=lambda kind: kind.__name__
)
def test_every_field_of_the_manifest_is_documented(kind: Any) -> None:
    """docs/format.md has one row for each field of the manifest, in its order."""
    rows = table(sections(page("docs/format.md"))[kind.__name__])
    assert [name for name, *_ in rows] == [_code(name) for name in signature(kind).parameters]


def test_every_dtype_is_documented() -> None:
    """docs/format.md names each dtype; the 1-bit types need a newer ml_dtypes than the oldest one allowed."""
    named = {
        name.strip("`")
        for names, *_ in table(sections(page("docs/format.md"), 2)["Dtypes"])
        for name in names.split(", ")
    }
    assert set(DTYPES) <= named
    assert named - set(DTYPES) <= {"int1", "uint1"}


def test_the_reserved_words_of_a_key_are_documented() -> None:
    """The words that docs/format.md says no key may have are refused by the code."""
    (line,) = [line for line in page("docs/format.md").splitlines() if "names a route" in line]
    words = re.findall(r"`([a-z]+)`", line)
    assert len(words) == 4
    for word in words:
        with pytest.raises(ValueError, match=word):
            check_key(f"run/{word}", Settings())


# All pages


def _names_in_docs(pattern: str) -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for name in re.findall(pattern, path.read_text(), flags=re.MULTILINE):
            yield str(path.relative_to(ROOT)), name


def test_every_environment_variable_in_the_docs_exists() -> None:
    """No page names a variable that nothing reads."""
    known = {f"RESIDUAL_STORE_{setting.name.upper()}" for setting in fields(Settings)}
    known |= {"RESIDUAL_STORE_URL", "RESIDUAL_STORE_TOKEN"}
    for place, name in _names_in_docs(r"RESIDUAL_STORE_[A-Z_]+[A-Z]"):
        assert name in known, place


def test_every_command_in_the_docs_exists() -> None:
    """No page calls a command of `residual-store` or a target of make that there is not."""
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), flags=re.MULTILINE))
    for place, name in _names_in_docs(r"(?:^|`)residual-store ([a-z]+)"):
        assert name in _commands(), place
    for place, name in _names_in_docs(r"(?:^|`)make ([a-z-]+)"):
        assert name in targets, place


def test_a_bundle_has_the_size_that_the_docs_count() -> None:
    """The overhead of a frame is one page of 4,096 bytes for a small manifest, as docs/format.md says."""
    from residual_store.frame import frame_head

    assert len(frame_head(Bundle.of_arrays({"h": [1.0, 2.0]}).manifest)) == 4096
