"""The loop learns what a loop written by hand learns, on any mesh."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.testing import distributed, expect_error, session_pool
from dpzoo.train import DivergedError, Team, TrainConfig, fit, train_step
from dpzoo.train.journal import read_journal
from dpzoo.train.schedule import rate_factor
from dpzoo.train.step import check_batch
from tests.train.toy import CONFIG, Clouds, build, configured, objective, train, train_on


def losses(folder):
    return [row["loss"] for row in read_journal(folder)]


def by_hand(config, samples=5):
    """Plain torch: the losses of the steps and the weights."""
    model, optimizer = build()
    found, step, loader = [], 0, Clouds(samples=samples)
    steps = config.epochs * -(-samples // config.accumulate)
    for epoch in range(config.epochs):
        clouds = list(loader.epoch(epoch))
        for start in range(0, samples, config.accumulate):
            group = clouds[start : start + config.accumulate]
            for setting in optimizer.param_groups:
                setting["lr"] = 0.05 * rate_factor(step, steps, config)
            loss = sum(torch.nn.functional.mse_loss(model(x), y) for x, y in group) / len(group)
            optimizer.zero_grad()
            loss.backward()
            if config.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            found.append(loss.item())
            step += 1
    return found, dict(model.named_parameters())


def assert_same_run(folder, weights, config, samples=5):
    expected, expected_weights = by_hand(config, samples)
    assert losses(folder) == pytest.approx(expected, rel=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name].detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "changes", [{}, {"accumulate": 3}, {"clip": None, "schedule": "constant"}, {"clip": 0.01, "accumulate": 2}], ids=str
)
def test_one_process_without_a_mesh(changes, tmp_path):
    config = configured(**changes)
    outcome, weights = train(tmp_path, config=config)
    assert outcome.finished
    assert_same_run(tmp_path, weights, config)


@pytest.mark.parametrize(
    ("shape", "accumulate", "same_as"),
    [((1, 2), 1, 1), ((1, 3), 3, 3), ((2, 2), 1, 2), ((2, 1), 1, 2), ((2, 2), 2, 4), ((4, 1), 1, 4)],
    ids=str,
)
def test_a_mesh_learns_what_one_process_learns_from_all_its_samples(shape, accumulate, same_as, tmp_path):
    samples = 8 if shape[0] > 1 else 5
    config = configured(accumulate=accumulate)
    results = train_on(shape, tmp_path, config, samples=samples)
    for outcome, weights in results:
        assert outcome.finished
        assert_same_run(tmp_path, weights, configured(accumulate=same_as), samples)
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][1][name])


def test_random_numbers_do_not_depend_on_the_ranks(tmp_path):
    for ranks in (1, 2, 3):
        train_on((1, ranks), tmp_path / str(ranks), dropout=0.3)
    assert losses(tmp_path / "1") != pytest.approx(by_hand(CONFIG)[0], rel=1e-2)
    for ranks in (2, 3):
        assert losses(tmp_path / str(ranks)) == pytest.approx(losses(tmp_path / "1"), rel=1e-9)


def test_bf16_rounds_alike_on_ranks_and_keeps_weights_in_float32(tmp_path):
    config = configured(amp="bf16")
    train(tmp_path / "plain", config=config, dtype=torch.float32)
    train(tmp_path / "float32", dtype=torch.float32)
    found = train_on((1, 2), tmp_path / "ranks", config, dtype=torch.float32)
    assert {weight.dtype for _, weights in found for weight in weights.values()} == {torch.float32}
    first, plain, exact = (losses(tmp_path / name)[0] for name in ("ranks", "plain", "float32"))
    assert abs(plain / exact - 1) > 1e-5  # bf16 is at work
    assert first == pytest.approx(plain, rel=1e-6)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


# ---------------------------------------------------------------------- validation
class Repeating(Clouds):
    """The last cloud of the last replica fills up the step."""

    def epoch(self, number, start=0):
        for place, (x, y) in enumerate(super().epoch(number, start)):
            repeats = place == len(self) - 1 and self.team.replica == self.team.replicas - 1
            yield Repeatable(x, y, self.team.replicas > 1 and repeats)


class Repeatable(tuple):
    def __new__(cls, x, y, is_repeat):
        self = super().__new__(cls, (x, y))
        self.is_repeat = is_repeat
        return self


def validated(folder, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "domain"))
    model, optimizer = build()
    loaders = Clouds(mesh, 4), Repeating(mesh, 4)
    outcome = fit(
        model, optimizer, loaders[0], objective, configured(epochs=1), folder, mesh=mesh, validation=loaders[1]
    )
    return outcome.validation, model.training


def test_validation_counts_every_sample_once(tmp_path):
    found = session_pool().run(validated, tmp_path / "grid", (2, 2), ranks=4)
    config = configured(epochs=1, accumulate=2)
    model, optimizer = build()
    fit(model, optimizer, Clouds(samples=4), objective, config, tmp_path / "plain")
    with torch.no_grad():
        rows = [objective(model, cloud) for cloud in list(Clouds(samples=4).epoch(0))[:3]]
    expected = {name: sum(row[name].item() for row in rows) / 3 for name in rows[0]}
    for validation, training in found:
        assert validation == pytest.approx(expected, rel=1e-9)
        assert training
    assert read_journal(tmp_path / "grid", "validation")[0]["loss"] == pytest.approx(expected["loss"], rel=1e-9)


# ---------------------------------------------------------------------- what is refused
def with_nan(model, sample):
    return {"loss": model(sample[0]).mean() * float("nan")}


@distributed(ranks=2)
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_weights_change():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    model, optimizer = build()
    before = [weight.clone() for weight in model.parameters()]
    clouds = Clouds(mesh).epoch(0)
    expect_error(
        lambda: train_step(model, optimizer, with_nan, [next(clouds)], 1, 7, CONFIG, Team(mesh)),
        DivergedError,
        "step 7.*gradient is nan",
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@distributed(ranks=2)
def test_a_batch_for_a_domain_group_must_be_asked_for():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    model, optimizer = build()
    sample = tuple(torch.cat([t, t]) for t in next(Clouds(mesh).epoch(0)))
    step = lambda config: train_step(model, optimizer, objective, [sample], 1, 0, config, Team(mesh))  # noqa: E731
    expect_error(
        lambda: step(CONFIG), ValueError, "batch of 2 samples for one domain group, 1 allowed.*batch_per_group=2"
    )
    assert step(configured(batch_per_group=2))["loss"] > 0


def test_what_counts_as_a_batch():
    one, two = torch.zeros(1, 5), torch.zeros(2, 5)
    for good in (one, (one, "text"), {"x": one, "scalar": torch.zeros(())}, object()):
        check_batch(good, 1)
    for bad in (two, [one, two], {"x": one, "y": two}):
        with pytest.raises(ValueError, match="a batch of 2 samples"):
            check_batch(bad, 1)


def test_an_objective_without_loss_and_a_loader_that_breaks_its_promise(tmp_path):
    model, optimizer = build()
    with pytest.raises(ValueError, match=r"returned \['mse'\].*'loss'"):
        fit(model, optimizer, Clouds(), lambda m, s: {"mse": m(s[0]).mean()}, CONFIG, tmp_path)

    class Short(Clouds):
        def __len__(self):
            return 7

        def epoch(self, number, start=0):
            return iter(list(Clouds().epoch(number, start))[:3])

    with pytest.raises(ValueError, match="step 3: the loader's length promised 1 samples, it gave 0"):
        fit(model, optimizer, Short(), objective, CONFIG, tmp_path)


@distributed(ranks=2)
def test_ranks_without_a_mesh_are_refused():
    expect_error(Team, ValueError, "2 ranks and no mesh")
    nameless = init_device_mesh("cpu", (2, 1))
    expect_error(lambda: Team(nameless), ValueError, "none is 'domain'")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"amp": "fp8"}, "amp is 'fp8', choose one of None, bf16, fp16"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"final_rate": 2.0}, "final_rate"),
        ({"resume": "yes"}, "resume is 'yes'"),
        ({"max_steps": 0}, "max_steps"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant(changes, match):
    with pytest.raises(ValueError, match=match):
        TrainConfig(**changes)


def test_schedule_rises_then_falls_to_its_end():
    config = TrainConfig(warmup_steps=4, final_rate=0.1)
    factors = [rate_factor(step, 20, config) for step in range(21)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[4] == 1.0
    assert factors[12] == pytest.approx(0.55)
    assert factors[20] == pytest.approx(0.1)
    assert sorted(factors[4:], reverse=True) == factors[4:]
    assert rate_factor(15, 20, TrainConfig(schedule="constant")) == 1.0


def test_the_journal_holds_means_over_its_steps(tmp_path):
    train(tmp_path / "each")
    train(tmp_path / "third", config=configured(log_every=3))
    each, third = losses(tmp_path / "each"), losses(tmp_path / "third")
    assert third == pytest.approx([sum(each[i : i + 3]) / 3 for i in (0, 3, 6)], rel=1e-12)
