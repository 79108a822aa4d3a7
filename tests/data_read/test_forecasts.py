"""`pretrain data plan` and `data mix` against rows that are counted one by one as the loader takes them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import yaml

from launch import cli
from pretrain.data.loader import open_loader
from pretrain.data.share_plot import _layers
from pretrain.topology import World
from tests.data_read.corpus import BYTE_LENGTHS, random_documents, run_config, write_tokenizer_file, write_tokens

STEPS = 12


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps: a and b as 3 to 1, from step 6 on as 1 to 3."""
    root = tmp_path_factory.mktemp("forecasts")
    tokenizer = write_tokenizer_file(root)
    write_tokens(root / "a", random_documents(120, 14, 1), tokenizer)
    write_tokens(root / "b", random_documents(80, 14, 2), tokenizer)
    config = run_config(
        tokenizer,
        {"a": (root / "a", 3.0), "b": (root / "b", 1.0)},
        schedule__total_steps=STEPS,
        data__stages=[{"from_step": 6, "weights": {"a": 1.0, "b": 3.0}}],
    )
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture(scope="module")
def counted(config_file: Path) -> list[Counter[str]]:
    """Rows of each source in each step, as the loader addresses them."""
    from pretrain.config import load_config

    steps = []
    with open_loader(load_config(config_file, []), BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        for _ in range(STEPS):
            steps.append(Counter(loader.source_names[source] for source in loader._places.of(state)[:, 0].tolist()))
            state = loader.next_state(state)
    return steps


def test_plan_counts_the_rows_that_the_run_takes(
    config_file: Path, counted: list[Counter[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "plan", str(config_file), "--json", "--ranks", "2"]) == 0
    body = json.loads(capsys.readouterr().out)
    total = sum(counted, Counter[str]())
    assert {source["name"]: source["rows"] for source in body["sources"]} == dict(total)
    assert (body["steps"], body["rows"], body["ranks"]) == (STEPS, 8 * STEPS, 2)
    for source in body["sources"]:
        assert source["epochs"] == pytest.approx(total[source["name"]] / source["rows_in_epoch"])
        assert source["tokens"] == 16 * total[source["name"]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_reads_per_rank_are_the_blocks_that_the_first_rank_takes_rows_from(
    config_file: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a skip off the steps' grid, another mixture and shorter rows, of which a global row feeds two ranks."""
    from pretrain.config import load_config

    stages = [
        {"from_step": 5, "weights": {"b": 1}},
        {"from_step": 8, "sequence_length": 8, "micro_batch_size": 1, "weights": {"a": 2, "b": 1}},
    ]
    changes = [f"data.stages={json.dumps(stages)}", "data.skip_rows=[[16, 21]]"]
    wanted: dict[str, set[tuple[int, int]]] = {"a": set(), "b": set()}
    with open_loader(load_config(config_file, changes), BYTE_LENGTHS, World(0, ranks, 0, ranks)) as loader:
        state = loader.initial_state()
        for _ in range(STEPS):
            for source, epoch, block, _row in loader._places.of(state).tolist():
                wanted[loader.source_names[source]].add((epoch, block))
            state = loader.next_state(state)
    assert cli.main(["data", "plan", str(config_file), "--json", f"--ranks={ranks}", *changes]) == 0
    found = {source["name"]: source["block_reads"] for source in json.loads(capsys.readouterr().out)["sources"]}
    assert found == {name: len(blocks) for name, blocks in wanted.items()}


def test_plan_prints_the_pipeline_and_a_line_for_each_source(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "plan", str(config_file)]) == 0
    text = capsys.readouterr().out
    assert "├─ from step 0: a 3 of 4 rows, b 1 of 4 rows" in text
    assert "├─ from step 6: a 1 of 4 rows, b 3 of 4 rows" in text
    assert "├─ objective: causal_lm, rows of 16 tokens, documents isolated, each ended once by id 0" in text
    assert "12 steps, 96 rows, 1,536 token slots on 1 ranks" in text
    assert "micro-batches; empty" not in text
    words = ["cluster.num_ranks=4", "cluster.min_ranks=2", "data.stages=[{from_step: 6, global_batch_size: 12}]"]
    assert cli.main(["data", "plan", str(config_file), *words]) == 0
    text = capsys.readouterr().out
    assert "from step 0: 4 micro-batches; empty ones fill 0 % on 2 ranks, 33 % on 3 ranks, 0 % on 4 ranks" in text
    assert "from step 6: 6 micro-batches; empty ones fill 0 % on 2 ranks, 0 % on 3 ranks, 25 % on 4 ranks" in text


def test_mix_shows_the_shares_of_each_part_of_the_run(
    config_file: Path, counted: list[Counter[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "mix", str(config_file), "--parts", "4", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert [(part["first_step"], part["end_step"]) for part in parts] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    for part in parts:
        rows = sum(counted[part["first_step"] : part["end_step"]], Counter[str]())
        assert part["shares"] == pytest.approx({name: rows[name] / 24 for name in ("a", "b")})
    assert cli.main(["data", "mix", str(config_file), "--parts", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# a   = b"
    assert lines[2].split()[:2] == ["0-5", "#" * 38 + "=" * 12]
    assert lines[3].split()[:2] == ["6-11", "#" * 12 + "=" * 38]


def test_ranks_must_be_a_number_from_one_on(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "plan", str(config_file), "--ranks", "0"])
    assert ended.value.code == 2
    assert "'0' is not a whole number from 1 on" in capsys.readouterr().err


def test_mix_draws_each_source_over_the_run(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Halves of 3 to 1 and 1 to 3 stand upright in the picture: the lower source is tall, then small."""
    path = tmp_path / "new folder" / "mix.png"
    assert cli.main(["data", "mix", str(config_file), "--parts", "2", "--plot", str(path)]) == 0
    assert "a %" in capsys.readouterr().out
    pixels = matplotlib.image.imread(path)[:, :, :3]
    lower = np.abs(pixels - matplotlib.colors.to_rgb("tab:blue")).max(axis=2) < 0.02
    upper = np.abs(pixels - matplotlib.colors.to_rgb("tab:orange")).max(axis=2) < 0.02
    columns = np.flatnonzero(lower.sum(axis=0) > 50)
    left, right = columns[columns.size // 4], columns[3 * columns.size // 4]
    heights = [(int(lower[:, column].sum()), int(upper[:, column].sum())) for column in (left, right)]
    assert [below / (below + above) for below, above in heights] == pytest.approx([0.75, 0.25], abs=0.02)

    (tmp_path / "file").write_text("")
    assert cli.main(["data", "mix", str(config_file), "--plot", str(tmp_path / "file" / "mix.png")]) == 2
    assert "It must be a file in a folder that can be written to." in capsys.readouterr().err


def test_many_sources_are_drawn_by_the_largest_and_the_rest_together() -> None:
    rest = {f"small-{number}": 0.02 for number in range(5)}
    parts = [(0, 10, {**{f"large-{number}": 0.09 for number in range(10)}, **rest})]
    layers = _layers(parts)
    assert [label for label, _ in layers] == [*(f"large-{n}: 9.0%" for n in range(10)), "5 others: 10.0%"]
    assert sum(values[0] for _, values in layers) == pytest.approx(1.0)
