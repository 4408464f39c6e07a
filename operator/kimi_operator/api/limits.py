"""What holds for every role alike: blocks must mean the same on both sides of a hand-off."""

from pydantic import PositiveInt

from kimi_operator.api.base import ApiModel, presettable


class ServingLimits(ApiModel):
    """Sizes every worker and the router agree on."""

    block_tokens: PositiveInt = presettable(64, "Tokens of a KV block.")
    max_context_tokens: PositiveInt | None = presettable(
        None, "Longest prompt and output together; none: the model's own limit."
    )
