"""How each engine is started; `launch_of` chooses."""

from typing import assert_never

from kimi_operator.desired.engines.base import Launch, Seat


def launch_of(seat: Seat) -> Launch:
    """Command, environment, ports and files of an engine's container.

    Raises ConfigError for what the engine has no flag for.
    """
    match seat.spec.engine:
        case "kimistack":
            from kimi_operator.desired.engines import kimistack

            return kimistack.launch(seat)
        case "sglang":
            from kimi_operator.desired.engines import sglang

            return sglang.launch(seat)
        case "vllm":
            from kimi_operator.desired.engines import vllm

            return vllm.launch(seat)
        case "atom":
            from kimi_operator.desired.engines import atom

            return atom.launch(seat)
        case _:
            assert_never(seat.spec.engine)
