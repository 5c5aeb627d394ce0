"""Host memory added up by hand, read from a machine that is made up, and refused with both figures."""

import os

import pytest
import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import batches_ahead, longest_batch_bytes
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import Bucket, open_group_set
from xla_b2t.errors import UserError
from xla_b2t.memory.host_memory import PROCESS_BYTES, Available, HostPlan, check_host, find_available, plan_host
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.shapes import Shapes
from xla_b2t.training.traced import blank_batch

GB = 10**9


def put(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(root, available_kb):
    put(root, proc__meminfo=f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available_kb} kB\n")


TWO = HostPlan(2, PROCESS_BYTES, 14 * 10**8, 3 * 10**8, 0)


class Model(nn.Module):
    """1000 trained elements, 200 frozen ones, and a buffer of 30."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(200), False)
        self.register_buffer("buffer", torch.zeros(30))


@pytest.mark.parametrize(("dtype", "weights_bytes"), [("bfloat16", 1230 * 10 + 4000), ("float32", 1230 * 8 + 4000)])
def test_plan_host_adds_up_what_a_rank_needs(dtype, weights_bytes):
    buckets = (Bucket(400, 40), Bucket(2475, 128))
    shapes = Shapes(Sizes(512, 45, 41), buckets, num_ranks=8, trials=32, validation_trials=64)
    plan = plan_host(configuration.load(None, [f"model.dtype={dtype}"]), shapes, Model(), core_bytes=7)
    assert plan.weights_bytes == weights_bytes
    assert plan.prefetch_bytes == 5 * longest_batch_bytes(64, buckets, 512)
    assert (plan.num_ranks, plan.core_bytes) == (8, 7)
    assert plan.rank_bytes == PROCESS_BYTES + weights_bytes + plan.prefetch_bytes + 7
    assert plan.num_bytes == 8 * plan.rank_bytes + PROCESS_BYTES


def test_host_plan_in_words_names_each_part_and_the_core_only_where_it_is_the_cpu():
    words = "2 ranks x (process 0.70 + model 1.40 + prefetch 0.30) and their parent"
    assert TWO.in_words() == f"5.5 GB of host memory: {words}"
    one = HostPlan(1, PROCESS_BYTES, 0, 0, GB)
    assert "1 rank x (process 0.70 + model 0.00 + prefetch 0.00 + core 1.00)" in one.in_words()


def test_check_host_says_what_is_planned_and_available():
    assert check_host(TWO, Available(6 * GB, "MemAvailable")) == (f"{TWO.in_words()}; 6.0 GB available (MemAvailable)")
    assert check_host(TWO, None).endswith("not checked: neither /proc/meminfo nor a cgroup says what is available")


@pytest.mark.parametrize(
    ("available", "way_out"), [(4 * GB, "use --cores 1,"), (GB, "use a smaller model or a smaller train.batch_size,")]
)
def test_check_host_of_too_little_gives_both_figures_and_what_to_change(available, way_out):
    with pytest.raises(UserError) as caught:
        check_host(TWO, Available(available, "/sys/fs/cgroup/memory.max"))
    assert caught.value.what.startswith("this run needs 5.5 GB of host memory: 2 ranks x (process 0.70")
    assert f"there are {available / GB:.1f} GB available" in caught.value.what
    assert caught.value.where == "/sys/fs/cgroup/memory.max"
    assert caught.value.fix.startswith(way_out) and "data.prefetch_mb" in caught.value.fix


def test_find_available_on_this_machine_is_below_what_it_has():
    assert 0 < find_available().num_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_find_available_where_nothing_can_be_read_is_none(tmp_path):
    assert find_available(tmp_path) is None


def test_find_available_of_version_2_takes_the_tightest_group_and_counts_cached_files_as_free(tmp_path):
    meminfo(tmp_path, 8 * 10**6)
    put(tmp_path, proc__self__cgroup="0::/job/task\n")
    for group, limit in (("job/task/", "max"), ("job/", "3000000000"), ("", "5000000000")):
        put(
            tmp_path / "sys/fs/cgroup" / group,
            **{"memory.max": limit + "\n", "memory.current": "2000000000\n"},
            **{"memory.stat": "anon 1400000000\nfile 600000000\nactive_file 100000000\ninactive_file 400000000\n"},
        )
    assert find_available(tmp_path) == Available(1_500_000_000, "/sys/fs/cgroup/job/memory.max")


def test_find_available_of_version_1_in_a_container_reads_the_root_of_its_mount(tmp_path):
    meminfo(tmp_path, 8 * 10**6)
    put(tmp_path, proc__self__cgroup="9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n")
    put(
        tmp_path / "sys/fs/cgroup/memory",
        **{"memory.limit_in_bytes": "1000000\n", "memory.usage_in_bytes": "1200000\n"},
        **{"memory.stat": "cache 9\ntotal_active_file 50000\ntotal_inactive_file 50000\n"},
    )
    assert find_available(tmp_path) == Available(0, "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_find_available_without_a_limit_is_what_the_kernel_says(tmp_path):
    meminfo(tmp_path, 1000)
    put(tmp_path, proc__self__cgroup="4:memory:/\n")
    no_limit = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"}
    put(tmp_path / "sys/fs/cgroup/memory", **no_limit)
    assert find_available(tmp_path) == Available(1_024_000, "MemAvailable of /proc/meminfo")


@pytest.mark.parametrize(("batch_bytes", "ahead"), [(1, 8), (50 * 10**6, 8), (51 * 10**6, 7), (10**9, 1)])
def test_batches_ahead_of_400_mb_is_one_to_eight(batch_bytes, ahead):
    assert batches_ahead(400, batch_bytes) == ahead


def test_batches_ahead_by_default_keep_two_of_the_baseline_on_one_core():
    batch_bytes = longest_batch_bytes(64, [Bucket(400, 40), Bucket(2475, 128)], 512)
    assert batches_ahead(configuration.Config().data.prefetch_mb, batch_bytes) == 2


def test_longest_batch_bytes_are_those_of_what_is_read_and_of_what_is_sent(small_groups):
    group_set = open_group_set(small_groups)
    expected = longest_batch_bytes(group_set.group_size, group_set.buckets, group_set.num_features)
    shape = group_set.buckets[0]
    sent = blank_batch(group_set.group_size, shape.input_bins, group_set.num_features, shape.label_slots)
    assert sum(tensor.nbytes for tensor in sent) == expected
    with GroupReader(group_set, "train") as reader:
        read = reader.read([0], 0)
    assert sum(value.nbytes for name, value in vars(read).items() if name != "trial_ids") == expected
