"""The rows that shapes find. More of them than any shape writes, so that there is something to leave alone."""

from __future__ import annotations

from uuid import UUID

from guard_kit.models import (
    Account,
    Album,
    Badge,
    Basket,
    Draft,
    Engineer,
    Gauge,
    Label,
    Line,
    Manager,
    Note,
    Parcel,
    Pet,
    Photo,
    Safe,
    Slot,
    Staff,
    Tag,
    Ticket,
    Vault,
    basket_label,
    basket_tag,
    meter,
)

ACCOUNTS = {
    Account: [
        {"id": 1, "code": "a", "region": "north", "balance": 100},
        {"id": 2, "code": "b", "region": "north", "balance": 200},
        {"id": 3, "code": "c", "region": "south", "balance": 300},
        {"id": 4, "code": "d", "region": "south", "balance": 400},
    ]
}
NOTES = {Note: [{"id": 1, "body": "east"}, {"id": 2, "body": "west"}]}
ACCOUNTS_AND_NOTES = {**ACCOUNTS, **NOTES}

SLOTS = {
    Slot: [
        {"room": "blue", "at_hour": 9, "who": "ann"},
        {"room": "blue", "at_hour": 10, "who": "bob"},
        {"room": "red", "at_hour": 9, "who": "cid"},
    ]
}
SAFES = {
    Vault: [{"id": 1, "content": "gold"}, {"id": 2, "content": "tin"}, {"id": 3, "content": "tin"}],
    Safe: [{"id": 1, "code": "1234"}, {"id": 2, "code": "1234"}, {"id": 3, "code": "9876"}],
}
VAULTS = {Vault: [{"id": 1, "content": "gold"}, {"id": 2, "content": "tin"}, {"id": 3, "content": "tin"}]}
MANY = 600
"""More rows than the guard asks for at once."""
MANY_METERS = {meter: [{"id": at, "reading": at} for at in range(1, MANY + 1)]}
METERS = {meter: [{"id": 1, "reading": 5}, {"id": 2, "reading": 6}, {"id": 3, "reading": 7}]}

ONE, TWO, THREE = (UUID(int=at) for at in (1, 2, 3))
TICKETS = {Ticket: [{"id": ONE, "seat": 1}, {"id": TWO, "seat": 2}, {"id": THREE, "seat": 3}]}
BADGES = {Badge: [{"id": "x", "level": 1}, {"id": "y", "level": 2}, {"id": "z", "level": 3}]}

STAFF = {
    Staff: [
        {"id": 1, "kind": "engineer", "name": "ada"},
        {"id": 2, "kind": "engineer", "name": "bea"},
        {"id": 3, "kind": "manager", "name": "cyd"},
        {"id": 4, "kind": "engineer", "name": "dot"},
    ],
    Engineer: [
        {"id": 1, "stack": "python"},
        {"id": 2, "stack": "python"},
        {"id": 4, "stack": "cobol"},
    ],
    Manager: [{"id": 3, "budget": 10}],
}
PETS = {
    Pet: [
        {"id": 1, "kind": "dog", "name": "rex"},
        {"id": 2, "kind": "dog", "name": "rex"},
        {"id": 3, "kind": "cat", "name": "rex"},
        {"id": 4, "kind": "dog", "name": "pip"},
    ]
}

BASKETS = {
    Basket: [{"id": 1, "title": "mine"}, {"id": 2, "title": "yours"}],
    Line: [
        {"id": 1, "basket_id": 1, "amount": 1},
        {"id": 2, "basket_id": 1, "amount": 2},
        {"id": 3, "basket_id": 2, "amount": 3},
    ],
    Parcel: [{"id": 1, "basket_id": 1}, {"id": 2, "basket_id": 1}, {"id": 3, "basket_id": 2}],
}
TAGGED = {
    Basket: [{"id": 1, "title": "mine"}, {"id": 2, "title": "yours"}],
    Tag: [{"id": 1, "word": "big"}, {"id": 2, "word": "red"}, {"id": 3, "word": "old"}],
    Label: [{"id": 1, "word": "large"}, {"id": 2, "word": "small"}],
    basket_tag: [{"basket_id": 1, "tag_id": 1}, {"basket_id": 1, "tag_id": 2}, {"basket_id": 2, "tag_id": 3}],
    basket_label: [{"basket_id": 1, "label_id": 1}],
}
ALBUMS = {
    Album: [{"id": 1, "cover_id": 1}, {"id": 2, "cover_id": None}],
    Photo: [{"id": 1, "album_id": 1}, {"id": 2, "album_id": 1}, {"id": 3, "album_id": 2}],
}

GAUGES = {
    Gauge: [
        {"id": 1, "level": 1, "seen": 1},
        {"id": 2, "level": 2, "seen": 1},
        {"id": 3, "level": 3, "seen": 1},
    ]
}
DRAFTS = {
    Draft: [
        {"id": 1, "body": "one", "version": 1},
        {"id": 2, "body": "two", "version": 1},
        {"id": 3, "body": "three", "version": 1},
    ]
}
