"""The dashboard's server: who may ask, what is answered, and that nothing but a run's own files is ever read."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from launch import cli
from launch.monitor.dashboard import TOKEN_VARIABLE, choose_token
from launch.monitor.facts import timeline
from launch.monitor.ledger import Kind, Ledger, Span
from launch.monitor.runs_view import RunsView
from launch.monitor.server import DashboardServer
from pretrain.errors import UserError
from pretrain.rundir import RunDirectory
from pretrain.store import open_store
from tests.monitor.journals import Journal, step
from tests.monitor.runs import write_run
from tests.monitor.test_ledger import calm


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def serving(home: Path | str, token: str | None = None) -> Iterator[DashboardServer]:
    view = RunsView(str(home))
    with DashboardServer(("127.0.0.1", 0), view, token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            deadline = time.monotonic() + 30.0
            while view.overview()["reading"] and time.monotonic() < deadline:
                time.sleep(0.02)
            yield server
        finally:
            server.shutdown()
            view.close()
            thread.join()


def get(server: DashboardServer, path: str, *, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(
            response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()
        )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    journal, records = calm()
    run = write_run(tmp_path, "calm", journal.events, records)
    run.store.put("logs/attempt-001/rank-00000.log", b"first line\nlast line\n")
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "not-a-run").mkdir()
    return tmp_path


def test_the_list_has_every_run_and_only_runs(home: Path) -> None:
    (home / "broken").mkdir()
    (home / "broken" / "run.yaml").write_text("nonsense")
    with serving(home) as server:
        answer = get(server, "/api/runs").json()
    states = {row["name"]: row["state"] for row in answer["runs"]}
    assert states == {"calm": "completed", "broken": "damaged"}
    assert [row["recent_losses"] for row in answer["runs"] if row["name"] == "calm"] == [[2.0, 2.0]]
    assert answer["reading"] == 0


def test_a_runs_page_has_state_ledger_attempts_and_logs(home: Path) -> None:
    with serving(home) as server:
        facts = get(server, "/api/run?name=calm").json()
        log = get(server, "/api/log?name=calm&key=logs/attempt-001/rank-00000.log").json()
    assert facts["status"]["state"] == "completed"
    assert facts["ledger"]["seconds"]["training"] == 9.5
    assert facts["logs"] == ["logs/attempt-001/rank-00000.log"]
    assert log["text"] == "first line\nlast line\n"
    assert not facts["living"]


def test_the_runs_of_a_bucket_are_shown_as_those_of_a_directory(home: Path) -> None:
    url = f"memory://{home.name}/runs"
    bucket = open_store(url)
    for path in (home / "calm").rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(home)), path.read_bytes())
    asked = ("/api/run?name=calm", "/api/curves?runs=calm&fields=loss", "/api/config?runs=calm",
             "/api/log?name=calm&key=logs/attempt-001/rank-00000.log")  # fmt: skip
    with serving(home) as server:
        here = [get(server, path).json() for path in asked]
    with serving(url) as server:
        assert [run["name"] for run in get(server, "/api/runs").json()["runs"]] == ["calm"]
        there = [get(server, path).json() for path in asked]
    assert there[0].pop("url") == f"{url}/calm"
    here[0].pop("url")
    for answers in (there, here):  # every reader counts its own versions
        assert answers[0].pop("version") > 0
        assert answers[1].pop("versions").keys() == {"calm"}
    assert there == here


def test_what_is_added_is_in_the_next_answer(home: Path) -> None:
    with serving(home) as server:
        before = get(server, "/api/curves?runs=calm&fields=loss").json()
        run = RunDirectory.locate(str(home / "calm"))
        run.store.append(run.metrics_key(1), json.dumps(step(30, 11, 1.0)).encode() + b"\n")
        with server.view.reading("calm") as reader:
            reader.refresh()
        after = get(server, "/api/curves?runs=calm&fields=loss").json()
    assert before["curves"]["calm"]["loss"]["kept"][0] == [5, 10]
    assert after["curves"]["calm"]["loss"]["kept"][0] == [5, 10, 11]
    assert after["versions"]["calm"] > before["versions"]["calm"]


def test_curves_that_are_at_hand_are_not_sent_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.monitor.runs_view.READ_AGAIN_S", 0.0)
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1)
    write_run(home, "other", journal.events, {1: [step(3, 1, 1.0)]})
    asked = "/api/curves?runs=calm,other&fields=loss"

    def again(answer: Any) -> str:
        return f"{asked}&known={','.join(str(version) for version in answer['versions'].values())}"

    with serving(home) as server:
        first = get(server, asked).json()
        assert get(server, again(first)).json() == {"unchanged": True}
        monkeypatch.setattr("launch.monitor.runs_view.MOST_READERS", 1)  # a reader that is made anew is another one
        get(server, "/api/run?name=calm")
        second = get(server, again(first)).json()
        assert second["curves"] == first["curves"]
        monkeypatch.setattr("launch.monitor.runs_view.MOST_READERS", 16)
        run = RunDirectory.locate(str(home / "other"))
        run.store.append(run.metrics_key(1), json.dumps(step(4, 2, 1.0)).encode() + b"\n")
        third = get(server, again(second)).json()
    assert third["curves"]["other"]["loss"]["kept"][0] == [1, 2]


def test_values_of_the_environment_are_hidden_and_differences_shown(home: Path) -> None:
    with serving(home) as server, server.view.reading("calm") as reader:
        assert reader.config
        reader.config = reader.config.model_copy(
            update={"cluster": reader.config.cluster.model_copy(update={"environment": {"KEY": "hunter2"}})}
        )
    from launch.monitor.facts import config_facts

    fields = config_facts([reader])
    assert fields["cluster.environment.KEY"] == ["(hidden)"]
    assert fields["name"] == ["calm"]
    assert "hunter2" not in json.dumps(fields)


REFUSED = [
    ("/api/run?name=nothing", 400, "does not exist"),
    ("/api/run?name=../calm", 400, "not a run's name"),
    ("/api/run", 400, "not a run's name"),
    ("/api/log?name=calm&key=run.yaml", 400, "is no log"),
    ("/api/log?name=calm&key=logs/../../secret.txt", 400, "is no log"),
    ("/api/curves?runs=calm&fields=password", 400, "not measured"),
    ("/api/curves?runs=calm&fields=loss&points=1e9", 400, "out of range"),
    ("/api/curves?runs=calm&fields=loss&low=nan", 400, "out of range"),
    ("/api/curves?runs=calm&fields=loss&x=weeks", 400, "no axis"),
    ("/api/curves?runs=&fields=loss", 400, "1 to 8"),
    ("/api/nothing", 404, "no such answer"),
    ("/secret.txt", 404, "no such page"),
    ("/../secret.txt", 404, "no such page"),
    ("/..%2fserver.py", 404, "no such page"),
    ("//etc/passwd", 404, "no such page"),
]


def test_what_is_not_there_or_not_allowed_is_refused_in_words(home: Path) -> None:
    with serving(home) as server:
        answers = [(path, status, word, get(server, path)) for path, status, word in REFUSED]
    for path, status, word, answer in answers:
        assert answer.status == status, path
        assert word in answer.body.decode(), path
        assert b"Traceback" not in answer.body


def test_nothing_can_be_changed(home: Path) -> None:
    with serving(home) as server:
        statuses = [get(server, "/api/runs", method=method).status for method in ("POST", "PUT", "DELETE", "PATCH")]
    assert statuses == [501] * 4


def test_a_page_elsewhere_cannot_read_the_dashboard_through_its_own_name(home: Path) -> None:
    with serving(home) as server:
        assert get(server, "/api/runs", Host="evil.example:7070").status == 403
        assert get(server, "/api/runs", Host="localhost:7070").status == 200


def test_every_answer_forbids_scripts_from_elsewhere(home: Path) -> None:
    with serving(home) as server:
        for path in ("/", "/main.js", "/uplot/uPlot.iife.min.js", "/api/runs"):
            answer = get(server, path)
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "http" not in answer.headers["content-security-policy"]


def test_opened_wider_every_request_needs_the_token(home: Path) -> None:
    token = "a-token-of-many-letters"
    with serving(home, token) as server:
        for path in ("/", "/api/runs", "/main.js"):
            assert get(server, path).status == 401
            assert get(server, path, Authorization="Bearer wrong").status == 401
            assert get(server, path, Cookie="pretrain_token=wrong").status == 401
        first = get(server, f"/?token={token}&a=b")
        assert (first.status, first.headers["location"]) == (303, "/?a=b")
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert get(server, "/api/runs", Cookie=cookie.partition(";")[0]).status == 200
        assert get(server, "/api/runs", Authorization=f"Bearer {token}", Host="elsewhere").status == 200


def test_a_token_is_made_when_the_host_is_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert choose_token("127.0.0.1") is None
    assert choose_token("::1") is None
    made = choose_token("0.0.0.0")
    assert made
    assert len(made) >= 32
    assert made != choose_token("0.0.0.0")
    monkeypatch.setenv(TOKEN_VARIABLE, "sixteen-letters-x")
    assert choose_token("127.0.0.1") == "sixteen-letters-x"
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(UserError, match="at least 16"):
        choose_token("127.0.0.1")


def test_a_port_in_use_is_a_user_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(home) as server:
        port = str(server.server_address[1])
        assert cli.main(["dashboard", "--home", str(home), "--port", port]) == 2
    assert f"--port={port} cannot be listened on" in capsys.readouterr().err


def test_readers_are_kept_for_the_runs_looked_at_last(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.monitor.runs_view.MOST_READERS", 2)
    for name in ("b", "c"):
        write_run(home, name, Journal().at(0, "created").events, {})
    view = RunsView(str(home))
    try:
        readers = {}
        for name in ("calm", "b", "c"):
            with view.reading(name) as readers[name]:
                pass
        with view.reading("c") as again:
            assert again is readers["c"]
        with view.reading("calm") as again:
            assert again is not readers["calm"]
    finally:
        view.close()


def test_a_timeline_of_many_spans_stays_short_and_whole() -> None:
    kinds = [Kind.TRAINING, Kind.CHECKPOINT]
    spans = tuple(Span(float(place), place + 1.0, kinds[place % 2], 1) for place in range(5000))
    drawn = timeline(Ledger(spans))
    assert len(drawn) <= 800
    assert (drawn[0]["start"], round(drawn[-1]["end"], 6)) == (0.0, 5000.0)
    assert all(before["end"] == pytest.approx(after["start"]) for before, after in itertools.pairwise(drawn))
    few = timeline(Ledger((Span(0, 9, Kind.TRAINING, 1), Span(9, 10, Kind.DATA_WAIT, 1), Span(10, 12, Kind.REWORK, 1))))
    assert [(span["kind"], span["end"]) for span in few] == [("training", 10), ("rework", 12)]
