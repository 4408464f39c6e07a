"""A worker that rejoins with another block size has nothing in common with what it had."""

from router_core import Core, info_of, keys_of

PROMPT = keys_of(400)


def rejoined(core, name, **fields):
    """The worker comes back as something else."""
    info = info_of(name, epoch=2, **fields)
    core[name].info = core[name].member.info = info
    return info


def test_another_block_size_matches_none_of_the_keys_of_before():
    """ai-dynamo/dynamo#1232: overlap was silently 0 for everybody from then on."""
    core = Core("a", "b")
    for name in "ab":
        core[name].log.add(PROMPT)
        core[name].connect()
    rejoined(core, "a", block_tokens=32, layout="fp8/32")
    assert len(set(core.fleet.roster.geometries.values())) == 2
    ours = core.fleet.roster.geometries["b"]
    found = core.feeds.cached_tokens(
        core.fleet.roster.geometries,
        {ours: PROMPT, core.fleet.roster.geometries["a"]: keys_of(800, 5000)},
        core.fleet.roster.nodes,
    )
    assert found.own == {"a": 0, "b": 400 * 64}


def test_views_count_in_the_worker_s_new_blocks_at_once():
    core = Core("a")
    assert core.look(PROMPT)[1][0].block_tokens == 64
    rejoined(core, "a", block_tokens=32, layout="fp8/32", total_blocks=1000)
    view = core.look(PROMPT)[1][0]
    assert (view.block_tokens, view.total_blocks, view.layout) == (32, 1000, "fp8/32")


def test_a_pair_of_two_block_sizes_is_never_planned():
    """The same revision with another geometry is refused by the fleet, loudly."""
    core = Core("a", "b")
    info = info_of("a", epoch=2, block_tokens=32, layout="fp8/32")
    refusal = core.fleet._misfit(core["a"].member, info)
    assert refusal is not None
    assert "could not be shared" in refusal
    assert core.fleet._misfit(core["a"].member, info_of("a", revision="r2", layout="x")) is None
