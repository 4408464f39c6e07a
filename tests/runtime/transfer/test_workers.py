import asyncio
import gc
import threading
import weakref

import pytest

from kimi_runtime.transfer.workers import Workers

SOON_S = 20.0


@pytest.fixture
async def workers():
    made = Workers(4, "test-workers")
    yield made
    made.shutdown()


def threads():
    return [one for one in threading.enumerate() if one.name.startswith("test-workers")]


async def run(workers, work, *args):
    async with asyncio.timeout(SOON_S):
        return await asyncio.get_running_loop().run_in_executor(workers, work, *args)


async def test_a_result_and_an_error_come_back_to_who_asked(workers):
    assert await run(workers, int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await run(workers, int, "seven")
    assert await run(workers, int, "8") == 8
    assert len(threads()) == 1


async def test_so_many_work_at_once_and_the_rest_when_one_is_free(workers):
    together = threading.Barrier(4)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(workers, together.wait, SOON_S)) for _ in range(12)]
    assert sorted(task.result() for task in running) == sorted(3 * [0, 1, 2, 3])
    assert len(threads()) == 4


async def test_nothing_of_a_job_outlives_it(workers):
    class Big:
        pass

    big = Big()
    kept = weakref.ref(big)
    await run(workers, lambda one: None, big)
    del big
    async with asyncio.timeout(SOON_S):
        while kept() is not None:
            gc.collect()
            await asyncio.sleep(0.005)


async def test_what_was_handed_over_is_done_and_then_all_threads_end(workers):
    done, go = [], threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(workers, lambda: (go.wait(SOON_S), done.append(1))))
        await asyncio.sleep(0)
        workers.shutdown()
        go.set()
    assert done == [1]
    with pytest.raises(RuntimeError, match="closed"):
        await run(workers, int, "7")
    async with asyncio.timeout(SOON_S):
        while threads():
            await asyncio.sleep(0.005)


def test_a_loop_that_has_ended_meanwhile_is_no_fault_of_the_thread():
    workers, go, done = Workers(1, "test-workers"), threading.Event(), threading.Event()

    async def leave():
        asyncio.get_running_loop().run_in_executor(workers, lambda: (go.wait(SOON_S), done.set()))

    asyncio.run(leave())
    go.set()
    assert done.wait(SOON_S)

    async def again():
        return await run(workers, int, "7")

    assert asyncio.run(again()) == 7
    workers.shutdown()
