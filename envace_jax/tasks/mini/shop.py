"""The embedded world: the back office of a small shop, executable, and small enough to be learned in minutes.

Orders have an id, a status (new → paid → shipped, or cancelled), an item, a quantity and a unit price. Seven tools read
and change them, and answer with the record as it then stands. Rules of the domain refuse some calls with an ordinary
result: the record and an `error`. Violations of the protocol (unknown tool, arguments that do not fit the schema) are
`{"error_tool_call": {...}}`, as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jsonschema

STATUSES = ("new", "paid", "shipped", "cancelled")
ITEMS = (
    *("lamp", "chair", "desk", "clock", "vase", "rug", "mirror", "shelf"),
    *("stool", "bed", "sofa", "plate", "cup", "bowl", "pan", "pot"),
)
MAX_QTY = 5
PRICES = tuple(range(2, 10))

_ORDER = {"type": "integer"}
_STATUS = {"type": "string", "enum": list(STATUSES)}
_QTY = {"type": "integer", "minimum": 1, "maximum": MAX_QTY}


def _tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _shape(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _result(*extra: tuple[str, Any], status: Mapping[str, Any] = _STATUS) -> dict[str, Any]:
    """The record as it now stands, with what else a tool adds; or as it stood, with the reason for a refusal."""

    def record(status: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        goods = {"item": {"type": "string"}, "qty": {"type": "integer"}, "price": {"type": "integer"}}
        return _shape(order=_ORDER, status=status, **goods, **more)

    refused = record(_STATUS, error={"type": "string", "enum": list(REFUSALS)})
    return {"anyOf": [record(status, **dict(extra)), refused, _UNKNOWN]}


REFUSALS = ("not new", "not paid", "already shipped", "already cancelled")
_UNKNOWN = _shape(error={"const": "no such order"})

TOOLS: tuple[dict[str, Any], ...] = (
    _tool("get_order", order=_ORDER),
    _tool("get_total", order=_ORDER),
    _tool("list_orders"),
    _tool("pay_order", order=_ORDER),
    _tool("ship_order", order=_ORDER),
    _tool("cancel_order", order=_ORDER),
    _tool("change_qty", order=_ORDER, qty=_QTY),
)
WRITES = frozenset({"pay_order", "ship_order", "cancel_order", "change_qty"})

RESULT_SCHEMAS: dict[str, dict[str, Any]] = {
    "get_order": _result(),
    "get_total": _result(("total", {"type": "integer"})),
    "list_orders": _shape(orders={"type": "array", "items": _shape(order=_ORDER, status=_STATUS)}),
    "pay_order": _result(status={"const": "paid"}),
    "ship_order": _result(status={"const": "shipped"}),
    "cancel_order": _result(status={"const": "cancelled"}),
    "change_qty": _result(),
}

# The prompt shows the short schemas; the shop itself also refuses arguments it does not know.
_PARAMETERS = {t["function"]["name"]: {**t["function"]["parameters"], "additionalProperties": False} for t in TOOLS}


class Shop:
    """An executable shop. `call` answers as the real environment would; `records` is its state, by order id."""

    def __init__(self, records: Iterable[Mapping[str, Any]]):
        self.records: dict[int, dict[str, Any]] = {r["order"]: dict(r) for r in records}

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one call, a JSON object; writes change `records`. Never raises on bad input."""
        if name not in _PARAMETERS:
            return _violation("TOOL_NOT_AVAILABLE", f"no tool {name}")
        error = jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator(_PARAMETERS[name]).iter_errors(dict(arguments))
        )
        if error is not None:
            return _violation("INVALID_PARAMETERS", f"bad arguments for {name}")
        if name == "list_orders":
            return {"orders": [{"order": r["order"], "status": r["status"]} for r in self.records.values()]}
        record = self.records.get(arguments["order"])
        if record is None:
            return {"error": "no such order"}
        return getattr(self, f"_{name}")(record, arguments)

    def _get_order(self, record: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return dict(record)

    def _get_total(self, record: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return {**record, "total": record["qty"] * record["price"]}

    def _pay_order(self, record: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return _refused(record, ("new",)) or _changed(record, status="paid")

    def _ship_order(self, record: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return _refused(record, ("paid",)) or _changed(record, status="shipped")

    def _cancel_order(self, record: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return _refused(record, ("new", "paid")) or _changed(record, status="cancelled")

    def _change_qty(self, record: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        return _refused(record, ("new",)) or _changed(record, qty=arguments["qty"])


def record_line(record: Mapping[str, Any], hidden: Sequence[str] = ()) -> str:
    """One record as it stands in the system message; a hidden field is left out."""
    return json.dumps({k: v for k, v in record.items() if k not in hidden})


def _refused(record: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any] | None:
    """The refusal of a call that only orders of an `allowed` status take; None when it is not refused."""
    status = record["status"]
    if status in allowed:
        return None
    reason = f"already {status}" if status in ("shipped", "cancelled") else f"not {allowed[0]}"
    return {**record, "error": reason}


def _changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    record.update(fields)
    return dict(record)


def _violation(code: str, message: str) -> dict[str, Any]:
    return {"error_tool_call": {"code": code, "message": message}}
