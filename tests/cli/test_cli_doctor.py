"""`treetrain doctor`: what is installed, what is missing, which kernels are exact here."""

import importlib.metadata
import sys
from email.message import Message

import pytest

import treetrain as package
from treetrain.cli import doctor

REQUIRES = (
    "numpy>=1.26",
    'torch>=2.11; extra == "train"',
    'treetrain[train]; extra == "trl"',
    'trl<1.17,>=1.16; extra == "trl"',
    'colorama>=1; sys_platform == "nowhere"',
)
INSTALLED = {"numpy": "2.4.6", "torch": "2.13.0+cpu", "trl": "1.16.3"}


@pytest.fixture
def environment(monkeypatch):
    """Set the metadata of treetrain and the installed versions; returns the function that does."""

    def put(installed=INSTALLED, *, requires=REQUIRES, version=package.__version__, python=">=3.11"):
        own = Message()
        own["Version"], own["Requires-Python"] = version, python
        for text in requires:
            own["Requires-Dist"] = text
        for extra in ("train", "trl"):
            own["Provides-Extra"] = extra

        def version_of(name):
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(doctor.metadata, "metadata", lambda name: own)
        monkeypatch.setattr(doctor.metadata, "version", version_of)

    return put


def test_what_is_complete_is_ready_and_nothing_is_wrong(treetrain, environment):
    pytest.importorskip("torch")
    environment()
    found = treetrain("doctor", "--json")
    report = found.json
    assert found.code == 0 and report["faults"] == []
    assert report["treetrain"] == package.__version__
    assert report["uses"] == {"train": [], "trl": []}
    by_name = {each["name"]: each for each in report["packages"]}
    assert set(by_name) == {"numpy", "torch", "trl"}  # the marker of another system is no requirement here
    assert by_name["torch"]["uses"] == ["train", "trl"] and by_name["numpy"]["uses"] == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(treetrain, environment):
    environment({"numpy": "2.4.6", "torch": "2.13.0"})
    answer = treetrain("doctor")
    assert answer.code == 0  # an extra is nobody's duty
    (line,) = (line for line in answer.out.splitlines() if line.startswith("trl ") and "lacks" in line)
    assert "lacks trl: pip install 'treetrain[trl]'" in line


def test_without_torch_the_other_facts_are_printed(treetrain, environment):
    environment({"numpy": "2.4.6"})
    report = treetrain("doctor", "--json").json
    assert report["devices"] == [] and report["uses"] == {"train": ["torch"], "trl": ["torch", "trl"]}
    assert "unknown without torch" in treetrain("doctor").out


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"installed": INSTALLED | {"trl": "1.17.0"}}, "trl 1.17.0 is installed: pip install 'trl<1.17,>=1.16'"),
        ({"installed": INSTALLED | {"numpy": "1.25.0"}}, "numpy 1.25.0 is installed: pip install 'numpy>=1.26'"),
        ({"version": "0.0.1"}, "what is installed says 0.0.1: run pip install -e . again"),
        ({"python": ">=9.0"}, "treetrain needs >=9.0"),
    ],
)
def test_what_cannot_be_used_is_said_and_is_exit_code_1(treetrain, environment, change, fault):
    environment(**change)
    answer = treetrain("doctor", "--json")
    assert answer.code == 1
    assert any(fault in each for each in answer.json["faults"]), answer.json["faults"]
    assert fault in " ".join(treetrain("doctor").out.split())


def test_without_an_installation_the_requirements_are_unknown(treetrain, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "metadata", missing)
    answer = treetrain("doctor", "--json")
    assert answer.code == 1 and "pip install -e ." in answer.json["faults"][0]


def test_the_cpu_kernels_are_compared_with_the_reference_and_a_gpus_are_announced(treetrain, environment):
    torch = pytest.importorskip("torch")
    environment()
    cpu, *others = treetrain("doctor", "--json").json["devices"]
    assert cpu["device"] == "cpu" and cpu["kernels"] == {"rectangles": "exact"} and cpu["memory_bytes"] > 0
    if not torch.cuda.is_available():
        (gpu,) = others
        assert set(gpu["kernels"]) == {"varlen", "flex", "triton", "rectangles", "matmul", "LM head"}


def test_a_kernel_that_is_wrong_is_said_and_leaves_no_warning(treetrain, environment, monkeypatch, recwarn):
    pytest.importorskip("torch")
    from treetrain.core.attention.rectangles import RectangleAttention
    from treetrain.kernels import backends
    from treetrain.kernels import checks as kernel_checks

    class Wrong(RectangleAttention):
        def __call__(self, *given):
            return 1.01 * super().__call__(*given)

    def make(forest, cache, device, size):
        return Wrong(forest, cache=cache, heads_times_size=size)

    environment()
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setitem(backends.BACKENDS, "rectangles", make)
    answer = treetrain("doctor", "--json")
    assert answer.code == 1 and answer.json["faults"] == ["cpu: no attention kernel is exact here"]
    assert answer.json["devices"][0]["kernels"]["rectangles"].startswith("is off in the output by 1.0e-02")
    assert not [each for each in recwarn if "passed over" in str(each.message)]


def test_a_torch_that_does_not_load_is_a_fault_not_a_crash(treetrain, environment, monkeypatch):
    pytest.importorskip("torch")
    environment()
    monkeypatch.setitem(sys.modules, "psutil", None)
    answer = treetrain("doctor", "--json")
    assert answer.code == 1 and "cannot be imported: ModuleNotFoundError" in answer.json["faults"][0]
