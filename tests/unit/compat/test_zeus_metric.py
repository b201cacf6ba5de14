"""Zeus's Prometheus metrics, pushed to a gateway."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic_ns
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from testbed.forks import in_child
from testbed.metered_devices import MeteredDevices, gpu, package
from testbed.waiting import eventually

from wattspan.compat.zeus import metric
from wattspan.compat.zeus.metric import (
    EnergyCumulativeCounter,
    EnergyHistogram,
    PowerGauge,
    group_path,
)
from wattspan.compat.zeus.monitor import ZeusMonitor
from wattspan.compat.zeus.power import PowerMonitor
from wattspan.sdk import AgentBusyError, AgentUnavailableError, NotMeasuredError

DEVICES = (gpu(0), gpu(1), package(0), package(0, "memory"))
TICK = 0.005
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Gateway:
    """A gateway that answers ``status``; ``held`` requests wait for ``released``."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    pushes: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    url: str = ""

    def samples(self) -> Samples:
        """The samples of the newest push, without labels of the process."""
        return parsed(self.pushes[-1][3]) if self.pushes else {}

    def get(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, tuple(sorted(labels.items()))))

    def greater(self, than: float, name: str, **labels: str) -> float:
        """The value, once it is greater."""

        def attempt() -> float | None:
            found = self.get(name, **labels)
            return found if found is not None and found > than else None

        return eventually(attempt, f"{name} is greater than {than}")


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    found = Gateway()
    found.released.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            found.held.set()
            found.waiting.append(self.path)
            found.released.wait(60)
            headers = {name.lower(): value for name, value in self.headers.items()}
            found.pushes.append((self.command, self.path, headers, body))
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"pushed metrics are invalid" if found.status == 400 else b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    found.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Made:
    """Metrics over known devices, which are ended with their test."""

    meter: MeteredDevices
    metrics: list[Any] = field(default_factory=list)

    def __call__(self, kind: Any, *arguments: Any, **options: Any) -> Any:
        class Meter(ZeusMonitor):
            read_devices = self.meter

        class Powers(PowerMonitor):
            read_devices = self.meter

        members = {"monitor_class": Meter, "power_class": Powers, "tick": TICK}
        one = type(kind.__name__, (kind,), members)(*arguments, **options)
        self.metrics.append(one)
        return one


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WATTSPAN_DISABLED", "1")  # no spans
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    began = monotonic_ns() - 10**9
    steps = tuple(
        (began + i * 10**8, began + (i + 1) * 10**8, 30.0) for i in range(6000)
    )  # 300 W, for ten minutes
    found = Made(MeteredDevices(DEVICES, steps={one.id: steps for one in DEVICES}))
    yield found
    for one in found.metrics:
        if one.pushed is not None:
            one.pushed.close()


def no_warning(caplog: pytest.LogCaptureFixture) -> bool:
    return not [one for one in caplog.records if one.levelname == "WARNING"]


def test_histogram_is_that_of_prometheus_client(gateway: Gateway, made: Made) -> None:
    energies = iter([0.0, 49.9, 50.0, 50.1, 1000.0, 1e6])
    spent: list[float] = []

    def read(start: int, end: int, ids: Any = None, **options: Any) -> Any:
        found = replace(made.meter)(start, end, ids, **options)
        if ids:
            spent.append(next(energies))
        return tuple(one._replace(joules=spent[-1] if spent else 0.0) for one in found)

    class Meter(ZeusMonitor):
        read_devices = staticmethod(read)

    class Histogram(EnergyHistogram):
        monitor_class, tick = Meter, TICK

    one = Histogram([], [0], gateway.url, "training")
    made.metrics.append(one)
    window = 'a "step"\\\n of ä'
    for _ in range(6):
        one.begin_window(window, sync_execution=False)
        one.end_window(window, sync_execution=False)
        eventually(lambda: not one.has_windows, "the energy is read")
    labels = {"window": window, "index": "0"}
    eventually(
        lambda: gateway.get("energy_monitor_gpu_energy_joules_count", **labels) == 6,
        "all are pushed",
    )
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram(
        "energy_monitor_gpu_energy_joules",
        "GPU energy consumption",
        ["window", "index"],
        buckets=[50.0, 100.0, 200.0, 500.0, 1000.0],
        registry=registry,
    )
    for joules in spent:
        theirs.labels(window=window, index=0).observe(joules)
    text = prometheus_client.generate_latest(registry).decode()
    expected = {key: value for key, value in parsed(text).items() if "_created" not in key[0]}
    assert gateway.samples() == expected
    method, path, headers, body = gateway.pushes[-1]
    assert (method, path) == ("POST", "/metrics/job/training")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert [line for line in text.splitlines() if line[0] == "#" and "_created" not in line] == [
        line for line in body.splitlines() if line[0] == "#"
    ]


def test_counter_rises_while_the_window_is_open_and_has_its_whole_energy(
    gateway: Gateway, made: Made
) -> None:
    one = made(EnergyCumulativeCounter, [0], [0, 1], 0, gateway.url, "job")
    name, labels = "energy_monitor_gpu_energy_joules_total", {"window": "epoch", "index": "0"}
    least = most = 0.0
    for _ in range(2):  # the second goes on where the first has ended
        before = monotonic_ns()
        one.begin_window("epoch")
        after, seen = monotonic_ns(), most
        for _ in range(2):
            seen = gateway.greater(seen, name, **labels)
        ending = monotonic_ns()
        one.end_window("epoch")
        ended = monotonic_ns()
        least += made.meter.joules(DEVICES[0].id, after, ending)
        most += made.meter.joules(DEVICES[0].id, before, ended)
        gateway.greater(least - 1e-5, name, **labels)
        eventually(lambda: not pushing(), "all is pushed")
        assert (gateway.get(name, **labels) or 0.0) <= most + 1e-5
    kinds = {key[0] for key in gateway.samples()}
    assert kinds == {f"energy_monitor_{one}_energy_joules_total" for one in ("gpu", "cpu", "dram")}


def test_gauge_has_the_power_while_the_window_is_open(gateway: Gateway, made: Made) -> None:
    one = made(PowerGauge, [0, 1], 1, gateway.url, "job")
    one.begin_window("power")
    name = "power_monitor_gpu_power_watts"
    for index in "01":
        eventually(
            lambda index=index: gateway.get(name, window="power", index=index) == 300.0,
            "the power is pushed",
        )
    one.end_window("power")
    one.begin_window("short")
    one.end_window("short")
    eventually(lambda: gateway.get(name, window="short", index="0") == 300.0, "at the end, too")
    assert gateway.get(name, window="power", index="0") == 300.0
    assert "# TYPE power_monitor_gpu_power_watts gauge" in gateway.pushes[-1][3]


def test_gauge_keeps_the_power_of_the_end_of_a_window(gateway: Gateway, made: Made) -> None:
    gateway.held.clear()
    gateway.released.clear()
    one = made(PowerGauge, [0], 1, gateway.url, "job")
    one.begin_window("first")
    assert gateway.held.wait(60)  # the thread waits for the gateway
    one.begin_window("busy")
    one.end_window("busy")
    idle = monotonic_ns()
    steps = made.meter.steps[DEVICES[0].id]
    made.meter.steps[DEVICES[0].id] = tuple(
        step if step[0] <= idle else (*step[:2], 1.0) for step in steps
    )
    eventually(lambda: monotonic_ns() > idle + 2 * 10**8, "the GPU is idle")
    gateway.released.set()
    name = "power_monitor_gpu_power_watts"
    assert gateway.greater(0.0, name, window="busy", index="0") == 300.0
    one.end_window("first")


def test_window_may_be_named_by_a_number(gateway: Gateway, made: Made) -> None:
    one = made(EnergyCumulativeCounter, [0], [0], 0, gateway.url, "job")
    one.begin_window(7)
    one.end_window(7)
    gateway.greater(0.0, "energy_monitor_gpu_energy_joules_total", window="7", index="0")


def test_metrics_of_a_job_are_in_one_push(gateway: Gateway, made: Made) -> None:
    """A push replaces all figures of a name in its group."""
    both = [made(EnergyHistogram, [0], [0], gateway.url, "job") for _ in range(2)]
    counter = made(EnergyCumulativeCounter, [0], [0], 1, gateway.url, "job")
    for one in (*both, counter):
        one.begin_window("step", sync_execution=False)
        one.end_window("step", sync_execution=False)
    count = "energy_monitor_gpu_energy_joules_count"
    eventually(lambda: gateway.get(count, window="step", index="0") == 2, "both count")
    total = "energy_monitor_gpu_energy_joules_total"
    eventually(lambda: gateway.get(total, window="step", index="0") is not None, "the counter, too")


METRICS: list[Callable[[Made, str], Any]] = [
    lambda made, url: made(EnergyHistogram, [0], [0], url, "job"),
    lambda made, url: made(EnergyCumulativeCounter, [0], [0], 1, url, "job"),
    lambda made, url: made(PowerGauge, [0], 1, url, "job"),
]


@pytest.mark.parametrize("construct", METRICS)
def test_metric_refuses_a_repeated_and_an_unknown_window(
    construct: Callable[[Made, str], Any], made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        one = construct(made, "")
    assert caplog.messages == ["Nothing is pushed: pushgateway_url is empty."]
    one.begin_window("step", sync_execution=False)
    with pytest.raises(ValueError, match="'step' already exists"):
        one.begin_window("step", sync_execution=False)
    one.end_window("step", sync_execution=False)
    with pytest.raises(ValueError, match="'step' does not exist"):
        one.end_window("step", sync_execution=False)


@pytest.mark.parametrize("bounds", [[], [2.0, 1.0], [1.0, 1.0]])
@pytest.mark.parametrize("device", ["gpu", "cpu", "dram"])
def test_histogram_refuses_bounds_that_do_not_rise(
    device: str, bounds: list[float], made: Made
) -> None:
    with pytest.raises(ValueError, match=f"{device.upper()} bucket range must have rising bounds"):
        made(EnergyHistogram, [0], [0], "", "job", **{f"{device}_bucket_range": bounds})


# ------------------------------------------------------------------------------ a faulty gateway


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (400, {}, "it answered 400 pushed metrics are invalid"),
        (404, {}, "it answered 404"),
        (503, {}, "it answered 503"),
        (301, {"Location": "/elsewhere"}, "it answered 301"),
        (303, {"Location": "/elsewhere"}, "it answered 303"),
        (307, {"Location": "/elsewhere"}, "it answered 307"),
    ],
)
def test_refused_figures_are_logged_once_and_pushed_again(
    status: int,
    headers: dict[str, str],
    why: str,
    gateway: Gateway,
    made: Made,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway.status, gateway.headers = status, headers
    one = made(EnergyHistogram, [0], [0], gateway.url, "job")
    for count in range(3):
        one.begin_window("step", sync_execution=False)
        one.end_window("step", sync_execution=False)
        eventually(lambda count=count: len(gateway.pushes) > 2 * count, "it is pushed")
    (text,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert text.startswith("The Pushgateway 127.0.0.1:")
    assert why in text
    assert {path for _, path, _, _ in gateway.pushes} == {"/metrics/job/job"}  # no redirect
    gateway.status = 202
    labels = {"window": "step", "index": "0"}
    eventually(
        lambda: gateway.get("energy_monitor_gpu_energy_joules_count", **labels) == 3,
        "nothing is lost",
    )
    eventually(lambda: not pushing(), "the thread ends with its windows")


def pushing() -> bool:
    return "wattspan-zeus-push" in {thread.name for thread in threading.enumerate()}


def test_absent_gateway_is_logged_once_and_its_password_never(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(EnergyCumulativeCounter, [0], [0], 0, "http://me:secret@127.0.0.1:9/push/", "job")
    one.begin_window("epoch")
    eventually(lambda: caplog.messages, "it is logged")
    one.end_window("epoch")
    eventually(lambda: not one.has_windows, "the energy is read")
    one.pushed.close()
    first, last = caplog.messages
    assert "The Pushgateway 127.0.0.1:9 does not take the figures of job 'job'" in first
    assert "secret" not in first
    assert last == "The last figures of job 'job' are not in the Pushgateway 127.0.0.1:9."


def test_password_of_an_address_is_sent_and_not_logged(
    gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    absent = made(EnergyCumulativeCounter, [0], [0], 0, "http://me:hidden@localhost.invalid", "job")
    url = gateway.url.replace("//", "//me:a%20b@")
    for one in (absent, made(EnergyCumulativeCounter, [0], [0], 0, url, "job")):
        one.begin_window("epoch")
        one.end_window("epoch")
    eventually(lambda: gateway.pushes and caplog.messages, "figures are pushed")
    assert "hidden" not in caplog.text
    assert gateway.pushes[0][2]["authorization"] == "Basic bWU6YSBi"


def test_windows_do_not_wait_for_a_gateway_that_hangs(gateway: Gateway, made: Made) -> None:
    gateway.released.clear()
    one = made(EnergyHistogram, [0], [0], gateway.url, "job")
    for _ in range(2):
        for _ in range(50):
            one.begin_window("step", sync_execution=False)
            one.end_window("step", sync_execution=False)
        assert gateway.held.wait(60)  # and the windows after it end while it hangs
    assert gateway.pushes == []
    gateway.released.set()
    labels = {"window": "step", "index": "0"}
    eventually(
        lambda: gateway.get("energy_monitor_gpu_energy_joules_count", **labels) == 100,
        "nothing is lost",
    )


def test_all_jobs_together_wait_once_at_exit(
    gateway: Gateway, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.released.clear()
    for job in ("first", "second"):
        made(EnergyCumulativeCounter, [0], [0], 0, gateway.url, job).begin_window("epoch")
    eventually(lambda: len(gateway.waiting) == 2, "both wait for the gateway")
    monkeypatch.setattr(metric, "EXIT_TIMEOUT", 0.05)
    waits: list[float] = []
    join = threading.Thread.join

    def timed(thread: threading.Thread, timeout: float) -> None:
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", timed)
    finalizers = [one.pushed._closes for one in made.metrics]
    for finalizer in finalizers:
        finalizer()
    monkeypatch.undo()
    assert sum(max(0.0, wait) for wait in waits) <= 0.05
    gateway.released.set()
    eventually(lambda: not pushing(), "both push their last figures")
    for one in made.metrics:
        one.end_window("epoch")


def test_path_of_an_address_is_kept(gateway: Gateway, made: Made) -> None:
    address = gateway.url.removeprefix("http://") + "/prefix/"
    one = made(EnergyCumulativeCounter, [0], [0], 1, address, "job")
    one.begin_window("epoch")
    eventually(lambda: gateway.pushes, "it is pushed")
    one.end_window("epoch")
    assert gateway.pushes[0][1] == "/prefix/metrics/job/job"


def test_closing_pushes_open_windows(gateway: Gateway, made: Made) -> None:
    one = made(EnergyCumulativeCounter, [0], [0], 10**6, gateway.url, "job")
    one.begin_window("epoch")
    eventually(lambda: gateway.pushes, "the first figures are pushed")
    first = gateway.get("energy_monitor_cpu_energy_joules_total", window="epoch", index="0")
    one.pushed.close()
    last = gateway.get("energy_monitor_cpu_energy_joules_total", window="epoch", index="0")
    assert last is not None
    assert first is not None
    assert last > first


# --------------------------------------------------------------------------------- a faulty agent


@pytest.mark.parametrize("fault", ["error", "settled"])
def test_counter_catches_up_after_an_agent_that_does_not_answer(
    fault: str, gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(EnergyCumulativeCounter, [0], [0], 0, gateway.url, "job")
    faulty = {"error": AgentUnavailableError("restarting"), "settled": False}[fault]
    setattr(made.meter, fault, faulty)
    one.begin_window("epoch")
    began, asked = monotonic_ns(), len(made.meter.calls)
    eventually(lambda: len(made.meter.calls) > asked + 5, "it is read again and again")
    setattr(made.meter, fault, {"error": None, "settled": True}[fault])
    one.end_window("epoch")
    least = made.meter.joules(DEVICES[0].id, began, monotonic_ns() - 10**6)
    labels = {"window": "epoch", "index": "0"}
    eventually(
        lambda: (gateway.get("energy_monitor_gpu_energy_joules_total", **labels) or 0) >= least,
        "the whole energy is pushed",
    )
    assert no_warning(caplog)


@pytest.mark.parametrize("fault", [AgentUnavailableError("restarting"), AgentBusyError("busy")])
def test_histogram_waits_for_an_agent_that_restarts(
    fault: Exception, gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(EnergyHistogram, [0], [0], gateway.url, "job")
    made.meter.error = fault
    asked = len(made.meter.calls)
    for _ in range(3):
        one.begin_window("step", sync_execution=False)
        one.end_window("step", sync_execution=False)
    eventually(lambda: len(made.meter.calls) > asked + 5, "it is read again and again")
    made.meter.error = None
    labels = {"window": "step", "index": "0"}
    eventually(
        lambda: gateway.get("energy_monitor_gpu_energy_joules_count", **labels) == 3,
        "all are pushed",
    )
    assert no_warning(caplog)


@pytest.mark.parametrize("error", [NotMeasuredError("no reading"), ZeroDivisionError("a fault")])
def test_windows_without_energy_are_counted_in_the_log(
    error: Exception, gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(EnergyHistogram, [0], [0], gateway.url, "job")
    made.meter.error = error
    for _ in range(5):
        one.begin_window("step", sync_execution=False)
        one.end_window("step", sync_execution=False)
    eventually(lambda: not one.has_windows, "all are tried")
    assert caplog.messages == [
        f"{count} windows of EnergyHistogram are not in the metric, now 'step': {error}"
        for count in (1, 2, 4)
    ]


def test_window_of_an_absent_agent_is_told_at_the_end(
    gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(EnergyHistogram, [0], [0], gateway.url, "job")
    made.meter.error = AgentUnavailableError("gone")
    one.begin_window("step", sync_execution=False)
    one.end_window("step", sync_execution=False)
    one.pushed.close()
    assert caplog.messages == [
        "1 windows of EnergyHistogram are not in the metric, now 'step': gone"
    ]


# ------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("job", "environ", "path"),
    [
        ("job", {}, "/job/job"),
        ("a job ä", {}, "/job/a%20job%20%C3%A4"),
        ("a/b", {}, "/job@base64/YS9i"),
        ("", {}, "/job@base64/="),
        ("job", {"WORLD_SIZE": "1", "RANK": "0"}, "/job/job"),
        ("job", {"WORLD_SIZE": "8", "RANK": "3"}, "/job/job/process/rank-3"),
        ("job", {"WORLD_SIZE": "8"}, "/job/job"),
    ],
)
def test_group_is_that_of_the_job_and_of_one_of_several_processes(
    job: str, environ: dict[str, str], path: str
) -> None:
    assert group_path(job, environ) == f"/metrics{path}"


def test_child_of_a_fork_pushes_apart_from_its_parent(gateway: Gateway, made: Made) -> None:
    one = made(EnergyCumulativeCounter, [0], [0], 1, gateway.url, "job")
    one.begin_window("parent")
    eventually(lambda: gateway.pushes, "the parent pushes")

    def work() -> str:
        with pytest.raises(ValueError, match="before it forked this one"):
            one.end_window("parent")
        one.begin_window("child")
        one.end_window("child")
        one.pushed.close()
        return "pushed"

    assert in_child(work) == "pushed"
    (_, path, _, body), *_ = [one for one in gateway.pushes if "/process/" in one[1]]
    assert path.startswith("/metrics/job/job/process/pid-")
    assert {dict(labels)["window"] for _, labels in parsed(body)} == {"child"}
    one.end_window("parent")


def test_process_of_multiprocessing_has_the_group_of_its_name() -> None:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def work() -> None:
        writer.send(group_path("job", {}))
        writer.send(group_path("job", {"WORLD_SIZE": "8", "RANK": "3"}))

    process = context.Process(target=work, name="worker 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        process.start()
    assert reader.recv() == "/metrics/job/job/process/worker%201"
    assert reader.recv() == "/metrics/job/job/process/rank-3%20worker%201"  # not its parent's
    process.join()
    reader.close()
    writer.close()


def test_push_has_a_bounded_number_of_windows_and_the_rest_is_logged(
    gateway: Gateway, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    counter = made(EnergyCumulativeCounter, [], [0], 3600, gateway.url, "train")
    counter.begin_window("all")
    for number in range(metric.MAX_NAMES + 10):
        counter.begin_window(f"epoch {number}")
        counter.end_window(f"epoch {number}")
    counter.end_window("all")
    counter.pushed.close()
    windows = {dict(labels)["window"] for _, labels in gateway.samples()}
    first = metric.MAX_NAMES + 10 - (metric.MAX_NAMES - 1)
    assert windows == {"all", *(f"epoch {i}" for i in range(first, metric.MAX_NAMES + 10))}
    texts = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.split("; ")[1].split()[0] for text in texts] == ["1", "2", "4", "8"]
    assert all("Give windows that repeat one name." in text for text in texts)
