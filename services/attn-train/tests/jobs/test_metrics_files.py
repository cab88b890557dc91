"""Files of metrics have each step once, whatever was killed in between, and TensorBoard reads them."""

from __future__ import annotations

import json

import pytest
from attn_schema.training import JobState
from attn_train.attempt import Finished, TrainingStarted
from attn_train.metrics_files import BOARD, LINES, MetricsFiles
from attn_train.supervisor import Supervisor, SupervisorSettings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def lines(folder):
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def board(folder):
    """(step, loss), as TensorBoard shows them."""
    found = EventAccumulator(str(folder / BOARD))
    found.Reload()
    assert found.Tags()["scalars"] == ["learning_rate", "loss"]
    return [(event.step, event.value) for event in found.Scalars("loss")]


def test_a_worker_that_is_lost_leaves_no_gap_and_no_double(tmp_path, job, lost_twice):
    Supervisor("job", lost_twice, SupervisorSettings(home=tmp_path, poll=0.01)).run()
    assert job.get("job").state is JobState.SUCCEEDED
    folder = tmp_path / "jobs" / "job"
    found = lines(folder)
    assert [line["step"] for line in found] == list(range(1, 13))
    assert [line["loss"] for line in found] == [1 / step for step in range(1, 13)]
    assert sorted({line["attempt"] for line in found}) == [1, 2, 3]
    assert board(folder) == [(step, pytest.approx(1 / step)) for step in range(1, 13)]


@pytest.mark.parametrize("killed", ["before the line", "in the line", "after the line"])
def test_a_writer_that_is_killed_is_gone_on_from(tmp_path, job, measured, events, killed):
    job.append("job", 1, [measured(step) for step in (1, 2, 3)])
    files = MetricsFiles(tmp_path)
    files.catch_up(events(job))
    whole = (tmp_path / LINES).read_bytes()
    cut = {"before the line": whole.rindex(b"{"), "in the line": len(whole) - 5, "after the line": len(whole)}
    (tmp_path / LINES).write_bytes(whole[: cut[killed]])
    job.append("job", 1, [measured(4)])
    again = MetricsFiles(tmp_path)
    again.catch_up(events(job))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, _ in board(tmp_path)] == [1, 2, 3, 4]
    again.close()
    files.close()


def test_a_folder_that_cannot_be_written_leaves_the_job_alone_and_is_tried_again(tmp_path, job, measured):
    blocked = tmp_path / "jobs"
    blocked.write_text("a file where a folder should be")
    freed = []

    class Backend:
        def start(self, assignment, send, ended):
            send(TrainingStarted(step=0, checkpoint=None))
            send(measured(1))
            supervisor._write_metrics()
            assert blocked.is_file()
            blocked.unlink()
            freed.append(True)
            ended(Finished(model_path="/model"))

    supervisor = Supervisor("job", Backend(), SupervisorSettings(home=tmp_path, poll=0.01))
    supervisor.run()
    assert freed
    assert job.get("job").state is JobState.SUCCEEDED
    assert [line["step"] for line in lines(tmp_path / "jobs" / "job")] == [1]
