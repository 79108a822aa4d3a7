"""Speed on a clock of the test's own; expected values are counted by hand."""

from __future__ import annotations

import pytest
import torch

from pretrain.metrics.peak import cuda_peak_bf16, measure_cpu_peak, peak_flops_per_rank
from pretrain.metrics.throughput import Throughput


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _throughput(clock: _Clock, total_steps: int = 100) -> Throughput:
    return Throughput(flops_per_step=6e12, peak_flops=4e12, ranks=2, total_steps=total_steps, clock=clock)


def test_mfu_is_model_flops_over_time_and_the_peak_of_all_ranks() -> None:
    clock = _Clock()
    throughput = _throughput(clock)
    for _ in range(4):
        clock.now += 1.5
        throughput.finish_step(3000)
    rates = throughput.rates(4)
    assert rates.step_s == pytest.approx(1.5)
    assert rates.tokens_per_second == pytest.approx(2000)
    assert rates.mfu == pytest.approx(6e12 / 1.5 / 8e12)  # 0.5


def test_rates_are_of_the_steps_since_the_last_record() -> None:
    clock = _Clock()
    throughput = _throughput(clock)
    clock.now += 10
    throughput.finish_step(1000)
    assert throughput.rates(1).tokens_per_second == pytest.approx(100)
    for _ in range(2):
        clock.now += 1
        throughput.finish_step(1000)
    assert throughput.rates(3).tokens_per_second == pytest.approx(1000)


def test_validation_and_saving_slow_no_step_but_count_in_the_time_left() -> None:
    clock = _Clock()
    throughput = _throughput(clock, total_steps=10)
    for step in range(1, 6):
        clock.now += 2.0
        throughput.finish_step(100)
        if step in (2, 4):
            with throughput.excluded():
                clock.now += 8.0
    rates = throughput.rates(5)
    assert rates.step_s == pytest.approx(2.0)
    assert rates.tokens_per_second == pytest.approx(50)
    assert rates.eta_s == pytest.approx(5 * (4 * 2 + 2 * 8) / 4)  # four steps and two pauses since the first step


def test_speed_after_a_resume_is_of_this_attempt_only() -> None:
    clock = _Clock()
    resumed = _throughput(clock)  # 50 steps were done by an earlier attempt
    clock.now += 2
    resumed.finish_step(200)
    rates = resumed.rates(51)
    assert rates.tokens_per_second == pytest.approx(100)
    assert rates.eta_s == pytest.approx(49 * 2)


def test_a_slow_first_step_does_not_spoil_the_time_left() -> None:
    clock = _Clock()
    throughput = _throughput(clock, total_steps=12)
    clock.now += 60
    throughput.finish_step(1)
    clock.now += 1
    throughput.finish_step(1)
    assert throughput.rates(2).eta_s == pytest.approx(10)


def test_a_record_without_a_step_claims_no_speed_and_the_end_has_no_time_left() -> None:
    clock = _Clock()
    throughput = _throughput(clock)
    clock.now += 1
    rates = throughput.rates(50)
    assert rates.step_s is rates.tokens_per_second is rates.mfu is rates.eta_s is None
    assert throughput.rates(100).eta_s == 0


def test_mfu_is_absent_when_the_peak_is_unknown() -> None:
    clock = _Clock()
    throughput = Throughput(flops_per_step=1e9, peak_flops=None, total_steps=2, clock=clock)
    clock.now += 1
    throughput.finish_step(1)
    assert throughput.rates(1).mfu is None


def test_the_measured_peak_is_what_a_plain_matrix_product_reaches_and_moves_no_random_state() -> None:
    before = torch.random.get_rng_state()
    peak = measure_cpu_peak(torch.float32, size=256, budget_s=0.1)
    assert torch.equal(before, torch.random.get_rng_state())
    # An independent bound: no x86 or ARM core does more than 2 FMA units x 16 fp32 lanes x 2 FLOP x 6 GHz.
    assert 1e8 < peak < torch.get_num_threads() * 2 * 16 * 2 * 6e9


def test_the_configured_peak_wins_and_an_unlisted_device_is_not_guessed() -> None:
    assert peak_flops_per_rank(123.0, torch.device("cpu"), "bf16") == 123.0
    assert cuda_peak_bf16("NVIDIA H100 80GB HBM3") == 989e12
    assert cuda_peak_bf16("NVIDIA H100 PCIe") == 756e12
    assert cuda_peak_bf16("NVIDIA A100-SXM4-80GB") == 312e12
    assert cuda_peak_bf16("NVIDIA RTX A4000") is None
    assert cuda_peak_bf16("NVIDIA L4") == 121e12
