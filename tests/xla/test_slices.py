"""Slices by Google's names: what libtpu calls them, how many ranks they have, and what an unknown name is told."""

import json
import math
import os
import subprocess
import sys

import pytest

from xla_b2t.errors import UserError
from xla_b2t.memory.chips import CHIPS
from xla_b2t.xla.slices import NAMES, slice_named

LISTING = """\
import json, os, sys
import libtpu
os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
from jax.experimental import topologies
from xla_b2t.xla.slices import NAMES, slice_named
found = {}
for each in map(slice_named, NAMES):
    described = topologies.get_topology_desc(platform="tpu", topology_name=each.topology, **each.options)
    found[each.name] = len(described.devices), described.devices[0].device_kind
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize(
    ("name", "topology", "cores"),
    [
        ("v2-8", "v2:2x2", 8),
        ("v3-8", "v3:2x2", 8),
        ("v3-512", "v3:16x16", 512),
        ("v4-8", "v4:2x2x1", 4),
        ("v4-512", "v4:4x8x8", 256),
        ("v5e-1", "v5e:1x1", 1),
        ("v5e-4", "v5e:2x2", 4),
        ("v5e-8", "v5e:2x4", 8),
        ("v5e-256", "v5e:16x16", 256),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-384", "v5p:4x4x12", 192),
        ("v6e-8", "v6e:2x4", 8),
    ],
)
def test_slice_has_the_shape_and_the_ranks_that_google_gives_its_name(name, topology, cores):
    found = slice_named(name)
    assert (found.name, found.topology, found.cores) == (name, topology, cores)
    assert found.chip == name.partition("-")[0]


def test_slice_has_as_many_chips_as_its_shape():
    for each in map(slice_named, NAMES):
        chips = math.prod(int(size) for size in each.topology.partition(":")[2].split("x"))
        assert each.cores == chips * (2 if each.chip in ("v2", "v3") else 1), each
        assert chips <= 256


def test_slice_of_every_name_has_a_chip_in_the_table():
    assert {slice_named(name).chip for name in NAMES} == set(CHIPS)


def test_slice_of_v5e_has_two_names():
    assert slice_named("v5litepod-8") == slice_named(" V5e-8 ")
    assert slice_named("v5e-8").accelerator_type == "v5litepod-8"
    assert slice_named("v4-8").accelerator_type == "v4-8"


def test_slices_are_known_to_the_compiler_with_the_same_devices():
    pytest.importorskip("libtpu", reason="the TPU's compiler has wheels for CPython 3.11 and 3.12")
    quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    environment = {**os.environ, **quiet, "TPU_ACCELERATOR_TYPE": "v5litepod-8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LISTING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = {each.name: [each.cores, each.kind] for each in map(slice_named, NAMES)}
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v5e-9", "v5e-8 or v5e-16"),
        ("v5e-2", "v5e-1 or v5e-4"),
        ("v4-4", "v4-8"),
        ("v5p-1024", "v5p-512"),
        ("v5e:2x4", "v5e-8"),
        ("v5-8", "v5p-8 or v5e-8"),
        ("v5litepod-12", "v5e-8 or v5e-16"),
    ],
)
def test_slice_of_an_unknown_name_is_an_error_with_the_nearest(name, nearest):
    with pytest.raises(UserError) as caught:
        slice_named(name)
    assert caught.value.what == f"no slice of up to 256 chips has this name; the nearest is {nearest}"
    assert caught.value.where == repr(name)
    assert caught.value.fix.startswith(
        "take one of v2-8/32/128/256/512; v3-8/32/64/128/256/512; v4-8/16/32/64/128/256/"
    )
    assert "v5e-1/4/8/16/32/64/128/256" in caught.value.fix


def test_slice_without_any_name_is_an_error_too():
    with pytest.raises(UserError) as caught:
        slice_named("")
    assert "the nearest is v" in caught.value.what
    assert caught.value.where == "''"
    assert "v6e-1/4/8" in caught.value.fix
