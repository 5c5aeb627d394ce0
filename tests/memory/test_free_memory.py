"""The rules of thumb against cases worked out by hand, and every refusal."""

import re

import pytest

from xla_b2t.errors import UserError
from xla_b2t.memory.free_memory import Answer, largest_batch, num_bytes

MB = 10**6
CARD = {"free_bytes": 3669 * MB, "base_bytes": 125 * MB, "num_steps": 60, "num_inputs": 225, "optimizer": "adam"}


def refused(**changes):
    with pytest.raises(UserError) as caught:
        largest_batch(**{**CARD, **changes})
    return caught.value


def ways_out(error):
    assert error.fix.startswith("any of: ")
    return error.fix.removeprefix("any of: ").split("; ")


def test_free_memory_in_float32_with_checkpointing_is_refused_with_both_numbers_and_the_ways_out():
    error = refused(precision="float32", checkpointing=True)
    assert error.what == (
        "2575 MB are required before the first sample (500 weights + 1000 optimizer + 500 gradients + 325 activations "
        "+ 250 each batch), and each sample takes 0.0648 MB; "
        "of 3669 MB free, 1834.5 MB are usable with a margin of 50 %"
    )
    assert error.where == "--free-memory at float32, adam, with checkpointing"
    assert ways_out(error) == [
        "int8 (656.2 of 2935.2 MB)",
        "bfloat16 (2545.8 of 2568.3 MB)",
        "a model of at most 85.1 million parameters",
        "a device with at least 5150.2 MB free",
    ]


def test_free_memory_at_int8_without_checkpointing_fits_the_users_cap():
    assert largest_batch(**CARD, precision="int8", max_batch=128) == Answer(
        usable_bytes=2_935_200_000,
        margin=0.2,
        weights_bytes=125 * MB,
        optimizer_bytes=250 * MB,
        gradient_bytes=125 * MB,
        activation_bytes=125 * MB,
        per_batch_bytes=75 * MB,
        per_sample_bytes=16_200,
        batch_size=128,
        limited_by="max_batch",
    )


def test_free_memory_answer_sums_its_parts():
    answer = largest_batch(**CARD, precision="int8", max_batch=128)
    assert answer.fixed_bytes == 625 * MB
    assert answer.required_bytes == 700 * MB + 128 * 16_200


@pytest.mark.parametrize("max_batch", [None, 200_000])
def test_free_memory_without_a_cap_that_binds_is_limited_by_memory(max_batch):
    answer = largest_batch(**CARD, precision="int8", max_batch=max_batch)
    assert (answer.batch_size, answer.limited_by) == (137_975, "memory")  # (2935.2 - 700) MB / 16,200
    assert 0 <= answer.usable_bytes - answer.required_bytes < answer.per_sample_bytes


def test_free_memory_for_exactly_one_sample_fits_and_a_byte_less_does_not():
    exact = (2 * 2575 * MB) + 2 * 64_800
    changes = {**CARD, "precision": "float32", "checkpointing": True}
    assert largest_batch(**{**changes, "free_bytes": exact}).batch_size == 1
    assert "2575 MB are required" in refused(precision="float32", checkpointing=True, free_bytes=exact - 1).what


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_free_memory_in_16_bits_has_a_float32_state_and_lies_between_otherwise(precision):
    answer = largest_batch(**{**CARD, "free_bytes": 8000 * MB}, precision=precision)
    assert answer.usable_bytes == 5600 * MB  # 30 %, a third of the way from 20 to 50
    assert answer.per_batch_bytes == 133_333_334  # a third of the way from 75 to 250 MB
    assert answer.weights_bytes == answer.activation_bytes == 250 * MB
    assert answer.optimizer_bytes == 1500 * MB  # masters and two moments
    assert answer.gradient_bytes == 500 * MB
    assert answer.per_sample_bytes == 32_400


def test_free_memory_with_narrow_state_keeps_everything_in_16_bits():
    answer = largest_batch(**CARD, precision="bfloat16", narrow_state=True, checkpointing=True)
    assert (answer.optimizer_bytes, answer.gradient_bytes) == (500 * MB, 250 * MB)
    assert answer.activation_bytes == 162_500_000


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_free_memory_with_narrow_state_changes_16_bits_only(precision):
    free = {**CARD, "free_bytes": 8000 * MB, "precision": precision}
    assert largest_batch(**free, narrow_state=True) == largest_batch(**free)


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_free_memory_counts_the_moments_of_an_optimizer(optimizer, moments):
    answer = largest_batch(**{**CARD, "optimizer": optimizer}, precision="int8")
    assert answer.optimizer_bytes == moments * 125 * MB
    wide = largest_batch(**{**CARD, "optimizer": optimizer, "free_bytes": 8000 * MB}, precision="bfloat16")
    assert wide.optimizer_bytes == (1 + moments) * 500 * MB


@pytest.mark.parametrize(
    ("precision", "asked", "used"),
    [("int8", 0.1, 0.2), ("int8", 0.3, 0.3), ("float32", 0.3, 0.5), ("float32", 0.6, 0.6)],
)
def test_free_memory_margin_is_the_larger_of_the_users_and_the_precisions(precision, asked, used):
    answer = largest_batch(**{**CARD, "free_bytes": 10_000 * MB}, precision=precision, margin=asked)
    assert answer.margin == used
    assert answer.usable_bytes == round(10_000 * (1 - used)) * MB


def test_free_memory_refusal_names_checkpointing_where_it_helps():
    assert ways_out(refused(precision="bfloat16"))[0] == "checkpointing (2545.8 of 2568.3 MB)"
    assert not any(way.startswith("checkpointing") for way in ways_out(refused(precision="float32")))


def test_free_memory_refusal_with_nothing_that_helps_names_model_and_device():
    error = refused(precision="int8", base_bytes=2000 * MB)
    assert ways_out(error) == ["a model of at most 572 million parameters", "a device with at least 12593.8 MB free"]


def test_free_memory_refusal_for_less_than_a_batch_costs_names_the_device_only():
    (way,) = ways_out(refused(precision="int8", free_bytes=80 * MB))
    assert way == "a device with at least 875.1 MB free"


@pytest.mark.parametrize("changes", [{"precision": "float32"}, {"precision": "bfloat16"}, {"precision": "int8"}])
def test_free_memory_refusal_gives_ways_out_that_lead_out(changes):
    base = {**CARD, "base_bytes": 700 * MB, **changes}
    *_, model, device = ways_out(refused(**base))
    (millions,) = re.findall(r"at most ([\d.]+) million", model)
    (free,) = re.findall(r"at least ([\d.]+) MB", device)
    assert largest_batch(**{**base, "base_bytes": int(float(millions) * MB)}).batch_size >= 1
    assert largest_batch(**{**base, "free_bytes": num_bytes(f"{free}MB")}).batch_size >= 1
    refused(**{**base, "base_bytes": int((float(millions) + 0.2) * MB)})
    refused(**{**base, "free_bytes": num_bytes(f"{free}MB") - 200_000})


@pytest.mark.parametrize(
    ("changes", "what", "where", "fix"),
    [
        ({"free_bytes": 0}, "the free memory is 0, expected a whole number", "--free-memory", "give a whole number"),
        ({"free_bytes": -5}, "the free memory is -5, expected", "--free-memory", "of bytes"),
        ({"free_bytes": 10**16}, "from 1 to 10^15", "--free-memory", "of bytes"),
        ({"free_bytes": 3669.5}, "the free memory is 3669.5, expected", "--free-memory", "of bytes"),
        ({"base_bytes": 0}, "its size at one byte a value is 0, expected", "the model", "of bytes"),
        ({"num_steps": 0}, "the number of steps in a sample is 0, expected", "the data", "of steps"),
        ({"num_inputs": True}, "the number of inputs in a step is True, expected", "the data", "of inputs"),
        ({"max_batch": 0}, "the largest batch is 0, expected", "--max-batch", "of trials"),
        ({"margin": -0.1}, "the margin is -0.1, expected a share", "--margin", "30 % as 0.3"),
        ({"margin": 1}, "the margin is 1, expected a share", "--margin", "30 % as 0.3"),
        ({"margin": float("nan")}, "the margin is nan, expected a share", "--margin", "30 % as 0.3"),
        ({"precision": "bf16"}, "'bf16' is none of float32, bfloat16", "--precision", "did you mean bfloat16?"),
        ({"precision": "4"}, "'4' is none of", "--precision", "give one of them"),
        ({"optimizer": "adamW"}, "'adamW' is none of sgd, momentum", "--optimizer", "did you mean adamw?"),
    ],
)
def test_free_memory_of_what_cannot_be_meant_says_what_was_expected(changes, what, where, fix):
    error = refused(**{"precision": "int8", **changes})
    assert what in error.what
    assert error.where == where
    assert fix in error.fix


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3669MB", 3_669_000_000),
        ("15.75 GiB", 16_911_433_728),
        ("16gb", 16_000_000_000),
        (" 512 kB ", 512_000),
        ("1b", 1),
    ],
)
def test_size_in_words_is_bytes(text, size):
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["3669", "MB", "-3 GB", "3 potatoes", "1e9 B", ""])
def test_size_that_is_none_says_how_to_write_it(text):
    with pytest.raises(UserError) as caught:
        num_bytes(text, "--free-memory")
    assert caught.value.what.startswith(f"{text!r} is no size, expected a number and one of B, kB, MB")
    assert caught.value.where == "--free-memory"
    assert "write it as 3669MB" in caught.value.fix
