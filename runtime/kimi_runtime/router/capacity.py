"""How much KV memory the sessions of one router may use. Pure."""

from kimi_runtime.router.discovery import Fleet
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.spec.worker import Role


def kv_capacity(fleet: Fleet, ledger: Ledger) -> int | None:
    """Tokens of KV in workers that decode, this replica's share of them; None without a worker.

    A session's KV stays where it decodes; what a prefill worker keeps of it is a copy.
    """
    tokens = {
        member.name: member.info.total_blocks * member.info.block_tokens
        for member in fleet.members
        if member.ready and member.info is not None and member.left_s is None
        if member.info.role is not Role.PREFILL and not member.draining
    }
    return max(int(sum(tokens.values()) * ledger.share(tokens)), 1) if tokens else None
