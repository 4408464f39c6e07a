"""The dashboard and the alerts ask for what running processes really export."""

import json
import re

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from certificates import Authority
from kimi_operator.desired.dashboard import dashboard
from kimi_operator.desired.labels import Owner
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.spec.ssd import SsdSpec
from pool_daemon import blocks_of, keys_of, targets
from pool_peers import SOON_S, knows, peer
from scripted_stack import MODEL, Part, ids_of, running_stack

OWNER = Owner("kimi", "default", None)
POD = {"pod", "namespace"}
"""Labels that Prometheus adds by where it scraped."""


def expressions():
    """Every query of the dashboard."""
    (text,) = dashboard(OWNER)["data"].values()
    panels = json.loads(text)["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def asked_for(expression):
    """Metrics a query names, and the labels it groups or selects by."""
    bare = re.sub(r'namespace="[^"]*",kimistack_dev_deployment="[^"]*"', "", expression)
    metrics = set(re.findall(r"\bkimistack_[a-z_]+", bare))
    labels = {name for group in re.findall(r"by \(([^)]*)\)", bare) for name in group.split(", ")}
    return metrics, (labels | set(re.findall(r'([a-z_]+)="', bare))) - POD


async def exported(url):
    """Labels of every series that a process exports, by name; none of those without a value yet."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics", ssl=False) as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for end in {"counter": ("_total",), "histogram": ("_bucket",)}.get(family.type, ("",)):
            found.setdefault(family.name + end, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def chatted(url):
    """One request to a router, read to its end."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert "[DONE]" in await response.text()


@pytest.fixture
async def series(tmp_path):
    """What an encrypted pool daemon with SSD and peer, a worker and a router export after work."""
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    tls = Authority(tmp_path / "ca").issue(tmp_path / "tls")
    async with (
        peer(tmp_path, "a", tls=tls) as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], ssd=ssd, tls=tls) as (b, at_b),
        running_stack(
            tmp_path, [Part("w", lambda request: Reply(ids_of("Hello.<|im_end|>")))]
        ) as stack,
    ):
        keys = keys_of(3)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        await knows(b, "a", 3)
        await at_b.load(keys, targets(3), deadline_s=SOON_S)
        await chatted(stack.url)
        found = await exported(b.url)
        for url in (stack.url, *(worker.url for worker in stack.workers.values())):
            for name, labels in (await exported(url)).items():
                found.setdefault(name, set()).update(labels)
        yield found


async def test_every_query_of_the_dashboard_names_series_that_are_exported(series):
    for expression in expressions():
        metrics, labels = asked_for(expression)
        assert metrics, expression
        for metric in metrics:
            assert metric in series, expression
        there = set().union(*(series[metric] for metric in metrics))
        assert not there or labels <= there, expression
        assert there or "_umbp_" not in expression or not labels, expression


def test_the_pool_has_a_row_that_follows_every_block_that_is_looked_up():
    text = " ".join(expressions())
    for metric in ("looked_up_blocks_total", "hit_blocks_total", "lost_blocks_total"):
        assert f"kimistack_umbp_{metric}" in text
