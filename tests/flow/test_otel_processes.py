"""Real applications, in processes of their own, telling an agent of their spans."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.announcing import by_process, ends, finish, listening, run, start, starts
from testbed.fixtures import entered_in
from testbed.waiting import eventually

from wattspan.ingest.side_channel import ProcessRecords, SideChannelServer
from wattspan.model import Principal
from wattspan.spans.values import SpanEnd, SpanStart

feed = entered_in(listening)


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for program in started:
        if program.poll() is None:
            program.kill()
        program.communicate()


def line(program: subprocess.Popen[str]) -> str:
    return program.stdout.readline().strip()


def tell(program: subprocess.Popen[str]) -> None:
    program.stdin.write("\n")
    program.stdin.flush()


def assert_whole(records: list[SpanStart | SpanEnd], spans: int) -> None:
    """``spans`` spans were started, ended after that, and nothing else."""
    begun = {each.id: each for each in records if isinstance(each, SpanStart)}
    done = {each.id: each for each in records if isinstance(each, SpanEnd)}
    assert len(begun) == spans
    assert begun.keys() == done.keys()
    assert len(records) == 2 * spans
    assert all(begun[id_].at <= done[id_].at for id_ in begun)


def test_process_is_announced_until_it_ends(feed: SideChannelServer, tmp_path: Path) -> None:
    pid = int(
        run(
            tmp_path,
            """
            with tracer.start_as_current_span("outer"):
                with tracer.start_as_current_span("inner"):
                    print(os.getpid())
            """,
        )
    )
    (report,) = feed.drain()
    assert (report.pid, report.gone, report.lost) == (pid, True, 0)
    assert_whole(report.records, 2)


def test_threads_report_identity_and_cpu_time(feed: SideChannelServer, tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        import threading, time
        meet, natives = threading.Barrier(9), []
        def work():
            with tracer.start_as_current_span("work"):
                meet.wait()
                natives.append(threading.get_native_id())
                spin = time.thread_time_ns()
                while time.thread_time_ns() - spin < 5_000_000: pass
        threads = [threading.Thread(target=work) for _ in range(8)]
        with tracer.start_as_current_span("all"):
            for each in threads: each.start()
            meet.wait()
            for each in threads: each.join()
        print(*natives)
        """,
    )
    reports = feed.drain()
    begun = {each.id: each for each in starts(reports)}
    done = {each.id: each for each in ends(reports)}
    assert {each.thread for each in begun.values() if each.thread != reports[0].pid} == {
        int(word) for word in output.split()
    }
    spent = [
        done[id_].cpu - each.cpu for id_, each in begun.items() if each.thread != reports[0].pid
    ]
    assert all(4_000_000 < cpu < 10**9 for cpu in spent)


def test_concurrent_first_spans_are_all_announced(feed: SideChannelServer, tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import threading
        meet = threading.Barrier(16)
        def work():
            meet.wait()
            tracer.start_span("work").end()
        threads = [threading.Thread(target=work) for _ in range(16)]
        for each in threads: each.start()
        for each in threads: each.join()
        """,
    )
    (report,) = feed.drain()
    assert_whole(report.records, 16)


def test_interleaved_spans_of_one_event_loop(feed: SideChannelServer, tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import asyncio
        async def request(n):
            with tracer.start_as_current_span("request"):
                for _ in range(5):
                    with tracer.start_as_current_span("step"):
                        await asyncio.sleep(0)
        async def main():
            # -X dev reports callbacks that are slow on a busy machine.
            asyncio.get_running_loop().slow_callback_duration = 60
            await asyncio.gather(*(request(n) for n in range(100)))
        asyncio.run(main())
        """,
    )
    (report,) = feed.drain()
    assert_whole(report.records, 600)
    begun = {each.id: each for each in starts([report])}
    roots = [each for each in begun.values() if each.parent == b""]
    assert len(roots) == 100
    assert all(begun[each.parent].parent == b"" for each in begun.values() if each.parent)
    assert len({each.thread for each in begun.values()}) == 1


def test_forked_child_announces_its_own_spans(feed: SideChannelServer, tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        with tracer.start_as_current_span("parent"):
            child = os.fork()
            if child == 0:
                with tracer.start_as_current_span("child"):
                    resource = provider.resource.attributes
                    print(os.getpid(), resource["process.pid"], flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        print(os.getpid(), provider.resource.attributes["process.pid"])
        """,
    )
    (child, said_by_child), (parent, said_by_parent) = (
        map(int, row.split()) for row in output.splitlines()
    )
    assert (child, parent) == (said_by_child, said_by_parent)
    told = by_process(feed.drain())
    assert told.keys() == {child, parent}
    assert_whole(told[child], 1)
    assert_whole(told[parent], 1)


def test_exited_parent_ends_while_its_child_runs(
    feed: SideChannelServer, tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = start(
        tmp_path,
        """
        tracer.start_span("parent").end()
        child = os.fork()
        if child == 0:
            print("forked", flush=True)
            sys.stdin.readline()
            tracer.start_span("child").end()
            os._exit(0)
        os._exit(0)
        """,
    )
    programs.append(program)
    assert line(program) == "forked"
    program.wait()
    (report,) = feed.drain()
    assert (report.pid, report.gone) == (program.pid, True)
    tell(program)
    program.communicate()
    (report,) = feed.drain()
    assert report.pid != program.pid
    assert_whole(report.records, 1)


def test_workers_that_were_forked_with_the_application_loaded(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    run(
        tmp_path,
        """
        import threading
        with tracer.start_as_current_span("preload"):
            pass
        workers = []
        for _ in range(4):
            if (worker := os.fork()) == 0:
                def serve():
                    for _ in range(50):
                        with tracer.start_as_current_span("request"):
                            with tracer.start_as_current_span("query"): pass
                threads = [threading.Thread(target=serve) for _ in range(3)]
                for each in threads: each.start()
                for each in threads: each.join()
                os._exit(0)
            workers.append(worker)
        for worker in workers: os.waitpid(worker, 0)
        """,
    )
    told = by_process(feed.drain())
    spans = sorted(len(records) // 2 for records in told.values())
    assert spans == [1, 300, 300, 300, 300]
    for records in told.values():
        assert_whole(records, len(records) // 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_of_processes(method: str, feed: SideChannelServer, tmp_path: Path) -> None:
    module = tmp_path / "pooled.py"
    module.write_text(
        "import os, sys, multiprocessing\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "import wattspan.otel\n"
        "provider = TracerProvider(); wattspan.otel.instrument(provider)\n"
        "tracer = provider.get_tracer('application')\n"
        "def work(n):\n"
        "    with tracer.start_as_current_span('work'): return os.getpid()\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context('{method}').Pool(2) as pool:\n"
        "        print(*set(pool.map(work, range(8), chunksize=1)))\n"
        "        pool.close(); pool.join()\n"
    )
    output = run(tmp_path, f"os.execv(sys.executable, [sys.executable, {str(module)!r}])")
    told = by_process(feed.drain())
    assert {pid for pid, records in told.items() if records} == {int(w) for w in output.split()}
    assert sum(map(len, told.values())) == 16


def test_killed_process_has_announced_every_span(
    feed: SideChannelServer, tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = start(
        tmp_path,
        """
        for _ in range(100): tracer.start_span("work").end()
        open_ = tracer.start_span("never ended")
        print("ready", flush=True)
        sys.stdin.readline()
        """,
    )
    programs.append(program)
    assert line(program) == "ready"
    program.send_signal(signal.SIGKILL)
    program.wait()
    (report,) = feed.drain()
    assert (len(starts([report])), len(ends([report])), report.gone) == (101, 100, True)


@pytest.mark.parametrize("where", ["nowhere", "a dead socket", "a closed directory"])
def test_application_is_unaffected_without_an_agent(where: str, tmp_path: Path) -> None:
    if where == "a dead socket":
        with listening(tmp_path) as feed:
            feed.stop = lambda: None  # type: ignore[method-assign]  # killed, its socket stays
            feed._listening.socket.close()
    elif where == "a closed directory":
        tmp_path = tmp_path / "closed"
        tmp_path.mkdir(mode=0)
    output = run(
        tmp_path,
        """
        for _ in range(1000):
            with tracer.start_as_current_span("work") as span: pass
        print(dict(span.attributes) == {})
        """,
    )
    assert output == "True\n"


def test_restarted_agent_receives_announcements(
    tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = start(
        tmp_path,
        """
        while sys.stdin.readline():
            tracer.start_span("work").end()
            print("done", flush=True)
        """,
    )
    programs.append(program)
    with listening(tmp_path) as first:
        tell(program)
        assert line(program) == "done"
        assert len(starts(first.drain())) == 1
    tell(program)
    assert line(program) == "done"
    with listening(tmp_path) as second:

        def heard() -> list[SpanStart]:
            tell(program)
            assert line(program) == "done"
            return starts(second.drain())

        assert eventually(heard, "the application finds the new agent")
    program.stdin.close()
    program.stdin = None
    assert finish(program) == ""


def test_records_that_are_read_while_they_are_written_are_whole(
    feed: SideChannelServer, tmp_path: Path, programs: list[subprocess.Popen[str]]
) -> None:
    program = start(
        tmp_path,
        """
        import threading
        from types import SimpleNamespace as Span
        on_start = next(iter(provider._active_span_processor._span_processors)).on_start
        def busy():
            for n in range(1, 100_000):
                on_start(Span(context=(0, n), parent=(0, n ^ 0x5555, False)))
        tracer.start_span("connect").end()
        threads = [threading.Thread(target=busy) for _ in range(3)]
        for each in threads: each.start()
        for each in threads: each.join()
        """,
    )
    programs.append(program)
    told = lost = 0
    began = time.monotonic_ns()
    reports: list[ProcessRecords] = []
    while not any(report.gone for report in reports):
        reports = feed.drain()
        lost += sum(report.lost for report in reports)
        records = [each for report in reports for each in report.records]
        told += len(records)
        for each in records:
            number = int.from_bytes(each.id)
            if isinstance(each, SpanStart) and number < 100_000:
                assert int.from_bytes(each.parent) == number ^ 0x5555
                assert began < each.at < time.monotonic_ns()
    finish(program)
    assert told + lost == 2 + 3 * 99_999


@pytest.mark.parametrize("told_before", [False, True])
def test_program_closing_all_descriptors_reconnects(
    told_before: bool, feed: SideChannelServer, tmp_path: Path
) -> None:
    run(
        tmp_path,
        f"""
        processor = next(iter(provider._active_span_processor._span_processors))
        if {told_before}: tracer.start_span("before").end()
        os.closerange(3, 1000)  # on its way to become a daemon
        precious = [open(sys.executable, "rb") for _ in range(10)]
        for _ in range(2):
            processor._due = min(processor._due, 1)  # it is time to look
            tracer.start_span("after").end()
        assert all(each.read(4) == bytes([127]) + b"ELF" for each in precious)
        assert all(each.close() is None for each in precious)
        """,
    )
    assert feed.counts.put_out == 0
    assert len(starts(feed.drain())) == (2 if told_before else 1)


@pytest.mark.needs_root  # only root can be somebody else
def test_application_of_another_user_is_identified() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        run_dir.chmod(0o755)
        with listening(run_dir) as feed:
            run(
                run_dir,
                """
                os.setresuid(65534, 65534, 65534)
                tracer.start_span("work").end()
                """,
            )
            assert [report.principal for report in feed.drain()] == [Principal(65534)]


def test_many_concurrent_processes_are_announced(feed: SideChannelServer, tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        children = []
        for _ in range(60):
            if (child := os.fork()) == 0:
                for _ in range(20): tracer.start_span("work").end()
                os._exit(0)
            children.append(child)
        for child in children: os.waitpid(child, 0)
        """,
    )
    told = by_process(feed.drain())
    assert len(told) == 60
    assert {len(records) for records in told.values()} == {40}
