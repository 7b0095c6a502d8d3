"""The command line: arguments reach the right function, faults become one line and an exit status."""

from pathlib import Path

import pytest

from dpzoo import cli
from dpzoo.demo import doctor, run
from dpzoo.demo.worker import RankResult


def test_demo_arguments_are_passed_on(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "run_demo", lambda *arguments: calls.append(arguments) or 1)
    assert cli.main(["demo", "--ranks", "3", "--epochs", "2", "--out", "x"]) == 1
    assert calls == [(3, 2, Path("x"), "float32")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--ranks", "16"], "between 1 and 15 ranks"), (["--epochs", "0"], "at least 1 epoch, 0 were asked for")],
)
def test_impossible_requests_exit_with_two(arguments, message, capsys):
    assert cli.main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_package_says_what_to_install(monkeypatch, capsys):
    def absent(module):
        raise ModuleNotFoundError(f"No module named '{module}'")

    monkeypatch.setattr("dpzoo.datapipes.optional.import_module", absent)
    assert cli.main(["demo"]) == 2
    assert 'pip install "dpzoo[data]"' in capsys.readouterr().err


def result(history):
    return RankResult(60, history, 0.5, 1.0, 0, 0, 1.0, None)


def test_largest_difference_is_over_epochs_and_ranks(capsys):
    one, ranks = result([1.0, 0.5]), [result([1.0, 0.5]), result([1.0, 0.501])]
    assert run._print_losses(one, ranks) == pytest.approx(0.002)
    assert "loss 2 ranks" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number_is_not_equal():
    assert run._print_losses(result([1.0, 0.5]), [result([float("nan"), 0.5])]) == float("inf")


def test_doctor_counts_problems(monkeypatch, capsys):
    findings = [doctor.Finding("ok", "fine"), doctor.Finding("problem", "gloo is broken: mend it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert cli.main(["doctor"]) == 1
    assert "problem   gloo is broken: mend it" in capsys.readouterr().out


def test_doctor_names_package_and_fix():
    findings = list(doctor.examine_packages())
    assert any(finding.level == "ok" and finding.text.startswith("torch ") for finding in findings)
    missing = doctor._examine_package("a-package-that-is-not-there", ">=1", "viz")
    assert (missing.level, missing.text) == (
        "optional",
        'a-package-that-is-not-there is not installed: pip install "dpzoo[viz]"',
    )
    wrong = doctor._examine_package("torch", "<1", None)
    assert wrong.level == "problem"
    assert 'pip install "torch<1"' in wrong.text
