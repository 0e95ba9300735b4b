"""An application as an AsyncAPI 3 document: channels, messages and operations, for readers who have no Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetspark.app.contracts.catalogue import Contract, contract_of
from jetspark.app.contracts.schemas import document

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = ["asyncapi"]

_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": "string", "format": "date-time"}
_HEADERS = {
    "type": "object",
    "properties": {
        "Nats-Msg-Id": {**_TEXT, "description": "The id of the event: by it the stream knows a duplicate."},
        "traceparent": {"type": "string", "description": "The trace it belongs to, in W3C form."},
    },
    "required": ["Nats-Msg-Id"],
}


def asyncapi(app: HasSpec, *, version: str | None = None) -> dict[str, Any]:
    """The document; its version is that of the application (``App(version=)``), unless another is given."""
    app = app.spec
    contracts = list(app.catalogue)
    schemas: dict[str, object] = {}
    for contract in contracts:
        schemas.update(_schemas(contract))
    return {
        "asyncapi": "3.0.0",
        "info": {"title": app.name, "version": app.version if version is None else version},
        "defaultContentType": "application/json",
        "channels": {_channel(contract): _described(contract, contracts) for contract in contracts},
        "operations": _operations(app, contracts),
        "components": {
            "messages": {_name(contract): _message(contract, app.source) for contract in contracts},
            "schemas": schemas,
        },
    }


def _name(contract: Contract) -> str:
    return f"{contract.type}.v{contract.version}"


def _channel(contract: Contract) -> str:
    """Versions of a type share a channel as long as they share a subject."""
    return contract.subject.text.replace("{", "").replace("}", "")


def _described(contract: Contract, contracts: list[Contract]) -> dict[str, object]:
    same = [each for each in contracts if each.subject.text == contract.subject.text]
    result: dict[str, object] = {
        "address": contract.subject.text,
        "messages": {_name(each): {"$ref": f"#/components/messages/{_name(each)}"} for each in same},
    }
    if contract.subject.fields:
        text = "From the event's field, escaped: all but letters, digits, _ and - is = and two hex digits."
        result["parameters"] = {name: {"description": text} for name in contract.subject.fields}
    return result


def _operations(app: AppSpec, contracts: list[Contract]) -> dict[str, object]:
    operations: dict[str, object] = {}
    for contract in contracts if app.owns_stream else []:
        operations[f"send.{_name(contract)}"] = {"action": "send", **_reference(contract)}
    for spec in app.handlers.values():
        for kind in spec.events:
            contract = contract_of(kind)
            name = f"receive.{spec.name}.{_name(contract)}"
            operations[name] = {"action": "receive", "title": spec.name, **_reference(contract)}
    return operations


def _reference(contract: Contract) -> dict[str, object]:
    channel = f"#/channels/{_channel(contract)}"
    return {"channel": {"$ref": channel}, "messages": [{"$ref": f"{channel}/messages/{_name(contract)}"}]}


def _message(contract: Contract, source: str) -> dict[str, object]:
    attributes: dict[str, object] = {
        "specversion": {"const": "1.0"},
        "id": _TEXT,
        "source": {"type": "string", "examples": [source]},
        "type": {"const": contract.type},
        "time": _TIME,
        "subject": {"type": "string", "description": "The key of the event."},
        "datacontenttype": {"const": "application/json"},
        "schemaversion": {"const": contract.version},
        "correlationid": _TEXT,
        "causationid": _TEXT,
        "data": {"$ref": f"#/components/schemas/{_name(contract)}"},
    }
    required = ["specversion", "id", "source", "type", "schemaversion", "data"]
    return {
        "name": contract.type,
        "title": f"{contract.type} version {contract.version}",
        "contentType": "application/cloudevents+json",
        "headers": _HEADERS,
        "payload": {"type": "object", "properties": attributes, "required": required},
    }


def _schemas(contract: Contract) -> dict[str, object]:
    """The schema of the data and of each type in it, with references that hold in the document."""
    name = _name(contract)
    schema = document(contract)
    own = schema.pop("$defs", {})
    schema.pop("$schema", None)
    found = {name: schema} | {f"{name}.{inner}": value for inner, value in own.items()}
    return {key: _moved(value, name) for key, value in found.items()}


def _moved(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {
            word: _target(each, name) if word in ("$ref", "mapping") else _moved(each, name)
            for word, each in value.items()
        }
    return [_moved(each, name) for each in value] if isinstance(value, list) else value


def _target(value: object, name: str) -> object:
    if isinstance(value, dict):  # the mapping of a discriminator
        return {tag: _target(each, name) for tag, each in value.items()}
    return value.replace("#/$defs/", f"#/components/schemas/{name}.") if isinstance(value, str) else value
