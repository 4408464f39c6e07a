"""How tenants share a memory: what each uses, may use at most, and is entitled to. Pure.

A tenant is named by who puts (`PoolClient.store(tenant=)`), the same name that is in the root of
its keys, so no two tenants share a block. A tenant's *share* is its weight's part of the memory
among those who use it now: alone it may have all. A put takes room from tenants above their share,
and from its own tenant; who is within its share loses nothing to others. A *quota* is a bound
whatever is free; pages that are only reserved count, so writers can't pass it together.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_ACCOUNTS = 256
"""Tenants accounted for by themselves at a time; those beyond share one account."""

OTHERS = ""

QUIET_S = 600.0
"""A tenant not heard of for this long has no share: what it holds is anybody's room."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tenant is granted."""

    weight: float = 1.0
    quota_pages: int | None = None


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's pages: used (blocks and reservations), and those of unpinned blocks."""

    name: str
    terms: Terms
    used_pages: int = 0
    idle_pages: int = 0
    heard_s: float = 0.0
    """When it last put or used a block."""

    def heard(self, now_s: float) -> None:
        """It does something now; what the daemon does without an end (`inf`) is nobody's."""
        if self.heard_s < now_s < math.inf:
            self.heard_s = now_s


class Accounts:
    """Every tenant that uses pages now."""

    def __init__(
        self,
        total_pages: int,
        terms: Mapping[str, Terms] | None = None,
        default: Terms | None = None,
    ) -> None:
        self.total_pages = total_pages
        self._terms, self._default = dict(terms or {}), default or Terms()
        self._accounts: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        """Accounts in use."""
        return iter(self._accounts.values())

    def grant(self, terms: Mapping[str, Terms], default: Terms) -> None:
        """From now on these are the terms, also of those who use pages already."""
        self._terms, self._default = dict(terms), default
        for account in self._accounts.values():
            account.terms = self._terms.get(account.name, default)

    def of(self, tenant: str) -> Account:
        """A tenant's account; it is kept from its first page on."""
        account = self._accounts.get(tenant)
        if account is None and len(self._accounts) >= MAX_ACCOUNTS and tenant not in self._terms:
            tenant = OTHERS
            account = self._accounts.get(tenant)
        return account or Account(tenant, self._terms.get(tenant, self._default))

    def only(self, account: Account) -> bool:
        """Whether nobody else uses any page."""
        return len(self._accounts) == (account.name in self._accounts)

    def use(self, account: Account, pages: int) -> None:
        """An account takes pages (or gives back, if negative); an empty one is closed."""
        account.used_pages += pages
        if account.used_pages:
            self._accounts[account.name] = account
        else:
            self._accounts.pop(account.name, None)

    def shares(self, now_s: float, asking: Account | None = None) -> dict[Account, float]:
        """Pages each account in use is entitled to; `asking` counts as one of them."""
        using = list(self._accounts.values())
        if asking is not None and asking.name not in self._accounts:
            using.append(asking)
        weights = {
            a: 0.0 if a is not asking and now_s - a.heard_s > QUIET_S else a.terms.weight
            for a in using
        }
        total = sum(weights.values()) or 1.0
        return {a: self.total_pages * weight / total for a, weight in weights.items()}
