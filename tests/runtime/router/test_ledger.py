from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.ledger import Ledger
from kimi_runtime.spec.worker import LoadReport


def report(seq, *, epoch=1, **fields):
    return LoadReport(
        **(
            {
                "epoch": epoch,
                "seq": seq,
                "waiting": 0,
                "running": 0,
                "queued_tokens": 0,
                "free_blocks": 100,
                "total_blocks": 100,
                "steps": 0,
            }
            | fields
        )
    )


def ledger():
    return Ledger("router-0", stale_after_s=1.0)


def test_a_send_counts_before_any_report_knows_of_it():
    book = ledger()
    book.report("w", report(1), now_s=0.0)
    book.start("w", "a.1", new_tokens=500)
    load = book.loads(["w"], now_s=0.1)["w"]
    assert (load.waiting, load.running, load.queued_tokens) == (1, 0, 500)


def test_a_report_that_saw_the_send_does_not_count_it_twice():
    book = ledger()
    book.start("w", "a.1", new_tokens=500)
    seen = {"last_request": {"router-0": "a.1"}, "in_flight": {"router-0": 1}}
    book.report("w", report(1, running=1, queued_tokens=400, **seen), now_s=0.0)
    load = book.loads(["w"], now_s=0.1)["w"]
    assert (load.waiting, load.running, load.queued_tokens) == (0, 1, 400)


def test_a_load_tells_how_many_sends_its_report_has_not_seen():
    book = ledger()
    book.start("w", "a.1", new_tokens=10)
    book.report("w", report(1, last_request={"router-0": "a.1"}, short_blocks=7), now_s=0.0)
    book.start("w", "a.2", new_tokens=10)
    load = book.loads(["w"], now_s=0.0)["w"]
    assert (load.unreported, load.short_blocks) == (1, 7)
    assert book.loads(["w"], now_s=9.0)["w"].short_blocks is None, "of an old report"


def test_of_prompts_in_a_queue_the_oldest_is_the_one_that_is_under_way():
    book = ledger()
    book.start("w", "a.1", new_tokens=40_000, prompt_tokens=50_000)
    book.start("w", "a.2", new_tokens=1_000, prompt_tokens=100_000)
    seen = {"last_request": {"router-0": "a.2"}, "in_flight": {"router-0": 2}}
    book.report("w", report(1, running=2, queued_tokens=11_000, **seen), now_s=0.0)
    load = book.loads(["w"], now_s=0.0)["w"]
    assert load.queued_depth == (10_000 * 45_000 + 1_000 * 99_500) / 11_000
    book.computed("w", "a.1")  # before the next report
    load = book.loads(["w"], now_s=0.1)["w"]
    assert (load.queued_tokens, load.queued_depth) == (1_000, 99_500)


def test_queued_tokens_that_nobody_here_sent_have_no_depth():
    book = ledger()
    book.report("w", report(1, running=1, queued_tokens=9_000), now_s=0.0)
    load = book.loads(["w"], now_s=0.0)["w"]
    assert (load.queued_tokens, load.queued_depth) == (9_000, None)
    book.start("w", "a.1", new_tokens=1_000, prompt_tokens=3_000)
    load = book.loads(["w"], now_s=0.0)["w"]
    assert (load.queued_tokens, load.queued_depth) == (10_000, 2_500)


def test_other_routers_work_is_added_to_our_own():
    book = ledger()
    book.start("w", "a.1", new_tokens=10)
    others = {"router-0": 1, "router-1": 6}
    book.report(
        "w",
        report(1, running=7, in_flight=others, last_request={"router-0": "a.1"}),
        now_s=0.0,
    )
    book.start("w", "a.2", new_tokens=20)
    load = book.loads(["w"], now_s=0.0)["w"]
    assert (load.running, load.waiting, load.queued_tokens) == (7, 1, 20)


def test_what_ended_since_the_report_is_gone_at_once():
    book = ledger()
    book.start("w", "a.1", new_tokens=10)
    book.report("w", report(1, running=1, in_flight={"router-0": 1}), now_s=0.0)
    book.finish("w", "a.1")
    book.finish("w", "a.1")
    load = book.loads(["w"], now_s=0.0)["w"]
    assert (load.waiting, load.running) == (0, 0)


def test_a_computed_prompt_is_no_longer_queued():
    book = ledger()
    book.report("w", report(1), now_s=0.0)
    book.start("w", "a.1", new_tokens=10)
    book.computed("w", "a.1")
    assert book.loads(["w"], now_s=0.0)["w"].queued_tokens == 0


def test_an_old_report_makes_a_worker_uncertain_not_idle():
    book = ledger()
    book.report("quiet", report(1), now_s=0.0)
    book.report("busy", report(1, running=8, queued_tokens=4000), now_s=5.0)
    loads = book.loads(["quiet", "busy"], now_s=5.1)
    assert loads["busy"].certain
    assert not loads["quiet"].certain
    assert (loads["quiet"].waiting, loads["quiet"].running) == (1, 8)
    assert loads["quiet"].queued_tokens == 4000


def test_an_older_report_is_refused_within_its_epoch_and_taken_from_a_new_one():
    book = ledger()
    assert book.report("w", report(5, running=2), now_s=0.0)
    assert not book.report("w", report(5, running=9), now_s=0.1)
    assert not book.report("w", report(4, running=9), now_s=0.1)
    assert book.report("w", report(1, epoch=2), now_s=0.2)
    assert book.loads(["w"], now_s=0.2)["w"].running == 0


def test_a_lost_worker_has_no_certain_load():
    book = ledger()
    book.report("w", report(1), now_s=0.0)
    book.lost("w")
    assert not book.loads(["w"], now_s=0.0)["w"].certain


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=60))
@settings(max_examples=50, deadline=None)
def test_entries_are_conserved(steps):
    book, live = ledger(), set()
    for worker, number, starts in steps:
        entry = (worker, f"r.{number}")
        if starts:
            book.start(*entry, new_tokens=1)
            live.add(entry)
        else:
            book.finish(*entry)
            live.discard(entry)
        assert book.total_in_flight == len(live)
    for entry in live:
        book.finish(*entry)
    assert book.total_in_flight == 0
