"""The tables that the shapes write to: one small family for each way of mapping."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from fencing.sql import Fenced, fence_columns

AREA = "area"
"""The schema of `Vault`, as the models know it: every database gives it another name by schema_translate_map."""


class Base(DeclarativeBase):
    type_annotation_map = {str: sa.String(40)}  # noqa: RUF012 - SQLAlchemy's own way


class Account(Fenced, Base):
    """The plain one."""

    __tablename__ = "account"
    __table_args__ = (sa.UniqueConstraint("code", name="account_code_once"),)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    code: Mapped[str]
    region: Mapped[str]
    balance: Mapped[int] = mapped_column(default=0)


class Note(Base):
    """Not fenced."""

    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    body: Mapped[str]


class Visit(Fenced, Base):
    """The database makes its keys."""

    __tablename__ = "visit"
    id: Mapped[int] = mapped_column(primary_key=True)
    page: Mapped[str]


class Slot(Fenced, Base):
    """A composite key, and nothing is called what it usually is."""

    __tablename__ = "slot"
    __fence_columns__ = ("newest", "newest_by")
    room: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[int] = mapped_column("at_hour", primary_key=True, autoincrement=False)
    guest: Mapped[str | None] = mapped_column("who")


class Vault(Fenced, Base):
    __tablename__ = "vault"
    __table_args__ = {"schema": AREA}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    content: Mapped[str]


class Safe(Vault):
    """A table joined to a fenced one, in that schema too."""

    __tablename__ = "safe"
    __table_args__ = {"schema": AREA}  # noqa: RUF012
    id: Mapped[int] = mapped_column(ForeignKey(f"{AREA}.vault.id"), primary_key=True)
    code: Mapped[str]


meter = sa.Table(
    "meter",
    Base.metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("reading", sa.Integer, nullable=False),
    *fence_columns(token="read_token", holder="read_holder"),
)
"""Not mapped at all."""


class Ticket(Fenced, Base):
    __tablename__ = "ticket"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    seat: Mapped[int]


class Prefixed(sa.TypeDecorator[str]):
    """Stored with a mark that Python does not see."""

    impl = sa.String(40)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else f"badge:{value}"

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.removeprefix("badge:")


class Badge(Fenced, Base):
    """Its key is stored as another value than the one Python has."""

    __tablename__ = "badge"
    id: Mapped[str] = mapped_column(Prefixed, primary_key=True)
    level: Mapped[int]


# Inheritance: tables joined to the fenced one, and several classes in one table.


class Staff(Fenced, Base):
    __tablename__ = "staff"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    name: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "staff"}  # noqa: RUF012


class Engineer(Staff):
    __tablename__ = "engineer"
    id: Mapped[int] = mapped_column(ForeignKey("staff.id"), primary_key=True)
    stack: Mapped[str]
    __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


class Manager(Staff):
    __tablename__ = "manager"
    id: Mapped[int] = mapped_column(ForeignKey("staff.id"), primary_key=True)
    budget: Mapped[int]
    __mapper_args__ = {"polymorphic_identity": "manager"}  # noqa: RUF012


class Pet(Fenced, Base):
    __tablename__ = "pet"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    name: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "pet"}  # noqa: RUF012


class Dog(Pet):
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Cat(Pet):
    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


# Relationships


basket_tag = sa.Table(
    "basket_tag",
    Base.metadata,
    sa.Column("basket_id", ForeignKey("basket.id"), primary_key=True),
    sa.Column("tag_id", ForeignKey("tag.id"), primary_key=True),
)
basket_label = sa.Table(
    "basket_label",
    Base.metadata,
    sa.Column("basket_id", ForeignKey("basket.id"), primary_key=True),
    sa.Column("label_id", ForeignKey("label.id"), primary_key=True),
)


class Basket(Fenced, Base):
    __tablename__ = "basket"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str]
    lines: Mapped[list[Line]] = relationship(order_by="Line.id")
    parcels: Mapped[list[Parcel]] = relationship(cascade="all, delete-orphan", order_by="Parcel.id")
    tags: Mapped[list[Tag]] = relationship(secondary=basket_tag, order_by="Tag.id")
    labels: Mapped[list[Label]] = relationship(secondary=basket_label, order_by="Label.id")


class Line(Fenced, Base):
    """Outlives its basket: the reference becomes NULL."""

    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    basket_id: Mapped[int | None] = mapped_column(ForeignKey("basket.id"))
    amount: Mapped[int]


class Parcel(Fenced, Base):
    """Goes with its basket."""

    __tablename__ = "parcel"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    basket_id: Mapped[int] = mapped_column(ForeignKey("basket.id"))


class Tag(Fenced, Base):
    __tablename__ = "tag"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    word: Mapped[str]


class Label(Base):
    """Joined to baskets as tags are, and not fenced."""

    __tablename__ = "label"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    word: Mapped[str]


class Album(Fenced, Base):
    """It and its photos refer to each other, so that one of the references is written by a second UPDATE."""

    __tablename__ = "album"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cover_id: Mapped[int | None] = mapped_column(ForeignKey("photo.id", name="album_cover", use_alter=True))
    cover: Mapped[Photo | None] = relationship(foreign_keys=cover_id, post_update=True)
    photos: Mapped[list[Photo]] = relationship(
        foreign_keys="Photo.album_id", cascade="all, delete-orphan", order_by="Photo.id"
    )


class Photo(Fenced, Base):
    __tablename__ = "photo"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    album_id: Mapped[int] = mapped_column(ForeignKey("album.id"))


# What mappers can be told to do at each write


class Gauge(Fenced, Base):
    """What the database computes is fetched at once, by RETURNING where there is one."""

    __tablename__ = "gauge"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    level: Mapped[int]
    seen: Mapped[int] = mapped_column(server_default=sa.text("1"), onupdate=sa.func.abs(-7))
    __mapper_args__ = {"eager_defaults": True}  # noqa: RUF012


class Draft(Fenced, Base):
    """It counts its versions, as SQLAlchemy can."""

    __tablename__ = "draft"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    body: Mapped[str]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


FENCES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "account",
            "visit",
            f"{AREA}.vault",
            "staff",
            "pet",
            "basket",
            "line",
            "parcel",
            "tag",
            "album",
            "photo",
        ),
        ("fence_token", "fence_holder"),
    ),
    **dict.fromkeys(("gauge", "draft", "ticket", "badge"), ("fence_token", "fence_holder")),
    "slot": ("newest", "newest_by"),
    "meter": ("read_token", "read_holder"),
}
"""The fence columns of each fenced table: what the tests know, and do not ask of the code under test."""

GENERATED = {"visit": "id"}
"""Columns whose values are the database's own, and differ from run to run."""

World = dict[Any, list[dict[str, Any]]]
"""Rows by table or class, as a shape finds them."""
