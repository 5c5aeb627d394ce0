"""What the environment must not hold: switches, presets of a TPU host, versions that are not a set."""

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError

import pytest

from xla_b2t.audit.environment import environment
from xla_b2t.audit.findings import Finding

EXTRAS = [
    "absl-py>=1.0.0",
    "numpy",
    'importlib_metadata>=4.6; python_version < "3.10"',
    'libtpu==0.0.21; extra == "tpu"',
    'tpu-info; extra == "tpu"',
    'jaxlib==0.7.1; extra == "pallas"',
    'jax==0.7.1; extra == "pallas"',
]


@dataclass
class Distribution:
    version: str
    requires: list[str] = field(default_factory=list)


def installed(**versions):
    """What is installed: a set that belongs together, changed as given; None takes one out."""
    versions = {
        "torch": "2.9.1",
        "torch_xla": "2.9.0",
        "jax": "0.7.1",
        "jaxlib": "0.7.1",
        "libtpu": "0.0.21",
    } | versions

    def distribution(name):
        if versions.get(name) is None:
            raise PackageNotFoundError(name)
        return Distribution(versions[name], EXTRAS if name == "torch_xla" else [])

    return distribution


def found(num_ranks=8, distribution=None, **variables):
    return environment(num_ranks, variables, distribution or installed())


def test_environment_of_these_tests_has_no_finding():
    assert environment(8) == []


def test_environment_without_anything_set_has_no_finding():
    assert found() == []


SWITCHES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG", "XLA_USE_SPMD", "XLA_AUTO_SPMD")


@pytest.mark.parametrize("name", [*SWITCHES, "XLA_USE_EAGER_DEBUG_MODE"])
def test_environment_with_a_switch_on_names_it(name):
    assert found(**{name: "1"}) == [Finding("environment", name, "environment", "'1'", "unset", f"unset {name}")]


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("1", True),
        ("true", True),
        ("2", True),
        ("-1", True),
        ("0", False),
        ("false", False),
        ("", False),
        ("no", False),
    ],
)
def test_environment_reads_a_switch_as_torch_xla_does(text, is_on):
    assert bool(found(XLA_USE_BF16=text)) is is_on


@pytest.mark.parametrize("name", ["XLA_USE_FP16", "XLA_DOWNCAST_FP16"])
def test_environment_with_a_switch_that_does_nothing_any_more_has_no_finding(name):
    assert found(**{name: "1"}) == []


KAGGLE = {
    "PJRT_DEVICE": "TPU",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
}


def test_environment_of_kaggle_with_all_cores_names_the_one_variable_that_is_in_the_way():
    assert found(**KAGGLE) == [
        Finding(
            "environment",
            "TPU_PROCESS_ADDRESSES",
            "environment",
            "'local', 1 of them",
            "unset, or an address for each of the 8 processes",
            'unset TPU_PROCESS_ADDRESSES, in a notebook os.environ.pop("TPU_PROCESS_ADDRESSES")',
        )
    ]


def test_environment_of_kaggle_without_that_variable_has_no_finding():
    assert found(**{name: text for name, text in KAGGLE.items() if name != "TPU_PROCESS_ADDRESSES"}) == []


@pytest.mark.parametrize(("num_ranks", "device"), [(1, "TPU"), (8, "CPU")])
def test_environment_of_kaggle_on_one_core_or_on_the_cpu_has_no_finding(num_ranks, device):
    assert found(num_ranks, **{**KAGGLE, "PJRT_DEVICE": device}) == []


def test_environment_with_an_address_for_each_process_has_no_finding():
    addresses = ",".join(f"localhost:{8476 + core}" for core in range(8))
    assert found(**{**KAGGLE, "TPU_PROCESS_ADDRESSES": addresses}) == []


@pytest.mark.parametrize(
    "name", ["CLOUD_TPU_TASK_ID", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "PJRT_LOCAL_PROCESS_RANK"]
)
def test_environment_with_a_number_that_each_process_needs_for_itself_names_it(name):
    (finding,) = found(PJRT_DEVICE="TPU", **{name: "0"})
    assert (finding.name, finding.found) == (name, "'0' for all 8 processes")
    assert finding.expected == "unset, so that each gets its own"
    assert finding.fix == f'unset {name}, in a notebook os.environ.pop("{name}")'
    assert found(1, PJRT_DEVICE="TPU", **{name: "0"}) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TPU_PROCESS_BOUNDS", "1,1,1", "unset, or a process for each of 8 cores"),
        ("TPU_PROCESS_BOUNDS", "two", "unset, or a process for each of 8 cores"),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,4,1", "unset, or one chip a process"),
    ],
)
def test_environment_with_bounds_of_other_processes_names_them(name, text, expected):
    (finding,) = found(PJRT_DEVICE="TPU", **{name: text})
    assert (finding.name, finding.found, finding.expected) == (name, f"'{text}'", expected)
    assert finding.fix.startswith(f"unset {name}, ")


def test_environment_with_bounds_of_these_processes_has_no_finding():
    assert found(PJRT_DEVICE="TPU", TPU_PROCESS_BOUNDS="2,4,1", TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1") == []


@pytest.mark.parametrize(
    ("name", "text", "instead"),
    [
        ("CLOUD_TPU_TASK_ID", "0", "TPU_WORKER_ID=0"),
        ("TPU_PROCESS_BOUNDS", "1,1,1", "TPU_HOST_BOUNDS=1,1,1"),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,4,1", "TPU_CHIPS_PER_HOST_BOUNDS=2,4,1"),
    ],
)
def test_environment_where_torch_xla_would_miss_what_is_unset_says_what_to_set_before(name, text, instead):
    """Without the metadata server torch_xla takes the place of this host from one of two variables."""
    (finding,) = found(PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1", **{name: text})
    assert finding.fix == f'export {instead}, then unset {name}, in a notebook os.environ.pop("{name}")'
    (finding,) = found(PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1", **{name: text, instead.partition("=")[0]: "0"})
    assert finding.fix.startswith(f"unset {name}, ")


def test_environment_of_a_slice_of_several_hosts_says_that_it_is_not_supported():
    (finding,) = found(PJRT_DEVICE="TPU", TPU_WORKER_HOSTNAMES="a,b,c,d")
    assert (finding.name, finding.found, finding.expected) == ("TPU_WORKER_HOSTNAMES", "4 hosts", "one host")
    assert "v5litepod-8" in finding.fix


@pytest.mark.parametrize("version", ["2.8.1", "2.10.0", "3.9.0"])
def test_environment_with_torch_of_another_minor_version_says_which_belongs(version):
    assert found(distribution=installed(torch=version)) == [
        Finding(
            "environment",
            "torch",
            "installed packages",
            version,
            "2.9, as torch_xla 2.9.0 needs it",
            "pip install 'torch==2.9.*'",
        )
    ]


def test_environment_with_another_build_of_torch_has_no_finding():
    assert found(distribution=installed(torch="2.9.0+cpu")) == []


@pytest.mark.parametrize(("name", "version", "pinned"), [
    ("libtpu", "0.0.17", "0.0.21"), ("jax", "0.8.0", "0.7.1"), ("jaxlib", "0.7.0", "0.7.1"),
])  # fmt: skip
def test_environment_with_another_version_than_torch_xla_pins_names_both(name, version, pinned):
    (finding,) = found(distribution=installed(**{name: version}))
    assert (finding.kind, finding.name, finding.where) == ("environment", name, "installed packages")
    assert (finding.found, finding.expected) == (version, f"{pinned}, as torch_xla 2.9.0 needs it")
    assert finding.fix == f"pip install {name}=={pinned}"


def test_environment_without_what_extras_pin_has_no_finding():
    assert found(distribution=installed(jax=None, jaxlib=None, libtpu=None)) == []


def test_environment_without_torch_xla_says_so():
    (finding,) = found(distribution=installed(torch_xla=None))
    assert (finding.name, finding.found, finding.fix) == ("torch_xla", "none", "pip install torch_xla")


def test_environment_tells_everything_at_once():
    names = [finding.name for finding in found(distribution=installed(jax="0.6.0"), **KAGGLE, XLA_USE_BF16="1")]
    assert names == ["XLA_USE_BF16", "TPU_PROCESS_ADDRESSES", "jax"]
