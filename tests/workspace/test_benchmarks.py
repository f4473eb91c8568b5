"""The benchmark measures, its numbers are what it says they are, and the docs show them."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cases import PLAIN_FORM, REJAX, all_cases, chosen
from flax import nnx
from floor import gradient_flops
from nets import NUM_LEAVES, build
from protocol import Child, MeasureError, OutOfTimeError
from table import PAGE, RESULTS, as_markdown, page_with_results, ratios, summary

from nnx_ppo.networks import make_mlp_actor_critic

ROOT = Path(__file__).parents[2]
CASE = {
    "network": "mlp",
    "environment": "FollowTarget",
    "n_envs": 64,
    "against": PLAIN_FORM,
    "window": 10,
    "n_epochs": 4,
    "n_minibatches": 4,
}
ROW = {
    "device": "CPU, 2 cores",
    "case": CASE,
    "ours": {
        "compile_seconds": 8.0,
        "peak_bytes": 500_000_000,
        "iteration_seconds": [0.3, 0.1, 0.2],
        "host_seconds": [0.001, 0.001, 0.004],
        "gradient_seconds": [0.15, 0.15, 0.9],
    },
    "other": {
        "compile_seconds": 10.0,
        "peak_bytes": 900_000_000,
        "iteration_seconds": [0.6, 0.8, 0.5],
        "host_seconds": [0.001, 0.001, 0.001],
        "gradient_seconds": [0.45, 0.3, 0.6],
    },
    "products": {"gradient_flops": 5e9, "flops_per_second": [4e10, 5e10, 6e10]},
}


@pytest.mark.slow
def test_a_row_is_measured(tmp_path):
    """In the processes that a real row has, with a compiler that hurries."""
    file = tmp_path / "results.json"
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--quick", "--output", file]
    hurry = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command, env=hurry, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "FollowTarget" in done.stdout
    results = json.loads(file.read_text())
    assert results["left_out"] == {}
    (row,) = results["rows"]
    for form in ("ours", "other"):
        found = summary(row, form)
        assert 10 < found.steps_per_second < 1e7
        assert 0.1 < found.compile_seconds < 600
        assert 1e8 < found.peak_bytes < 1e10
        assert 0.0 < found.host_seconds < 1.0
        assert found.gradient_share is not None and 0.0 < found.gradient_share <= 1.0
        assert found.floor_ratio is not None and found.floor_ratio > 1.0
        assert len(row[form]["iteration_seconds"]) >= 5
    assert row["ours"]["leaves"] == row["other"]["leaves"]
    assert f"### {results['machine']}" in as_markdown(results)


def test_summary_and_ratios_by_hand():
    ours = summary(ROW, "ours")
    assert ours.steps_per_second == pytest.approx(64 * 10 / 0.2)
    assert ours.host_seconds == 0.001
    assert ours.gradient_share == pytest.approx(0.15 / 0.2)
    assert ours.floor_ratio == pytest.approx(0.15 / (5e9 / 5e10))
    assert ratios(ROW) == pytest.approx((0.6 / 0.2, 0.45 / 0.15, 10.0 / 8.0))
    assert ratios({**ROW, "other": None}) is None


def test_a_peer_has_a_line_of_its_own_and_no_gradient_phase():
    peer = {**ROW["other"], "gradient_seconds": [], "version": "0.1.3"}
    row = {**ROW, "case": {**CASE, "against": REJAX}, "other": peer}
    results = {
        "machine": "CPU, 2 cores",
        "versions": {"jax": "1"},
        "minutes": 3.0,
        "rows": [row],
        "host": None,
        "left_out": {"brax": "it cannot be installed here"},
    }
    lines = as_markdown(results).splitlines()
    assert lines[4] == (
        "| mlp | FollowTarget | 64 | 3,200 | 8.0 | 500 | 1.00 | 25 | 75 | 1.50 "
        "| rejax | 3.00 | | 1.25 |"
    )
    assert lines[5].startswith("| mlp of rejax 0.1.3 | FollowTarget | 64 | 1,070 | 10.0 | 900 |")
    assert "- Not measured: brax, it cannot be installed here." in lines


def test_operations_of_a_gradient_by_hand():
    """Actor 3-8-4, critic 3-6-1; the two matrices that read the observation take two products."""
    network = make_mlp_actor_critic(3, 2, [8], [6], nnx.Rngs(0))
    per_sample = 2 * (2 * 3 * 8 + 3 * 8 * 4 + 2 * 3 * 6 + 3 * 6 * 1)
    assert gradient_flops(network, 3, 10) == 10 * per_sample


def test_the_network_of_the_host_row_has_as_many_leaves_as_it_says():
    assert len(nnx.to_flat_state(nnx.state(build("many-leaves", 1, 1)))) == NUM_LEAVES


def test_every_network_meets_every_environment():
    cases = all_cases(full=True)
    assert max(Counter(case.name for case in cases).values()) == 1
    for environment in ("FollowTarget", "CartpoleBalance", "CheetahRun"):
        for n_envs in (64, 256, 2048):
            for network in ("mlp", "lstm", "gru", "graph"):
                (case,) = chosen(cases, [f"{network}/{environment}/{n_envs}"])
                assert (case.window, case.n_updates) == (30, 16)
    plain = [case.name for case in cases if case.against == PLAIN_FORM]
    assert [name for name in plain if "CheetahRun" in name] == ["mlp/CheetahRun/256"]
    assert all("/2048" not in case.name for case in all_cases())


def test_the_docs_show_the_results_that_are_kept():
    page = PAGE.read_text()
    assert page_with_results(page) == page
    for path in RESULTS.glob("*.json"):
        machine = json.loads(path.read_text())["machine"]
        assert path.stem == machine.lower().replace(", ", "-").replace(" ", "-")


def test_a_child_says_what_went_wrong():
    script = "from protocol import serve; serve(lambda: {'divide': lambda: {'x': 1 / 0}})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    child = Child([sys.executable, "-c", script], environment, seconds=60.0)
    try:
        with pytest.raises(MeasureError, match="ZeroDivisionError"):
            child.ask("divide")
    finally:
        child.close()


def test_a_child_that_dies_or_takes_too_long_is_no_deadlock():
    dying = Child([sys.executable, "-c", "raise SystemExit('gone')"], os.environ, 60.0)
    sleeping = Child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, 1.0)
    try:
        with pytest.raises(MeasureError, match="gone"):
            dying.ask("describe")
        with pytest.raises(OutOfTimeError):
            sleeping.ask("describe")
    finally:
        dying.close()
        sleeping.close()
