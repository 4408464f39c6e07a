"""Three turns with a tool call against a running stack, by the `openai` package.

    python examples/agent.py [--base-url http://127.0.0.1:8000/v1]

The questions are worded as the small model that `make up` starts was taught. Whatever a model
means, its calls are valid, since `tool_choice` constrains them, and each turn finds the one before
it cached.
"""

import argparse
import json
import sys
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}


def main() -> None:
    """Run the three turns; a server that is not there or refuses is one line and exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    try:
        converse(client)
    except APIConnectionError as exc:
        sys.exit(
            f"nothing answers at {options.base_url} ({exc.__cause__ or exc}): start a stack with "
            "`make up`, look at it with `kimistack status`, or name another --base-url"
        )
    except APIStatusError as exc:
        sys.exit(f"{options.base_url} answers {exc.status_code}: {exc.message}")


def converse(client: OpenAI) -> None:
    """Three turns, and what came back."""
    model = client.models.list().data[0].id
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather with city = Lisbon and unit = celsius?"},
    ]
    first = ask(client, model, messages, tool_choice="required")
    call = first.choices[0].message.tool_calls[0]
    print(f"1 call: {call.function.name}({call.function.arguments}) id={call.id}")
    print_cached(1, first)

    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"weather": "sunny"})}
    )
    second = ask(client, model, messages, tool_choice="none")
    print(f"2 text: {second.choices[0].message.content!r}")
    print_cached(2, second)

    messages.append(second.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "And with city = porto and unit = celsius?"})
    third = ask(client, model, messages, tool_choice="required")
    call = third.choices[0].message.tool_calls[0]
    print(f"3 call: {call.function.name}({call.function.arguments}) id={call.id}")
    print_cached(3, third)


def ask(client: OpenAI, model: str, messages: list[Any], tool_choice: str) -> Any:
    """One greedy turn without thinking."""
    return client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice=tool_choice,
        temperature=0,
        max_tokens=256,
        extra_body={"thinking": {"type": "disabled"}},
    )


def print_cached(turn: int, reply: Any) -> None:
    """How much of the prompt did not have to be computed."""
    prompt, finish = reply.usage.prompt_tokens, reply.choices[0].finish_reason
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(f"{turn} finish={finish} prompt={prompt} cached={cached}")


if __name__ == "__main__":
    main()
