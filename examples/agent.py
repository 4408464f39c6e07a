"""Three turns with a tool call against a running stack, by the `openai` package.

    python examples/agent.py [--base-url http://127.0.0.1:8000/v1]

The model that `make up` starts is too small to mean what it says, but the call it makes is valid,
since `tool_choice` constrains it, and each turn finds the one before it cached.
"""

import argparse
import json
from typing import Any

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
SYSTEM = (
    "You are a careful assistant. Answer in one short sentence. When a question is about the "
    "weather, call get_weather and use its result; do not guess. Name the city in the answer."
)


def main() -> None:
    """Run the three turns and print what came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id

    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is the weather in Lisbon?"},
    ]
    first = ask(client, model, messages, tool_choice="required")
    call = first.choices[0].message.tool_calls[0]
    print(f"1 call: {call.function.name}({call.function.arguments}) id={call.id}")
    print_cached(1, first)

    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})}
    )
    second = ask(client, model, messages, tool_choice="none")
    print(f"2 text: {second.choices[0].message.content!r}")
    print_cached(2, second)

    messages.append(second.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "And what should I wear?"})
    third = ask(client, model, messages, tool_choice="none")
    print(f"3 text: {third.choices[0].message.content!r}")
    print_cached(3, third)


def ask(client: OpenAI, model: str, messages: list[Any], tool_choice: str) -> Any:
    """One greedy turn without thinking."""
    return client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice=tool_choice,
        temperature=0,
        max_tokens=64,
        extra_body={"thinking": {"type": "disabled"}},
    )


def print_cached(turn: int, reply: Any) -> None:
    """How much of the prompt did not have to be computed."""
    prompt, finish = reply.usage.prompt_tokens, reply.choices[0].finish_reason
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(f"{turn} finish={finish} prompt={prompt} cached={cached}")


if __name__ == "__main__":
    main()
