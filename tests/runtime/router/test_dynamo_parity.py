"""Our port of Dynamo's cost picks what Dynamo picks (`scripts/record-dynamo` wrote the golden)."""

import json
from pathlib import Path

from kimi_runtime.router.plan import Leg
from kimi_runtime.router.policies.dynamo import DynamoPolicy
from kimi_runtime.spec.router import DynamoCost
from worker_views import turn, worker

GOLDEN = Path(__file__).parents[2] / "goldens" / "router" / "dynamo-1.6.1.json"
MANY_BLOCKS = 1_000_000


def views(situation, block_tokens):
    for name, prefill_tokens, decode_blocks, requests, cached_blocks in situation["workers"]:
        yield worker(
            str(name),
            queued_tokens=prefill_tokens,
            running=requests,
            free_blocks=MANY_BLOCKS - decode_blocks,
            total_blocks=MANY_BLOCKS,
            cached_tokens=cached_blocks * block_tokens,
        )


def test_ninety_nine_in_a_hundred_picks_are_dynamos():
    golden = json.loads(GOLDEN.read_text("utf-8"))
    policy = DynamoPolicy(DynamoCost())
    same = 0
    for situation in golden["situations"]:
        request = turn(prompt_tokens=situation["prompt_tokens"], max_tokens=1)
        workers = list(views(situation, golden["block_tokens"]))
        plan = policy.choose(request, workers, now_s=0.0)
        same += plan.decode == str(situation["pick"])
    assert same >= 0.99 * len(golden["situations"])


def test_the_recorded_situations_are_no_easy_ones():
    golden = json.loads(GOLDEN.read_text("utf-8"))
    by_cache = by_load = 0
    for situation in golden["situations"]:
        rows = situation["workers"]
        by_cache += max(rows, key=lambda row: row[4])[0] == situation["pick"]
        by_load += min(rows, key=lambda row: row[2])[0] == situation["pick"]
    count = len(golden["situations"])
    assert count >= 200
    assert by_cache < 0.8 * count
    assert by_load < 0.8 * count


def test_terms_are_in_blocks():
    policy = DynamoPolicy(DynamoCost())
    one = worker("w", queued_tokens=640, free_blocks=90, total_blocks=100, cached_tokens=128)
    terms = policy.cost(turn(prompt_tokens=640), one, Leg.WHOLE)
    assert terms == {"prefill": 18.0, "decode": 20.0}
    assert policy.cost(turn(prompt_tokens=640), one, Leg.DECODE)["prefill"] == 0.0
