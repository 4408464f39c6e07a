"""pyverbs' enumerations, which it has under two names."""

try:
    import pyverbs.enums as e
except ImportError:  # since rdma-core 51
    import pyverbs.libibverbs_enums as e

__all__ = ["e"]
