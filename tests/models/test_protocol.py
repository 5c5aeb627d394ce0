"""Every way to break the protocol with auxiliary heads and scheduled numbers, and what is then said."""

import inspect

import numpy as np
import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput, checked, head_logits, scheduled_numbers

TRIALS, BINS, CLASSES = 2, 7, 5
FEATURES_BTC = torch.zeros(TRIALS, BINS, 3).bfloat16()
LOGITS_BPK = torch.zeros(TRIALS, BINS, CLASSES).bfloat16()
STEPS_B = torch.ones(TRIALS).int()


class Echo:
    """One step a bin; scheduled as it is told."""

    def __init__(self, numbers=(0.5,)):
        self.numbers = numbers

    def output_steps(self, input_bins):
        return input_bins

    def scheduled(self, step):
        return self.numbers


def with_heads(*heads):
    return DecoderOutput(LOGITS_BPK, STEPS_B, heads=heads)


def refused(function, *arguments):
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return caught.value.what, caught.value.where, caught.value.fix


def test_checked_gives_back_an_output_whose_heads_fit():
    output = with_heads(AuxiliaryHead("a", LOGITS_BPK), AuxiliaryHead("b", LOGITS_BPK, 0.1))
    assert checked(output, FEATURES_BTC, CLASSES, Echo()) is output


@pytest.mark.parametrize(
    ("heads", "what", "fix"),
    [
        ([("a", LOGITS_BPK)], "a head is tuple, expected AuxiliaryHead", "return heads=(AuxiliaryHead("),
        (
            [AuxiliaryHead("a", LOGITS_BPK[:, :, 1:])],
            "logits of the head 'a' are (2, 7, 4), expected (2, steps, 5)",
            "return heads=(AuxiliaryHead(",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK.float())],
            "logits of the head 'a' are torch.float32 for features in torch.bfloat16",
            "keep the model's dtype",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK[:, 1:])],
            "7 bins gave logits of the head 'a' of 6 steps, output_steps(7) is 7",
            "follow one rule",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK), AuxiliaryHead("a", LOGITS_BPK)],
            "the heads are called ['a', 'a']",
            "a name of its own",
        ),
        ([AuxiliaryHead("", LOGITS_BPK)], "the heads are called ['']", "a name of its own"),
    ],
)
def test_checked_of_a_head_that_does_not_fit_names_it(heads, what, fix):
    found = refused(checked, with_heads(*heads), FEATURES_BTC, CLASSES, Echo())
    assert found[:2] == (what, "forward of Echo")
    assert fix in found[2]


@pytest.mark.parametrize(
    ("loss", "found"),
    [(torch.zeros(()), "torch.float32 ()"), (torch.zeros(TRIALS).bfloat16(), "torch.bfloat16 (2,)")],
)
def test_checked_of_a_loss_that_does_not_fit_says_how(loss, found):
    what, where, fix = refused(checked, DecoderOutput(LOGITS_BPK, STEPS_B, loss), FEATURES_BTC, CLASSES, Echo())
    assert what == f"the auxiliary loss is {found}, expected torch.float32 (2,)"
    assert where == "forward of Echo"
    assert ".float()" in fix


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.tensor(0.5), "a Tensor"), (np.float32(0.5), "a float32"), ("1", "a str"), (None, "a NoneType"),
        (float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5"), (True, "True"),
    ],
)  # fmt: skip
def test_checked_of_a_weight_that_is_no_number_from_0_up_says_whose(weight, found):
    main, head = DecoderOutput(LOGITS_BPK, STEPS_B, weight=weight), with_heads(AuxiliaryHead("a", LOGITS_BPK, weight))
    for output, what in ((main, "the main loss"), (head, "the head 'a'")):
        assert refused(checked, output, FEATURES_BTC, CLASSES, Echo()) == (
            f"the weight of {what} is {found}, expected a finite Python number from 0 up",
            "forward of Echo",
            "give a float; what changes while training goes through `scheduled` and the model's own loss",
        )


def test_checked_takes_weights_of_0_and_whole_numbers():
    output = DecoderOutput(LOGITS_BPK, STEPS_B, heads=(AuxiliaryHead("a", LOGITS_BPK, 2),), weight=0.0)
    assert checked(output, FEATURES_BTC, CLASSES, Echo()) is output


def test_head_logits_are_the_main_ones_or_those_of_a_name():
    output = with_heads(AuxiliaryHead("a", LOGITS_BPK + 1))
    assert head_logits(output, "", Echo()) is LOGITS_BPK
    assert head_logits(output, "a", Echo()) is output.heads[0].logits_BPK


@pytest.mark.parametrize(
    ("names", "known", "fix"),
    [(("a", "b"), "a, b", "use --head with one of a, b, or leave it away"), ((), "none", "leave --head away")],
)
def test_head_logits_of_an_unknown_name_lists_the_heads(names, known, fix):
    output = with_heads(*(AuxiliaryHead(name, LOGITS_BPK) for name in names))
    found = refused(head_logits, output, "c", Echo())
    assert found == (f"there is no auxiliary head 'c'; known: {known}", "forward of Echo", fix)


def test_scheduled_numbers_are_one_float32_vector_or_nothing():
    (numbers_N,) = scheduled_numbers(Echo([0.5, 2]), 3)
    assert numbers_N.dtype == torch.float32
    assert numbers_N.tolist() == [0.5, 2.0]
    assert scheduled_numbers(torch.nn.Linear(2, 2), 3) == []


@pytest.mark.parametrize("numbers", [0.5, None, ["high"], [np.inf], [[1.0], [2.0, 3.0]]])
def test_scheduled_numbers_that_are_none_say_what_was_found(numbers):
    what, where, fix = refused(scheduled_numbers, Echo(numbers), 3)
    assert what == f"scheduled(3) gave {numbers!r}, expected a sequence of finite numbers"
    assert where == "scheduled of Echo"
    assert "one number for each thing" in fix


@pytest.mark.parametrize("numbers", [(), (0.5,), (0.5, 1.0, 2.0)])
def test_scheduled_numbers_of_another_count_than_before_say_both(numbers):
    assert refused(scheduled_numbers, Echo(numbers), 3, 2) == (
        f"scheduled(3) gave {len(numbers)} numbers, at the updates before 2",
        "scheduled of Echo",
        "return one number for each thing that is scheduled, as many at every step",
    )


class Failing(Echo):
    """Has a fault in its schedule."""

    def scheduled(self, step):
        return [self.rates[step]]


def test_scheduled_that_fails_names_its_line():
    what, where, fix = refused(scheduled_numbers, Failing(), 3)
    assert what == "scheduled(3) failed: AttributeError: 'Failing' object has no attribute 'rates'"
    lines, first = inspect.getsourcelines(Failing.scheduled)
    assert where == f"{__file__}:{first + len(lines) - 1}"
    assert fix == "correct the line in scheduled of Failing"


def test_scheduled_that_raises_a_user_error_is_left_alone():
    class Refusing(Echo):
        def scheduled(self, step):
            raise UserError("a", "b", "c")

    assert refused(scheduled_numbers, Refusing(), 3) == ("a", "b", "c")


def test_scheduled_numbers_of_a_model_with_a_layer_or_list_of_that_name_are_none():
    class Layered(torch.nn.Module):
        def __init__(self, scheduled):
            super().__init__()
            self.scheduled = scheduled

    assert scheduled_numbers(Layered(torch.nn.Linear(2, 2)), 3) == []
    assert scheduled_numbers(Layered([0.5]), 3) == []
