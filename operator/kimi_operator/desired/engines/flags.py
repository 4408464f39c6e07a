"""Flags of a user beside the flags that are generated: never the same one twice.

Python's argparse takes any unambiguous beginning of a flag for the flag, and some engines take
`_` for `-`; both are seen through.
"""

from collections.abc import Iterable

from kimi_runtime.errors import ConfigError


def flag_of(argument: str) -> str:
    """`--tp_size=8` -> `tp-size`; `-tp` -> `tp`; empty for a value."""
    if not argument.startswith("-") or argument.lstrip("-")[:1].isdigit():
        return ""
    return argument.partition("=")[0].lstrip("-").replace("_", "-")


def check_flags(
    user: Iterable[str], generated: Iterable[str], reserved: frozenset[str], where: str
) -> None:
    """Raise ConfigError, naming the flag, if the user's arguments fight generated ones."""
    taken = reserved | {flag for argument in generated if (flag := flag_of(argument))}
    for argument in user:
        flag = flag_of(argument)
        if not flag:
            continue
        full = next((t for t in sorted(taken) if t == flag or _abbreviates(argument, flag, t)), "")
        if full:
            raise ConfigError(
                f"{where}: {argument}: --{full} is decided by other fields of the spec; remove it "
                "here and set the field"
            )


def _abbreviates(argument: str, flag: str, full: str) -> bool:
    return argument.startswith("--") and len(flag) > 3 and full.startswith(flag)
