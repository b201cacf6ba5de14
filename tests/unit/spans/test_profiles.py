"""Profiles: energy over time, uncertainty, thinning."""

from __future__ import annotations

import random

import pytest

from wattspan.model import SECOND, HwType, Instant, Interval, Microjoules
from wattspan.spans.packed_energy import GPU_MASK, WHOLE, lanes_of, shift_of
from wattspan.spans.profiles import EnergyProfile

CPU, GPU, MEMORY, ENCLOSURE = HwType.CPU, HwType.GPU, HwType.MEMORY, HwType.ENCLOSURE
MS = 1_000_000


def interval(start: int, end: int) -> Interval:
    """From and to milliseconds."""
    return Interval("", Instant(start * MS, 0), Instant(end * MS, 0), Microjoules(0))


def tell(
    profile: EnergyProfile,
    *energies: int,
    domain: str = "cpu",
    kind: HwType = CPU,
    start: int = 0,
    every: int = 100,
    noise: int = 0,
) -> int:
    """Intervals that follow each other; where they end."""
    for i, energy in enumerate(energies):
        begin = start + i * every
        profile.add(domain, kind, interval(begin, begin + every), energy, noise)
    return start + len(energies) * every


def tell_all(profile: EnergyProfile, domains: dict[str, HwType], start: int, until: int) -> None:
    """A hundred microjoules in every tenth of a second of each domain, side by side."""
    for begin in range(start, until, 100):
        for domain, kind in domains.items():
            tell(profile, 100, domain=domain, kind=kind, start=begin)


def energy(profile: EnergyProfile, start: float, end: float, kind: HwType = CPU) -> int:
    """A straight line is followed from just below, so 499 is 500."""
    spent = profile.between(round(start * MS), round(end * MS)).energy[kind]
    return spent + 1 if spent % 10 == 9 else spent


def test_empty_profile_has_no_energy() -> None:
    profile = EnergyProfile()
    assert (profile.watermark, profile.horizon) == (0, 0)
    answer = profile.between(0, 10**12)
    assert (answer.energy, answer.uncertainty, answer.covered) == ({}, {}, 0)
    profile.finish()
    assert profile.watermark == 0


def test_energy_is_spread_evenly_without_samples() -> None:
    profile = EnergyProfile()
    tell(profile, 1000, 3000)
    assert energy(profile, 0, 200) == 4000
    assert energy(profile, 50, 150) == 500 + 1500
    assert energy(profile, 10, 11) == 10
    assert profile.between(50 * MS, 150 * MS).covered == 100 * MS


def test_samples_shape_cpu_and_memory_energy_only() -> None:
    profile = EnergyProfile()
    for mono, cpu in ((0, 0), (10, 0), (20, 10), (100, 10), (120, 10)):
        profile.sample(mono * MS, cpu * MS)
    for kind in (CPU, MEMORY, GPU):
        profile.expect(kind, kind, 0)
    for kind in (CPU, MEMORY, GPU):
        tell(profile, 1000, domain=kind, kind=kind)
    assert energy(profile, 0, 10) == 0
    assert energy(profile, 10, 20) == 1000
    assert energy(profile, 10, 15, MEMORY) == 500
    assert energy(profile, 20, 100) == 0
    assert energy(profile, 10, 20, GPU) == 100


def test_falling_or_repeated_samples_are_ignored() -> None:
    profile = EnergyProfile()
    for mono, cpu in ((0, 50), (50, 100), (50, 400), (40, 500), (100, 20), (110, 100)):
        profile.sample(mono * MS, cpu * MS)
    tell(profile, 1000)
    assert energy(profile, 0, 50) == 1000
    assert energy(profile, 50, 100) == 0


def test_mean_rate_is_extrapolated_beyond_samples() -> None:
    profile = EnergyProfile()
    for mono in (25, 50, 75):
        profile.sample(mono * MS, mono * MS)
    tell(profile, 1000)
    assert energy(profile, 0, 25) == 250
    assert energy(profile, 75, 100) == 250


@pytest.mark.parametrize(
    "samples",
    [
        [(500, 0), (600, 10)],  # begin later
        [(-20, 0), (-10, 5)],  # end before
        [(50, 10)],  # a single sample gives no rate
        [(0, 10), (50, 10), (100, 10)],  # a stopped clock gives none
        [(0, 0), (10**9, 1)],  # the clock moved, but not by a nanosecond here
    ],
)
def test_samples_without_cpu_time_leave_energy_spread_evenly(
    samples: list[tuple[int, int]],
) -> None:
    profile = EnergyProfile()
    for mono, cpu in samples:
        profile.sample(mono * MS, cpu)
    tell(profile, 1000)
    assert energy(profile, 0, 50) == 500


def test_newest_samples_are_kept() -> None:
    profile = EnergyProfile()
    for i in range(10_002):
        profile.sample(i * MS, min(i, 9_950) * MS)
    tell(profile, 1000, start=9_900)
    assert energy(profile, 9_900, 9_950) == 1000


# -------------------------------------------------------------------------------- counter steps


def clocked(until: int, rate: int = 1) -> EnergyProfile:
    profile = EnergyProfile()
    for mono in range(0, until + 20, 10):
        profile.sample(mono * MS, mono * rate * MS)
    return profile


def test_noisy_intervals_are_pooled() -> None:
    profile = clocked(1000)
    # The process worked evenly; the counter's step moved energy from one interval to the next.
    for start, spent in ((0, 1500), (100, 500)):
        profile.add("cpu", CPU, interval(start, start + 100), spent, 50)
        assert profile.watermark == 0
    profile.add("cpu", CPU, interval(200, 300), 1000, 50)
    assert profile.watermark == 300 * MS
    assert energy(profile, 0, 100) == energy(profile, 100, 200) == energy(profile, 200, 300) == 1000


def test_sockets_are_pooled_together() -> None:
    # A process works always, on socket 0 first and on socket 1 for a tenth of a second at the end.
    profile = clocked(1300)
    for begin in range(0, 1000, 100):
        for socket in range(2):
            own = 1000 if socket == (begin == 700) else 0
            tell(profile, own, domain=f"cpu:{socket}", start=begin, noise=own // 25)
    assert energy(profile, 200, 300) == pytest.approx(1000, abs=5)
    assert energy(profile, 650, 700) == pytest.approx(500, abs=5)
    assert energy(profile, 700, 800) == pytest.approx(1000, abs=5)


def test_socket_that_stays_behind_is_awaited() -> None:
    profile = clocked(3000)
    profile.expect("cpu:1", CPU, 0)
    for start in range(0, 1100, 100):
        tell(profile, 10, domain="cpu:0", start=start, noise=50)
        if start < 200:
            tell(profile, 10, domain="cpu:1", start=start, noise=50)
    assert not profile.between(0, 100 * MS).energy  # the other one is awaited
    profile.finish()
    assert energy(profile, 0, 100) == pytest.approx(20, abs=2)


def test_pool_is_released_after_a_second() -> None:
    profile = clocked(3000)
    tell(profile, *[10] * 9, noise=50)
    assert profile.watermark == 0
    tell(profile, 10, start=900, noise=50)
    assert profile.watermark == SECOND


def test_exited_process_has_no_energy_after_its_exit() -> None:
    profile = EnergyProfile()
    for mono in range(0, 210, 10):
        profile.sample(mono * MS, min(mono, 100) * MS)
    profile.sample(1 << 62, 100 * MS)
    tell(profile, 1000, *[0] * 9, noise=50)
    assert energy(profile, 0, 100) == 1000


def test_exact_or_unsampled_intervals_are_not_pooled() -> None:
    exact = clocked(1000)
    tell(exact, 0, 10, 10)
    assert exact.watermark == 300 * MS
    blind = EnergyProfile()
    tell(blind, 10, 10, 10, noise=50)
    assert blind.watermark == 300 * MS
    gpu = clocked(1000)
    tell(gpu, 10, 10, domain="gpu", kind=GPU, noise=50)
    assert gpu.watermark == 200 * MS


def test_finish_releases_pools() -> None:
    profile = clocked(1000)
    profile.expect("gpu", GPU, 0)
    tell(profile, 10, 30, noise=50)
    assert profile.watermark == 0
    profile.finish()
    assert energy(profile, 0, 200) == 40


def test_larger_step_has_a_larger_uncertainty() -> None:
    stated = []
    for noise in (0, 10_000, 100_000):
        profile = EnergyProfile()
        tell(profile, *[1_000_000] * 10, noise=noise)
        stated.append(profile.between(50 * MS, 650 * MS).uncertainty[CPU])
    assert stated[0] < stated[1] < stated[2]
    assert stated[2] < 200_000


def test_changing_power_has_a_larger_uncertainty() -> None:
    steady, changing = EnergyProfile(), EnergyProfile()
    tell(steady, *[500_000] * 10)
    tell(changing, *[0, 1_000_000] * 5)
    sure, unsure = (p.between(150 * MS, 750 * MS).uncertainty[CPU] for p in (steady, changing))
    assert 5 * sure < unsure


def test_gpu_interval_below_recent_power_has_a_larger_uncertainty() -> None:
    constant, below = EnergyProfile(), EnergyProfile()
    tell(constant, *[500] * 6, domain="gpu", kind=GPU)
    # The halves of two loads at full power, then a load in the halves of two intervals: the energy
    # of the latter is 1000.
    tell(below, 0, 1000, 500, 500, 500, 0, domain="gpu", kind=GPU)
    assert energy(below, 350, 450, GPU) == 500
    assert below.between(350 * MS, 450 * MS).uncertainty[GPU] > 450
    assert constant.between(350 * MS, 450 * MS).uncertainty[GPU] < 100


def test_blurred_interval_may_have_the_energy_of_a_load_elsewhere() -> None:
    exact, blurred = EnergyProfile(), EnergyProfile()
    for profile, noise in ((exact, 10), (blurred, 30)):
        start = tell(profile, 0, 1000, 0, domain="gpu", kind=GPU)
        tell(profile, 100, 100, 100, domain="gpu", kind=GPU, start=start, noise=noise)
    period = 420 * MS, 480 * MS
    assert exact.between(*period).uncertainty[GPU] < 70
    assert blurred.between(*period).uncertainty[GPU] > 250


def test_uncertainty_of_unequal_shares_grows_over_time() -> None:
    profile = EnergyProfile()
    for i in range(100):
        noise = 10_000 if i % 2 else 0
        profile.add("cpu", CPU, interval(i * 100, i * 100 + 100), 1_000_000, noise)
    short = profile.between(150 * MS, 350 * MS).uncertainty[CPU]
    long = profile.between(150 * MS, 9_550 * MS).uncertainty[CPU]
    assert short < long


def test_error_of_the_idle_power_grows_with_the_period() -> None:
    certain, doubtful = EnergyProfile(), EnergyProfile()
    for begin in range(0, 10_000, 100):
        certain.add("cpu", CPU, interval(begin, begin + 100), 10_000, 0)
        doubtful.add("cpu", CPU, interval(begin, begin + 100), 10_000, 0, baseline=200.0)
    for length in (1_000, 8_000):
        period = 500 * MS, (500 + length) * MS
        sure, unsure = (p.between(*period).uncertainty[CPU] for p in (certain, doubtful))
        assert unsure**2 - sure**2 == pytest.approx((2 * length) ** 2, rel=0.3)
    assert certain.between(*period).energy == doubtful.between(*period).energy


def test_thinning_keeps_the_error_of_the_idle_power() -> None:
    profile = EnergyProfile(limit=64)
    for begin in range(0, 100_000, 100):
        profile.add("cpu", CPU, interval(begin, begin + 100), 10_000, 0, baseline=200.0)
    assert profile.thinned > 0
    stated = profile.between(1_000 * MS, 90_000 * MS).uncertainty[CPU]
    assert stated >= 0.9 * 2 * 89_000


def test_uncertainty_inside_a_slice_shrinks_with_the_length() -> None:
    profile = EnergyProfile()
    tell(profile, 1_000_000, 3_000_000, 1_000_000, noise=100_000)
    lengths = (1, 7, 1000, 10**6, 40 * 10**6)
    stated = [profile.between(120 * MS, 120 * MS + n).uncertainty[CPU] for n in lengths]
    assert stated == sorted(stated)
    assert stated[0] <= 3
    assert stated[-1] > 10 * stated[-2]


# -------------------------------------------------------------------------------- several domains


def test_watermark_is_that_of_the_slowest_active_domain() -> None:
    profile = EnergyProfile()
    profile.expect("gpu", GPU, 0)
    tell(profile, 100, 100, 100)
    assert profile.watermark == 0
    tell(profile, 1000, domain="gpu", kind=GPU, start=0, every=150)
    assert profile.watermark == 150 * MS
    assert profile.between(0, SECOND).energy == {CPU: 150, GPU: 1000}
    assert profile.between(0, SECOND).covered == 150 * MS


def test_expecting_a_domain_twice_has_no_effect() -> None:
    profile = EnergyProfile()
    tell(profile, 100)
    profile.expect("cpu", CPU, 0)
    tell(profile, 100, start=100)
    assert energy(profile, 0, 200) == 200


def test_domains_of_one_type_add_up() -> None:
    profile = EnergyProfile()
    for domain in ("a", "b"):
        profile.expect(domain, CPU, 0)
    tell(profile, 1000, 1000, domain="a")
    tell(profile, 30, 30, domain="b", every=90)
    assert profile.watermark == 180 * MS
    assert energy(profile, 0, 90) == 900 + 30
    assert energy(profile, 0, 180) == 1800 + 60


def test_stopped_domain_is_not_waited_for_beyond_patience() -> None:
    profile = EnergyProfile(patience=SECOND)
    for domain in ("a", "b"):
        profile.expect(domain, CPU, 0)
    profile.expect("gpu", GPU, 0)
    tell(profile, *[10] * 2, domain="gpu", kind=GPU)
    tell_all(profile, {"a": CPU, "b": CPU}, 0, 2000)
    assert profile.watermark == 2 * SECOND
    before, after = profile.between(0, SECOND), profile.between(SECOND, 2 * SECOND)
    assert before.energy == {CPU: 2000, GPU: 20}
    assert after.energy == {CPU: 2000}  # no GPU reading: unknown, not zero
    assert after.covered == SECOND
    assert set(after.uncertainty) == {CPU}


def test_late_energy_is_counted_as_lost() -> None:
    profile = EnergyProfile(patience=SECOND)
    profile.expect("gpu", GPU, 0)
    tell(profile, *[100] * 20)
    profile.add("gpu", GPU, interval(0, 100), 70, 0)
    assert profile.lost == 70
    profile.add("gpu", GPU, interval(100, 2100), 2000, 0)  # half a tenth of it is news
    assert profile.lost == 70 + 1900
    tell(profile, *[100] * 2, start=2000)
    assert energy(profile, 2000, 2100, GPU) == 100
    assert profile.between(0, 2100 * MS).covered == 100 * MS


def test_gap_is_not_covered_and_its_energy_is_unknown() -> None:
    profile = EnergyProfile()
    end = tell(profile, 100, 100)
    tell(profile, 100, start=end + 50)
    assert profile.between(0, 350 * MS).covered == 300 * MS
    assert profile.between(200 * MS, 250 * MS).energy == {}
    assert energy(profile, 200, 350) == energy(profile, 250, 350) == 100
    assert profile.between(240 * MS, 260 * MS).covered == 10 * MS
    assert profile.between(260 * MS, 300 * MS).covered == 40 * MS


def test_gap_of_one_type_leaves_the_others_known() -> None:
    """One of two GPUs is lost, then both, and both return: the CPU was measured all the time."""
    profile = EnergyProfile(patience=SECOND)
    kinds = {"gpu:0": GPU, "gpu:1": GPU, "cpu": CPU}
    for domain, kind in kinds.items():
        profile.expect(domain, kind, 0)
    tell_all(profile, kinds, 0, 4_000)
    tell_all(profile, {"gpu:1": GPU, "cpu": CPU}, 4_000, 8_000)
    tell_all(profile, {"cpu": CPU}, 8_000, 16_000)
    periods = {"one": (5_000, 7_000), "both": (10_000, 12_000), "edge": (15_000, 17_000)}
    during = {name: profile.between(a * MS, b * MS) for name, (a, b) in periods.items()}
    tell_all(profile, kinds, 16_000, 20_000)
    found = {name: profile.between(a * MS, b * MS) for name, (a, b) in periods.items()}
    assert found["one"].energy == during["one"].energy == {CPU: 2_000, GPU: 2_000}
    assert found["both"].energy == during["both"].energy == {CPU: 2_000}
    assert set(found["both"].uncertainty) == {CPU}
    assert found["edge"].energy == {CPU: 2_000, GPU: 2_000}
    assert [one.covered for one in found.values()] == [0, 0, SECOND]
    assert {one.whole for one in found.values()} == {(CPU,)}  # that of GPUs is a lower bound
    whole = profile.between(0, 20 * SECOND)
    assert (whole.energy, whole.whole) == ({CPU: 20_000, GPU: 8_000 + 4_000 + 8_000}, (CPU,))


def test_adjacent_gaps_merge_and_are_limited() -> None:
    profile = EnergyProfile(patience=SECOND)
    for i in range(300):
        profile.add("cpu", CPU, interval(i * 20, i * 20 + 10 + i % 2), 5, 0)
    whole = profile.between(0, 10**12)
    assert whole.energy[CPU] == 1500
    assert whole.covered < 300 * 10 * MS + 150 * MS  # never more than was measured
    gpu = EnergyProfile()
    for domain in ("a", "b"):
        gpu.expect(domain, GPU, 0)
    gpu.add("a", GPU, interval(10, 20), 1, 0)
    gpu.add("b", GPU, interval(15, 20), 1, 0)
    assert gpu.between(0, 20 * MS).covered == 5 * MS


def test_early_domain_existed_before_and_a_later_one_did_not() -> None:
    profile = EnergyProfile(patience=SECOND)
    tell(profile, *[100] * 5)
    tell(profile, 100, domain="memory", kind=MEMORY, start=400)  # a tenth is news, none is lost
    assert profile.lost == 100
    both = {"cpu": CPU, "memory": MEMORY}
    tell_all(profile, both, 500, 2500)
    assert profile.between(0, SECOND).covered == 500 * MS
    tell(profile, 1000, domain="gpu", kind=GPU, start=2650)
    tell_all(profile, both, 2500, 2800)
    assert profile.between(600 * MS, 2700 * MS).covered == 2100 * MS
    assert GPU not in profile.between(0, SECOND).energy
    assert energy(profile, 2600, 2750, GPU) == 1000


def test_empty_or_inverted_period_has_no_energy() -> None:
    profile = EnergyProfile()
    tell(profile, 1000)
    for start, end in ((50, 50), (60, 40)):
        answer = profile.between(start * MS, end * MS)
        assert (answer.energy, answer.covered) == ({CPU: 0}, 0)
    assert profile.between(10**15, 10**15 + 5).energy == {}
    assert profile.between(-50, -10).covered == 0


def test_interval_out_of_order_or_empty_is_ignored() -> None:
    profile = EnergyProfile()
    tell(profile, 100, 100)
    profile.add("cpu", CPU, interval(0, 100), 50, 0)
    profile.add("cpu", CPU, interval(300, 300), 7, 0)
    assert profile.lost == 57
    assert energy(profile, 0, 300) == 200


def test_time_without_samples_has_the_uncertainty_of_a_spread_interval() -> None:
    """A process that had no place of the sampler for five seconds, and one that had."""
    found = {}
    for every in (10, 5000):
        profile = EnergyProfile()
        for at in range(0, 5001, every):
            profile.sample(at * MS, at * MS)
        tell(profile, *[10_000] * 20)
        found[every] = profile.between(1020 * MS, 1050 * MS)
    assert found[10].energy == found[5000].energy
    assert found[10].uncertainty[CPU] < found[5000].uncertainty[CPU]


def busy(bursts: list[tuple[int, int]], start: int, end: int) -> int:
    """The work of disjoint bursts in a period."""
    return sum(max(0, min(last, end) - max(first, start)) for first, last in bursts)


def burst_errors(draw: random.Random, sampled: str, wrapped: bool) -> tuple[int, int, int]:
    """The error and uncertainty of a span at one reading a second, and the energy around it.

    One burst of 20 to 600 ms is in each second. The span is around one, or anywhere.
    """
    bursts = []
    for second in range(4):
        length = draw.choice((20, 100, 500, draw.randint(20, 600)))
        first = 1000 * second + draw.randint(0, 1000 - length)
        bursts.append((first, first + length))
    start = draw.randint(500, 2000)
    end = start + draw.randint(10, 900)
    if wrapped:
        start, end = bursts[1][0] - draw.randint(0, 20), bursts[1][1] + draw.randint(0, 20)
    profile = EnergyProfile()
    begin = {"never": 9000, "after": end + draw.randint(1, 900), "before": 0}[sampled]
    for mono in range(begin, 4010, 10):
        profile.sample(mono * MS, busy(bursts, 0, mono) * MS)
    tell(profile, *(1000 * busy(bursts, at, at + 1000) for at in range(0, 4000, 1000)), every=1000)
    profile.finish()
    found = profile.between(start * MS, end * MS)
    edges = {start // 1000, end // 1000}
    around = sum(1000 * busy(bursts, 1000 * at, 1000 * at + 1000) for at in edges)
    error = abs(found.energy[CPU] - 1000 * busy(bursts, start, end))
    return error, found.uncertainty[CPU], around


@pytest.mark.parametrize("sampled", ["never", "after"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_truth_of_a_first_span_at_rest_is_within_the_stated_uncertainty(
    sampled: str, wrapped: bool
) -> None:
    draw = random.Random(f"{sampled} {wrapped}")
    found = [burst_errors(draw, sampled, wrapped) for _ in range(100)]
    assert sum(error <= stated for error, stated, _ in found) >= 95
    assert all(stated <= 2 * around + 2 for _, stated, around in found)


def test_sampled_span_at_rest_has_a_small_uncertainty() -> None:
    draw = random.Random(1)
    found = [burst_errors(draw, "before", wrapped=True) for _ in range(20)]
    assert all(stated <= 10_000 for _, stated, _ in found)  # the work of a sampling period


def test_work_between_late_samples_is_anywhere_between_them() -> None:
    """The sampler was late by 700 ms, in which the process worked for 100 ms."""
    profile = EnergyProfile()
    for mono in (*range(0, 210, 10), *range(900, 1110, 10)):
        profile.sample(mono * MS, 100 * MS * (mono >= 900))
    tell(profile, 100_000, 0, every=1000)
    assert profile.between(300 * MS, 400 * MS).uncertainty[CPU] >= 86_000


@pytest.mark.parametrize(
    ("noise", "samples_from", "stated"),
    [
        (0, 9000, [201_327, 245_001, 52_429, 385_001]),
        (0, 0, [1_051, 70_001, 1_573, 2_101]),
        (0, 240, [201_327, 175_001, 31_458, 2_101]),
        (50_000, 9000, [202_460, 248_648, 52_477, 387_332]),
        (50_000, 0, [15_694, 81_855, 1_635, 31_388]),
        (50_000, 240, [202_460, 180_071, 31_537, 42_480]),
    ],
)
def test_uncertainty_with_short_intervals_is_that_of_their_neighbours(
    noise: int, samples_from: int, stated: list[int]
) -> None:
    """The values are those before longer intervals had the whole energy as their uncertainty."""
    profile = EnergyProfile()
    for mono in range(samples_from, 700, 10):
        profile.sample(mono * MS, max(0, min(mono, 430) - 160) * MS)
    tell(profile, 0, 400_000, 1_000_000, 1_000_000, 300_000, 0, noise=noise)
    profile.finish()
    periods = (130, 180), (160, 420), (210, 215), (250, 350)
    found = [profile.between(start * MS, end * MS).uncertainty[CPU] for start, end in periods]
    assert found == pytest.approx(stated, abs=2)


def test_cpu_time_below_the_resolution_spreads_energy_evenly() -> None:
    profile = EnergyProfile()
    profile.sample(0, 0)
    profile.sample(1000 * MS, 1)
    tell(profile, 1000)
    assert energy(profile, 0, 50) == 500


def test_first_interval_without_duration_is_lost() -> None:
    profile = EnergyProfile()
    profile.add("cpu", CPU, interval(100, 100), 7, 0)
    assert (profile.lost, profile.watermark) == (7, 0)


# -------------------------------------------------------------------------------- bounded memory


def test_profile_with_a_small_limit_raises() -> None:
    with pytest.raises(ValueError, match="needs room for 16 rows, not 15"):
        EnergyProfile(15)


@pytest.mark.exhaustive
def test_profile_of_a_day_is_bounded_and_answers() -> None:
    profile = EnergyProfile(512)
    day = 24 * 3600
    for second in range(0, day, 10):
        profile.add("cpu", CPU, interval(second * 1000, (second + 10) * 1000), 10_000_000, 0)
    assert len(profile.rows.times) <= 512
    assert profile.between(0, day * SECOND).energy[CPU] == day * 1_000_000
    hour = profile.between(0, 3600 * SECOND)
    assert abs(hour.energy[CPU] - 3_600_000_000) <= 10_000_000
    late = profile.between((day - 10) * SECOND, day * SECOND)
    assert late.energy[CPU] == 10_000_000


def test_one_step_of_thinning_merges_few_rows() -> None:
    edges = [i * 200 * MS + 1 for i in range(2000)]
    profile = EnergyProfile(512, edges=lambda: edges)
    for i in range(8000):
        profile.append("cpu", CPU, i * 100 * MS, (i + 1) * 100 * MS, 1000 * (i % 7), 0)
    profile.merge()
    rows, steps, before = len(profile.rows.times), 0, profile.between(0, edges[9])
    while profile.crowded:
        profile.thin()
        assert rows - len(profile.rows.times) <= 256  # a lock is held for less than 5 ms
        rows, steps = len(profile.rows.times), steps + 1
    assert steps >= 8000 // 256
    assert rows <= 2 * len(edges) + 512
    assert profile.between(0, edges[9]).energy == before.energy


def test_recent_rows_are_not_thinned() -> None:
    profile = EnergyProfile(4096)
    energies = [1000 * (i % 7) for i in range(3000)]
    tell(profile, *energies)
    assert 0 < profile.thinned <= 280 * SECOND
    assert energy(profile, 299_000, 299_100) == energies[2990]


def test_thinning_keeps_every_fraction_of_later_energies() -> None:
    """Spans were divided up to such times: less energy there would be negative for the next one."""
    profile = EnergyProfile(512)
    end = tell(profile, *[1_000_003] * 450, domain="gpu", kind=GPU)
    at = [(end - 2_000) * MS + 33_333_331, (end - 1_000) * MS + 7]  # no edges of rows
    first, last = (energy & GPU_MASK for energy, _ in map(profile.locate, at))
    rest = last - first >> shift_of(GPU)
    profile.reshape([at[0], *profile.row_times(*at), at[1]], ramp(profile, at, rest))
    times = [*at, *profile.row_times(*at), profile.watermark - 5 * MS - 1]
    before = [profile.locate(time)[0] for time in times]
    assert any((each & GPU_MASK) != (each & GPU_MASK & WHOLE) for each in before)
    tell(profile, *[1_000_003] * 100, domain="gpu", kind=GPU, start=end)
    assert 0 < profile.thinned < min(times)
    assert [profile.locate(time)[0] for time in times] == before


def ramp(profile: EnergyProfile, at: list[int], rest: int) -> list[int]:
    """An energy that is used up in the first half of a period, up to each time of its rows."""
    begin, end = at
    times = [begin, *profile.row_times(begin, end), end]
    return [min(rest, rest * 2 * (time - begin) // (end - begin)) for time in times]


def test_thinned_rows_have_a_larger_uncertainty() -> None:
    profile = EnergyProfile(16)
    tell(profile, *[0, 2_000_000] * 40)
    fresh = EnergyProfile()
    tell(fresh, *[0, 2_000_000] * 40)
    start, end = 50 * MS, 4_050 * MS
    assert profile.between(start, end).uncertainty[CPU] > fresh.between(start, end).uncertainty[CPU]


def test_cache_of_uncertainties_is_bounded() -> None:
    profile = EnergyProfile()
    tell(profile, *range(120))
    for first in range(0, 12_000, 100):
        for last in range(first, 12_000, 100):
            profile.between(first * MS, last * MS)
    assert energy(profile, 0, 12_000) == sum(range(120))


# ----------------------------------------------------------------------------------------- lanes


@pytest.mark.parametrize(
    "kinds", [{CPU}, {CPU, GPU}, {CPU, MEMORY, GPU}, {CPU, MEMORY, GPU, ENCLOSURE}, set()]
)
def test_lanes_are_unpacked_as_packed(kinds: set[HwType]) -> None:
    lanes = lanes_of(frozenset(kinds))
    values = [2**56 - 1 - i for i in range(len(kinds))]
    packed = lanes.pack(values)
    assert list(lanes.energies(packed)) == values
    assert lanes.named(*values) == dict(zip(lanes.kinds, values, strict=True))
    assert lanes.clamp(packed, packed, packed) == packed
    assert lanes.clamp(packed, 0, 0) == 0
    assert bool(packed & GPU_MASK) == (GPU in kinds)
