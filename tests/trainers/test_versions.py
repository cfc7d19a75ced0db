"""Versions of transformers and TRL: checked for what is relied on, and warned of if they are not tested."""

import warnings

import pytest
import torch
import trl.trainer.utils
from packaging.version import Version
from safe_runs import make_trainer
from test_share_prefixes_refusals import settings
from trainer_runs import BUILDERS, difference, train
from transformers import Trainer

import treetrain as tt
from support.tree_runs import branching_rows, run, small_model, steps
from treetrain.engine import TreeEngine
from treetrain.trainers import relied_on

NEWEST = Version(relied_on.TESTED["transformers"][1])
NEXT = f"{NEWEST.major}.{NEWEST.minor + 1}.0.dev0"


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of a package; nothing has been warned of before."""
    relied_on._warn_once.cache_clear()
    yield lambda package, version: monkeypatch.setattr(f"{package}.__version__", version)
    relied_on._warn_once.cache_clear()


@pytest.fixture
def without(monkeypatch):
    """Takes a method from `transformers.Trainer`, under its name."""

    def remove(name):
        method = getattr(Trainer, name)
        monkeypatch.delattr(Trainer, name)
        monkeypatch.setattr(Trainer, f"renamed{name}", method, raising=False)

    return remove


def warned(found) -> list[str]:
    return [str(one.message) for one in found if "tested" in str(one.message)]


@pytest.mark.parametrize(
    "version, tested",
    [("5.2.9", False), ("5.3.0", True), (f"{NEWEST}.7", True), (NEXT, False), ("6.0.0", False), ("5.9.0", True)],
)
def test_patch_releases_belong_to_the_tested_range_and_development_versions_do_not(version, tested, installed):
    installed("transformers", version)
    assert relied_on.is_tested("transformers") == tested


@pytest.mark.slow
def test_an_untested_trl_warns_once_and_trains_as_ever(tmp_path, installed):
    plain = train(BUILDERS["sft"], tmp_path / "plain", shared=False)
    installed("trl", "1.99.0")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shared, _ = (train(BUILDERS["sft"], tmp_path / name, shared=True) for name in ("shared", "again"))
    (text,) = warned(found)
    assert "trl 1.99.0 is outside" in text and "1.15 to 1.16" in text and "comparison with the plain model" in text
    assert difference(shared, plain).updates < 1e-3


def test_a_tested_version_does_not_warn(tmp_path, installed):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tt.share_prefixes(BUILDERS["sft"](settings(tmp_path), torch.float32, tmp_path))
        make_trainer(tmp_path / "out")
    assert warned(found) == []


def remove_the_head(trainer, patch):
    del trainer.model.forward


def compute_another_value(trainer, patch):
    del trainer.model.forward
    trl.trainer.utils.add_fused_lm_head(trainer.model, outputs=("log_probs", "varentropy"))


def no_field_for_a_value(trainer, patch):
    patch.delitem(trl.trainer.utils.FusedCausalLMOutput.__dataclass_fields__, "entropy")


def set_what_is_not_known(trainer, patch):
    def newer(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",), top_k=0):
        def forward(self, *args, **kwargs):
            return temperature, cast_lm_head_to_fp32, outputs, top_k

        model.forward = forward.__get__(model)

    patch.setattr(trl.trainer.utils, "add_fused_lm_head", newer)
    newer(trainer.model, top_k=20)


@pytest.mark.parametrize(
    "change, message",
    [
        (remove_the_head, r"does not give its model the fused head .*TRL 1\.15 to 1\.16"),
        (compute_another_value, "outputs=varentropy"),
        (no_field_for_a_value, "outputs=entropy"),
        (set_what_is_not_known, "top_k=20"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_relied_on_in_trl_and_is_not_there_is_refused_by_name(change, message, tmp_path, monkeypatch):
    trainer = BUILDERS["sft"](settings(tmp_path), torch.float32, tmp_path)
    change(trainer, monkeypatch)
    with pytest.raises(ValueError, match=message):
        tt.share_prefixes(trainer)


def test_an_untested_transformers_warns_once_and_a_stopped_run_goes_on(tmp_path, installed):
    installed("transformers", "5.99.0")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(tmp_path / "out", max_steps=4).train()
        resumed = make_trainer(tmp_path / "out", max_steps=4)
        resumed.train(resume_from_checkpoint=True)
    (text,) = warned(found)
    assert "transformers 5.99.0 is outside" in text and f"5.3 to {NEWEST}" in text and "not confirmed" in text
    assert resumed.state.global_step == 4


def test_missing_methods_cost_the_promises_that_rest_on_them(tmp_path, without):
    without("_get_grad_norm")
    with pytest.warns(RuntimeWarning, match=r"lacks _get_grad_norm: it is not promised that a step whose gradient"):
        make_trainer(tmp_path / "out")


def test_a_missing_parameter_is_a_missing_method(monkeypatch):
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, folder: None)
    missing = relied_on.missing_members(Trainer, {"_load_rng_state": ("checkpoint",), "train": (), "gone": ("x",)})
    assert missing == ["_load_rng_state(checkpoint)", "gone"]


def test_without_the_methods_that_write_checkpoints_a_run_trains_and_cannot_save(tmp_path, without):
    without("_save_checkpoint")
    with pytest.raises(ValueError, match=r"lacks _save_checkpoint, by which .*save_strategy='no'"):
        make_trainer(tmp_path / "out")
    with pytest.warns(RuntimeWarning, match="not promised that a checkpoint is complete or not there"):
        trainer = make_trainer(tmp_path / "out", save_strategy="no", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_in_an_untested_version_a_tree_trainer_compares_its_first_step(tmp_path, installed, monkeypatch):
    installed("transformers", "5.99.0")
    with pytest.warns(RuntimeWarning, match=r"transformers 5\.99\.0"):
        trainer = run(small_model(torch.float32), branching_rows(), max_steps=2)
    assert len(steps(trainer)) == 2
    score = TreeEngine.score
    calls = []

    def wrong(self, *args, **kwargs):
        calls.append(1)
        scored = score(self, *args, **kwargs)
        for one in scored.logprobs:
            one.data.mul_(1.1)
        return scored

    monkeypatch.setattr(TreeEngine, "score", wrong)
    with pytest.raises(RuntimeError, match=r"log-probabilities .* differ by"):
        run(small_model(torch.float32), branching_rows(), max_steps=2)
    assert calls == [1, 1]  # as one part and in parts
    installed("transformers", f"{NEWEST}.0")
    run(small_model(torch.float32), branching_rows(), max_steps=1)
    assert calls == [1, 1]
