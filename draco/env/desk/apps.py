"""The apps of the desk and their calls, as one table."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["APIS", "APPS", "COMPLETE", "NUMBERS", "describe"]

#: call → its parameters, in the order in which they are written
APIS: Mapping[str, tuple[str, ...]] = {
    "contacts.find": ("name",),
    "contacts.list": ("page",),
    "pay.send": ("to", "amount"),
    "pay.confirm": ("id",),
    "pay.cancel": ("id",),
    "pay.requests": ("page",),
    "pay.approve": ("id",),
    "mail.list": ("page",),
    "mail.search": ("name",),
    "mail.read": ("id",),
    "mail.send": ("to", "text"),
    "mail.delete": ("id",),
    "notes.read": ("name",),
    "notes.add": ("text",),
    "calendar.slots": ("name",),
    "calendar.book": ("name", "slot"),
    "calendar.confirm": ("id",),
    "calendar.cancel": ("id",),
    "files.list": ("page",),
    "files.find": ("name",),
    "files.share": ("id", "to"),
    "files.delete": ("id",),
    "files.open": ("name", "key"),
    "vault.get": ("name",),
    "orders.list": ("name", "page"),
    "orders.refund": ("id",),
    "orders.confirm": ("id",),
    "orders.cancel": ("id",),
    "orders.unlock": ("name", "key"),
    "desk.complete": ("status",),
}
APPS = tuple(dict.fromkeys(api.partition(".")[0] for api in APIS))
COMPLETE = "desk.complete"
#: parameters that are integers; every other one is a string
NUMBERS = frozenset({"page", "amount", "key"})


def describe() -> str:
    """The API list for the long system message, one call a line."""
    return "\n".join(f"apis.{api}({', '.join(params)})" for api, params in APIS.items())
