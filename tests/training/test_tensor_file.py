"""Files of tensors are read without running what they say."""

import numpy as np
import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.training.tensor_file import read_tensor_file

FIX = "give a run, a file of its checkpoints/, or a folder of the published baseline"


class Mean:
    """An object as a training loop might leave it in its checkpoint."""


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_tensor_file_gives_tensors_and_numpy_scalars(tmp_path, mapped, zipped):
    scalars = {kind.__name__: kind(1) for kind in (np.float32, np.float64, np.int64, np.bool_)}
    torch.save({"w": torch.arange(3.0), **scalars}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    values = read_tensor_file(tmp_path / "a.pt", mapped=mapped)
    assert values.pop("w").tolist() == [0, 1, 2]
    assert values == scalars


def test_tensor_file_reads_scalars_of_numpy_1(tmp_path):
    torch.save({"loss": np.float64(0.5)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.pt").read_bytes()
    assert b"cnumpy._core.multiarray" in content
    (tmp_path / "a.pt").write_bytes(content.replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray"))
    assert read_tensor_file(tmp_path / "a.pt") == {"loss": 0.5}


def test_tensor_file_saved_on_another_device_comes_to_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:1")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert b"cuda:1" in (tmp_path / "a.pt").read_bytes()
    assert read_tensor_file(tmp_path / "a.pt", mapped=True)["w"].device.type == "cpu"


def test_tensor_file_with_an_object_is_refused_and_leaves_nothing_allowed(tmp_path):
    torch.save({"w": torch.ones(2), "mean": Mean()}, tmp_path / "a.pt")
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(UserError) as caught:
        read_tensor_file(tmp_path / "a.pt")
    assert caught.value.what.startswith("a.pt holds a Python object, ")
    assert caught.value.what.endswith("test_tensor_file.Mean; reading it could run anything")
    assert caught.value.where == str(tmp_path / "a.pt")
    assert "nothing but tensors, numbers and text" in caught.value.fix
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_tensor_file_that_is_damaged_or_missing_is_named(tmp_path, mapped, zipped):
    torch.save({"w": torch.ones(200)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:300])
    with pytest.raises(UserError) as caught:
        read_tensor_file(tmp_path / "a.pt", mapped=mapped)
    assert caught.value.what.startswith("a.pt is not a whole checkpoint: ")
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "a.pt"), FIX)
    with pytest.raises(UserError) as caught:
        read_tensor_file(tmp_path / "b.pt", mapped=mapped)
    assert caught.value.what == "b.pt cannot be read: No such file or directory"
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "b.pt"), "check the path")
