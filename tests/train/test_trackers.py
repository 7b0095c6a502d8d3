"""Reports reach the services as their clients want them; the clients here are stand-ins that take notes."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dpzoo.train.journal import read_journal
from tests.train.toy import Clouds, configured, train


def install(monkeypatch, **modules):
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name.replace("_dot_", "."), module)


def wandb_notes(monkeypatch):
    notes = {"inits": [], "logged": [], "finished": 0}

    class Run:
        id = "abc"

        def log(self, values, step):
            notes["logged"].append((step, values))

        def finish(self):
            notes["finished"] += 1

    def init(**told):
        notes["inits"].append(told)
        return Run()

    install(monkeypatch, wandb={"init": init})
    return notes


def test_wandb_gets_every_report_and_a_resumed_run_goes_on_in_the_same_one(monkeypatch, tmp_path):
    notes = wandb_notes(monkeypatch)
    train(tmp_path, config=configured(wandb="cars", max_steps=3, log_every=1))
    train(tmp_path, config=configured(wandb="cars"), validation=Clouds(samples=1))
    rows = read_journal(tmp_path)
    train_notes = [(step, values["train/loss"]) for step, values in notes["logged"] if "train/loss" in values]
    assert train_notes == [(row["step"], row["loss"]) for row in rows]
    assert [step for step, values in notes["logged"] if "validation/loss" in values] == [5, 10]
    assert [(told["project"], told["id"]) for told in notes["inits"]] == [("cars", None), ("cars", "abc")]
    assert notes["finished"] == 2


def test_mlflow_gets_every_report_and_a_resumed_run_goes_on_in_the_same_one(monkeypatch, tmp_path):
    runs, metrics, params, ended = [], [], {}, []

    class Client:
        def get_experiment_by_name(self, name):
            return None if not runs else SimpleNamespace(experiment_id="7")

        def create_experiment(self, name):
            return "7"

        def create_run(self, number, run_name):
            runs.append((number, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_param(self, run, name, value):
            params[name] = value

        def log_metric(self, run, name, value, step):
            metrics.append((run, name, value, step))

        def set_terminated(self, run):
            ended.append(run)

    install(monkeypatch, mlflow={}, mlflow_dot_tracking={"MlflowClient": Client})
    folder = tmp_path / "first"
    train(folder, config=configured(mlflow="cars", max_steps=3))
    train(folder, config=configured(mlflow="cars"))
    assert runs == [("7", "first")]
    assert params["epochs"] == 2
    assert ended == ["r1", "r1"]
    told = [(step, value) for run, name, value, step in metrics if name == "train/loss"]
    assert told == [(row["step"], row["loss"]) for row in read_journal(folder)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"wandb": "x"}, r'wandb=x needs wandb .*pip install wandb, or pip install "dpzoo\[wandb\]"'),
        ({"mlflow": "x"}, r"mlflow=x needs mlflow .*dpzoo\[mlflow\]"),
    ],
    ids=str,
)
def test_a_client_that_is_not_there_is_named(options, match, monkeypatch, tmp_path):
    for name in ("wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=match):
        train(tmp_path, config=configured(**options))
